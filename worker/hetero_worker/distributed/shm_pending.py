"""Receipts over shared-memory links that were posted and may be waited for, in order."""

from __future__ import annotations

from typing import Final, Protocol

import torch

OUT_OF_TURN: Final = "tensors of one link must be waited for in the order in which they were posted"


class MessageReceiver(Protocol):
    """The receiving end of a link."""

    def take(self, out: torch.Tensor, first: int) -> None:
        """Copy the messages from number `first` on into `out`. Raises ValueError when it is not their turn."""
        ...


class PendingMessages:
    """A posted receipt of messages from number `first` on."""

    def __init__(self, receiver: MessageReceiver, out: torch.Tensor, first: int) -> None:
        self._receiver = receiver
        self._out = out
        self._first = first
        self._done = False

    def wait(self) -> torch.Tensor:
        if not self._done:
            self._receiver.take(self._out, self._first)
            self._done = True
        return self._out

"""LinkAreas: where the tensors of links lie in shared memory, for whoever fills or reads these places itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hetero_worker.distributed.routes import Link


class AreaSource(Protocol):
    """The sending end of a link."""

    def begin(self, num_bytes: int) -> Sequence[torch.Tensor] | None:
        """Where the link's next tensor may be written now, uint8 pieces; None: there is no room, it is `send`'s then.

        Each is followed by its `publish`, or `send`, in the order in which they began.
        """
        ...

    def publish(self, num_bytes: int) -> None:
        """The tensor has been written: receivers may read it. Raises as Exchange does."""
        ...


class AreaReceiver(Protocol):
    """A receiving end of a link."""

    @property
    def batch_bytes(self) -> int:
        """Most bytes that may be held before they are given back; others find them in the source's way."""
        ...

    def post_bytes(self, num_bytes: int) -> int:
        """Post the receipt of the link's next tensor: the number of its first message."""
        ...

    def arrived(self, first: int, begin: int, num_bytes: int) -> Sequence[torch.Tensor]:
        """Where bytes from `begin` on, a multiple of batch_bytes, of the tensor of message `first` lie, once there.

        Up to batch_bytes. What was held before must have been given back. Raises as Exchange does, and ValueError when
        it is not the tensor's turn.
        """
        ...

    def give_back(self, num_bytes: int) -> None:
        """They have been read: the source may overwrite them. Nothing happens once the exchange has ended."""
        ...


@dataclass(frozen=True, slots=True)
class LinkAreas:
    """One rank's; without any, `problem` says why."""

    problem: str = ""
    sources: Mapping[Link, AreaSource] = field(default_factory=dict)
    receivers: Mapping[Link, AreaReceiver] = field(default_factory=dict)
    while_waiting: Callable[[Callable[[], None]], None] = lambda _: None
    """Has something done whenever this rank has waited in the exchange for long."""

"""Links over Gloo: a broadcast in a process group of the source and its receivers.

Gloo's own send and receive are not used: waiting for them with a timeout breaks the connection when it passes, so
they cannot be polled, and what cannot be polled cannot be aborted. A broadcast starts when it is asked for, on Gloo's
threads, on both ends; so a posted receipt proceeds while the rank computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from hetero_worker.distributed.exchange import Arrived, PendingTensor, TrafficCounter
from hetero_worker.distributed.gloo_rounds import GlooWaits, start_broadcast
from hetero_worker.distributed.routes import Link
from hetero_worker.errors import ExchangeTimeout

MAX_UNSENT: Final = 16
"""Tensors that may be on their way over one link: each is a copy in memory."""


class GlooLink:
    """One rank's end of a link, whichever it is. In order."""

    def __init__(self, group: dist.ProcessGroup, link: Link, *, waits: GlooWaits, counter: TrafficCounter) -> None:
        self._group = group
        self._counter = counter
        self._link = link
        self._waits = waits
        self._unsent: deque[dist.Work] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        self._waits.check_open()
        deadline = self._waits.deadline()
        while self._unsent and (len(self._unsent) >= MAX_UNSENT or self._unsent[0].is_completed()):
            if not self._waits.await_work(self._unsent.popleft(), deadline):
                raise ExchangeTimeout(self._late(self._link.receivers, "take what was sent to them"))
        if tensor.numel():
            self._counter.count_message(tensor.nbytes)
            self._unsent.append(start_broadcast(tensor.clone(), self._link.source, self._group))

    def receive(self, out: torch.Tensor) -> PendingTensor:
        self._waits.check_open()
        if not out.numel():
            return Arrived(out)
        return PendingBroadcast(self.await_receipt, out, start_broadcast(out, self._link.source, self._group))

    def await_receipt(self, work: dist.Work) -> None:
        self._waits.check_open()
        if not self._waits.await_work(work, self._waits.deadline()):
            raise ExchangeTimeout(self._late((self._link.source,), "send"))

    def _late(self, ranks: tuple[int, ...], did_not: str) -> str:
        return f"rank(s) {', '.join(map(str, ranks))} did not {did_not} within {self._waits.timeout_s:g} s"


class PendingBroadcast:
    """A posted receipt, of a link that is a broadcast in a group of its own."""

    def __init__(self, await_receipt: Callable[[dist.Work], None], out: torch.Tensor, work: dist.Work) -> None:
        self._await_receipt = await_receipt
        self._out = out
        self._work = work

    def wait(self) -> torch.Tensor:
        self._await_receipt(self._work)
        return self._out

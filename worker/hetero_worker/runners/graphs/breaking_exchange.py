"""BreakingExchange: the Exchange of a forward pass with padded rows. Calls that cross the host break a recording.

Only the step's own rows travel over the host, so ranks on host cores compute no padding and need not know of it. Sums
among GPU ranks stay within segments if the backend can record them. They then sum padded rows, the same number on all
GPU ranks (`padding`). Otherwise they break the recording, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from hetero_worker.distributed.exchange import Exchange, PendingSend, PendingTensor, SumExchange
from hetero_worker.distributed.hierarchical import HierarchicalExchange
from hetero_worker.distributed.routes import Link
from hetero_worker.runners.graphs.breaks import Breaks, CurrentStep

T = TypeVar("T")


class BreakingExchange:
    """Exchange for tensors of [padded rows, …]."""

    def __init__(self, exchange: Exchange, breaks: Breaks, step: CurrentStep, *, records_device_sums: bool) -> None:
        self._exchange = exchange
        self._breaks = breaks
        self._step = step
        self._records_device_sums = records_device_sums
        self.rank = exchange.rank
        self.world_size = exchange.world_size
        self.link_bytes = exchange.link_bytes

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        """Return the exchange of a subgroup; it breaks the recording unless its sums stay on devices."""
        sums = self._exchange.among(ranks)
        if sums.world_size == 1 or self._stays_on_devices(ranks):
            return sums
        return _BreakingSum(sums, self._breaks, self._step)

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:  # noqa: ARG002
        """Raise RuntimeError: a forward pass gathers no host tensors."""
        raise RuntimeError("no forward pass gathers host tensors")

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:  # noqa: ARG002
        """Raise RuntimeError: a forward pass broadcasts no host tensors."""
        raise RuntimeError("no forward pass broadcasts host tensors")

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        """Send the step's own rows, outside the recording."""
        self._breaks.call(lambda: self._exchange.send(self._step.own_rows(tensor), link))

    def is_staged(self, link: Link) -> bool:
        """Return True if this rank's device copies to or from the host for the link."""
        return self._exchange.is_staged(link)

    def start_send(self, tensor: torch.Tensor, link: Link) -> PendingSend:
        """Begin and later finish a send of the step's own rows, each outside the recording."""
        return _BreakingSend(lambda: self._exchange.start_send(self._step.own_rows(tensor), link), breaks=self._breaks)

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:
        """Post and later take a receipt of the step's own rows, each outside the recording."""

        def post() -> PendingTensor:
            self._step.clear_padding(out)
            return self._exchange.receive(self._step.own_rows(out), link)

        return _BreakingReceipt(post, out, breaks=self._breaks)

    def _stays_on_devices(self, ranks: tuple[int, ...]) -> bool:
        exchange = self._exchange
        return (
            self._records_device_sums and isinstance(exchange, HierarchicalExchange) and exchange.sums_on_devices(ranks)
        )


class _BreakingSum:
    """SumExchange that meets over the host, or whose backend's work cannot be recorded."""

    def __init__(self, sums: SumExchange, breaks: Breaks, step: CurrentStep) -> None:
        self._sums = sums
        self._breaks = breaks
        self._step = step
        self.world_size = sums.world_size

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        self._breaks.call(lambda: self._sum(tensor, contributors))

    def _sum(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        self._step.clear_padding(tensor)
        self._sums.all_reduce(self._step.own_rows(tensor), contributors)


class _BrokenOff(Generic[T]):
    """Base of an operation that ends in another call than it begins in. Every replay begins and ends it again."""

    def __init__(self, begin: Callable[[], T], *, breaks: Breaks) -> None:
        self._begin = begin
        self._breaks = breaks
        self._begun = breaks.call(self._begin_again)

    def _begin_again(self) -> T:
        self._begun = self._begin()
        return self._begun


class _BreakingSend(_BrokenOff[PendingSend]):
    """PendingSend that begins when it is made."""

    def finish(self) -> None:
        self._breaks.call(self._finish)

    def _finish(self) -> None:
        self._begun.finish()


class _BreakingReceipt(_BrokenOff[PendingTensor]):
    """PendingTensor that is posted when it is made."""

    def __init__(self, post: Callable[[], PendingTensor], out: torch.Tensor, *, breaks: Breaks) -> None:
        super().__init__(post, breaks=breaks)
        self._out = out

    def wait(self) -> torch.Tensor:
        self._breaks.call(self._await)
        return self._out

    def _await(self) -> None:
        self._begun.wait()

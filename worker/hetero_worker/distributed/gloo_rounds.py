"""Rounds of a group, or subgroup, over Gloo, and how to wait for it.

Everything is built of one step: those who contribute broadcast their bytes to all, then every rank adds what it has
in ascending rank order. Gloo's own reductions are not used: their order depends on the algorithm.

Gloo cannot be interrupted. A blocked call polls instead: after `abort` it leaves its operation behind and raises
within a poll. What was left behind ends when its sockets break or the group's timeout passes, and until then the
process group cannot be destroyed; whoever cannot wait that long ends the process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from hetero_worker.distributed.exchange import TrafficCounter, check_summable, sum_in_order
from hetero_worker.errors import ExchangeAborted, ExchangeError, ExchangeTimeout

_POLL: Final = timedelta(milliseconds=20)


class GlooWaits:
    """How one rank waits for what it has asked of Gloo. One thread waits; any thread may abort.

    `aborted` is asked too: an abort may come before anybody knows these waits.
    """

    def __init__(self, *, timeout_s: float, aborted: Callable[[], bool] = lambda: False) -> None:
        self.timeout_s = timeout_s
        self._aborted_elsewhere = aborted
        self._aborted = False

    def abort(self) -> None:
        self._aborted = True

    def check_open(self) -> None:
        if self._is_aborted:
            raise ExchangeAborted("the epoch was aborted")

    @property
    def _is_aborted(self) -> bool:
        return self._aborted or self._aborted_elsewhere()

    def deadline(self) -> float:
        return time.monotonic() + self.timeout_s

    def await_work(self, work: dist.Work, deadline: float) -> bool:
        """False when the time is over. Raises ExchangeAborted, ExchangeError."""
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # the poll's own timeout, or a failure that is told below
                work.wait(_POLL)
            if self._is_aborted:
                raise ExchangeAborted("the epoch was aborted while waiting for a peer")
            if time.monotonic() > deadline:
                return work.is_completed()
        try:
            work.wait()
        except RuntimeError as error:
            raise ExchangeError(f"the exchange with a peer failed: {error}") from error
        return True


def start_broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
    """Bytes travel, so that the type does not matter. `source` is a rank of the world."""
    work: dist.Work | None = dist.broadcast(tensor.view(-1).view(torch.uint8), source, group=group, async_op=True)
    if work is None:
        raise ExchangeError("this rank is no member of the process group")
    return work


class GlooRounds:
    """One rank's end; see the module. Ranks are named by their number in the whole group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        *,
        rank: int,
        waits: GlooWaits,
        counter: TrafficCounter | None = None,
    ) -> None:
        self._group = group
        self._counter = counter or TrafficCounter()
        self._ranks = ranks
        self._rank = rank
        self._waits = waits

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        check_summable(tensor)
        self._share(tensor, sorted(set(contributors)))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._share(tensor, [source])

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        own = self._ranks.index(self._rank)
        if len(counts) != len(self._ranks) or tensor.numel() != counts[own]:
            raise ValueError(f"counts {list(counts)} do not fit {tensor.numel()} elements of rank {self._rank}")
        gathered = [torch.empty(count, dtype=tensor.dtype) for count in counts]
        gathered[own].copy_(tensor)
        self._send_all(dict(zip(self._ranks, gathered, strict=True)))
        return gathered

    def _share(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        if not contributors or not set(contributors) <= set(self._ranks):
            raise ValueError(f"contributors {contributors} are no ranks of a group of {self.world_size}: {self._ranks}")
        parts = {rank: tensor if rank == self._rank else torch.empty_like(tensor) for rank in contributors}
        self._send_all(parts)
        if contributors != [self._rank]:
            total = torch.empty_like(tensor)
            sum_in_order([parts[rank] for rank in contributors], total)
            tensor.copy_(total)

    def _send_all(self, parts: Mapping[int, torch.Tensor]) -> None:
        """Every rank's part reaches all."""
        self._waits.check_open()
        deadline = self._waits.deadline()
        pending = {source: start_broadcast(part, source, self._group) for source, part in parts.items() if part.numel()}
        if pending:
            self._counter.count_round(parts[self._rank].nbytes if self._rank in parts else 0)
        for work in pending.values():
            if not self._waits.await_work(work, deadline):
                raise ExchangeTimeout(self._late(pending))

    def _late(self, pending: Mapping[int, dist.Work]) -> str:
        """Gloo forwards along a tree, so a rank that waits behind the late one is named with it."""
        late = [r for r, work in pending.items() if r != self._rank and not work.is_completed()]
        peers = f"rank(s) {', '.join(map(str, late))}" if late else "the receiving ranks"
        return f"the exchange with {peers} was not done within {self._waits.timeout_s:g} s"

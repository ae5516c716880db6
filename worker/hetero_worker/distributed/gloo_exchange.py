"""GlooExchange: the exchange for any network, and the reference that native exchanges are tested against.

A round is one step: those who contribute broadcast their bytes to all, then every rank adds what it has in ascending
rank order. Gloo's own reductions are not used, because their order depends on the algorithm. A link is a broadcast in a
process group of the source and its receivers. Gloo's send and receive are not used: waiting for them with a timeout
breaks the connection when it passes, so they cannot be polled, and without a poll there is no abort. A broadcast starts
on Gloo's threads when it is called, on both ends, so a posted receipt proceeds while the rank computes.

Gloo cannot be interrupted. A blocked call polls instead: after `abort` it leaves its operation behind and raises within
a poll. The operation ends when its sockets break or the group's timeout passes. Until then the process group cannot be
destroyed; a process that cannot wait that long has to end.

One thread calls; any thread may abort.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from hetero_worker.distributed.exchange import (
    Arrived,
    GroupedExchange,
    PendingTensor,
    Traffic,
    TrafficCounter,
    check_contributors,
    check_counts,
    check_summable,
    sum_in_order,
)
from hetero_worker.distributed.routes import Link, Ranks
from hetero_worker.errors import ExchangeAborted, ExchangeError, ExchangeTimeout

LINK_BYTES: Final = 32 * 1024**2
"""Bound on the copies of a link's tensors that are under way. Their number is bounded by MAX_UNSENT."""
MAX_UNSENT: Final = 16
"""Tensors that may be under way over one link: each is a copy in memory."""
_POLL: Final = timedelta(milliseconds=20)

StartBroadcast = Callable[[torch.Tensor, int], dist.Work]
"""Starts the broadcast of a tensor from a source, which is a rank of the whole group."""


class GlooWaits:
    """Waits of one rank for what it has started with Gloo. One thread waits; any thread may abort."""

    def __init__(self, *, timeout_s: float, aborted: Callable[[], bool] = lambda: False) -> None:
        """`aborted` is polled too, for an abort that comes before anybody can call `abort` here."""
        self.timeout_s = timeout_s
        self._aborted_elsewhere = aborted
        self._aborted = False
        self.waited_s = 0.0
        """Seconds of waits so far."""

    def abort(self) -> None:
        """Make a blocked or later wait raise ExchangeAborted."""
        self._aborted = True

    def check_open(self) -> None:
        """Raise ExchangeAborted after an abort."""
        if self.is_aborted:
            raise ExchangeAborted("the epoch was aborted")

    def deadline(self) -> float:
        """Return the end of a wait that begins now, monotonic seconds."""
        return time.monotonic() + self.timeout_s

    def await_work(self, work: dist.Work, deadline: float) -> bool:
        """Wait until the work's result can be used; return False when the time is over.

        Raises ExchangeAborted, ExchangeError.
        """
        began_s = time.monotonic()
        try:
            return self._await(work, deadline)
        finally:
            self.waited_s += time.monotonic() - began_s

    def _await(self, work: dist.Work, deadline: float) -> bool:
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # the poll's own timeout, or a failure that is raised below
                work.wait(_POLL)
            if self.is_aborted:
                raise ExchangeAborted("the epoch was aborted while waiting for a peer")
            if time.monotonic() > deadline:
                return work.is_completed()
        try:
            work.wait()
        except RuntimeError as error:
            raise ExchangeError(f"the exchange with a peer failed: {error}") from error
        return True

    def await_sent(self, work: dist.Work, deadline: float) -> bool:
        """Wait until the work is done and its tensor free; return False when the time is over."""
        return self.await_work(work, deadline)

    @property
    def is_aborted(self) -> bool:
        """True after an abort."""
        return self._aborted or self._aborted_elsewhere()


class GlooRounds:
    """One rank's end of a group's or subgroup's rounds. Ranks are named by their number in the whole group."""

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
        self.world_size = len(ranks)

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """Sum in place, as SumExchange.all_reduce."""
        check_summable(tensor)
        self._share(tensor, sorted(set(contributors)))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace the tensor by the source's, as Exchange.broadcast."""
        self._share(tensor, [source])

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's tensor, as Exchange.all_gather. Raises ValueError if `counts` do not fit."""
        own = self._ranks.index(self._rank)
        check_counts(tensor, counts, rank=self._rank, ranks=self._ranks)
        gathered = [torch.empty(count, dtype=tensor.dtype) for count in counts]
        gathered[own].copy_(tensor)
        self._send_all(dict(zip(self._ranks, gathered, strict=True)))
        return gathered

    def _share(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        check_contributors(contributors, self._ranks)
        parts = {rank: tensor if rank == self._rank else torch.empty_like(tensor) for rank in contributors}
        self._send_all(parts)
        if contributors != [self._rank]:
            total = torch.empty_like(tensor)
            sum_in_order([parts[rank] for rank in contributors], total)
            tensor.copy_(total)

    def _send_all(self, parts: Mapping[int, torch.Tensor]) -> None:
        """Broadcast every rank's part to all."""
        self._waits.check_open()
        deadline = self._waits.deadline()
        pending = {source: _broadcast(self._group, part, source) for source, part in parts.items() if part.numel()}
        if pending:
            self._counter.count_round(parts[self._rank].nbytes if self._rank in parts else 0)
        for work in pending.values():
            if not self._waits.await_work(work, deadline):
                raise ExchangeTimeout(self._late(pending))

    def _late(self, pending: Mapping[int, dist.Work]) -> str:
        """Name the late ranks. Gloo forwards along a tree, so a rank that waits behind a late one is named with it."""
        late = [r for r, work in pending.items() if r != self._rank and not work.is_completed()]
        peers = f"rank(s) {', '.join(map(str, late))}" if late else "the receiving ranks"
        return f"the exchange with {peers} was not done within {self._waits.timeout_s:g} s"


class BroadcastLink:
    """One rank's end of a link that is a broadcast in a group of its own. Tensors arrive in order."""

    def __init__(
        self, start: StartBroadcast, link: Link, *, waits: GlooWaits, counter: TrafficCounter | None = None
    ) -> None:
        self._start = start
        self._counter = counter or TrafficCounter()
        self._link = link
        self._waits = waits
        self._unsent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """Send a copy, as Exchange.send."""
        self._waits.check_open()
        deadline = self._waits.deadline()
        while self._unsent and (len(self._unsent) >= MAX_UNSENT or self._unsent[0][0].is_completed()):
            if not self._waits.await_sent(self._unsent.popleft()[0], deadline):
                raise ExchangeTimeout(self._late(self._link.receivers, "take what was sent to them"))
        if tensor.numel():
            self._counter.count_message(tensor.nbytes)
            copy = tensor.clone()
            self._unsent.append((self._start(copy, self._link.source), copy))

    def receive(self, out: torch.Tensor) -> PendingTensor:
        """Post a receipt, as Exchange.receive."""
        self._waits.check_open()
        if not out.numel():
            return Arrived(out)
        return _PendingBroadcast(self, out, self._start(out, self._link.source))

    def await_receipt(self, work: dist.Work) -> None:
        """Wait for a posted receipt. Raises as Exchange does."""
        self._waits.check_open()
        if not self._waits.await_work(work, self._waits.deadline()):
            raise ExchangeTimeout(self._late((self._link.source,), "send"))

    def _late(self, ranks: tuple[int, ...], did_not: str) -> str:
        return f"rank(s) {', '.join(map(str, ranks))} did not {did_not} within {self._waits.timeout_s:g} s"


class _PendingBroadcast:
    """PendingTensor of a BroadcastLink."""

    def __init__(self, link: BroadcastLink, out: torch.Tensor, work: dist.Work) -> None:
        self._link = link
        self._out = out
        self._work = work

    def wait(self) -> torch.Tensor:
        self._link.await_receipt(self._work)
        return self._out


class GlooExchange(GroupedExchange):
    """HostExchange over Gloo process groups; see the module.

    `rounds` and `links` are the process groups of all ranks, of subgroups and of links; a rank uses those it is in.
    """

    link_bytes = LINK_BYTES

    def __init__(
        self,
        rounds: Mapping[Ranks, dist.ProcessGroup],
        links: Mapping[Link, dist.ProcessGroup],
        *,
        rank: int,
        timeout_s: float,
    ) -> None:
        self._waits = waits = GlooWaits(timeout_s=timeout_s)
        self._counter = counter = TrafficCounter()
        groups = {
            ranks: GlooRounds(group, ranks, rank=rank, waits=waits, counter=counter)
            for ranks, group in rounds.items()
            if rank in ranks
        }
        super().__init__(rank, groups)
        self._links = {
            link: BroadcastLink(partial(_broadcast, group), link, waits=waits, counter=counter)
            for link, group in links.items()
            if rank in link.ranks
        }

    @property
    def traffic(self) -> Traffic:
        """Amount that this rank has moved so far."""
        return replace(self._counter.total, seconds=self._waits.waited_s)

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        """Send over a link, as Exchange.send."""
        self._links[link].send(tensor)

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:
        """Post a receipt, as Exchange.receive."""
        return self._links[link].receive(out)

    def abort(self) -> None:
        """Make a blocked or later call raise ExchangeAborted."""
        self._waits.abort()

    def close(self) -> None:
        """End all waits. The process groups belong to the epoch, which keeps them for later plans."""
        self._waits.abort()


def _broadcast(group: dist.ProcessGroup, tensor: torch.Tensor, source: int) -> dist.Work:
    """Start a broadcast of bytes, so that any type can travel. `source` is a rank of the whole group."""
    work: dist.Work | None = dist.broadcast(tensor.view(-1).view(torch.uint8), source, group=group, async_op=True)
    if work is None:
        raise ExchangeError("this rank is no member of the process group")
    return work

"""HierarchicalExchange: the Exchange of a group with GPU ranks.

A sum among GPU ranks G and CPU ranks C, with rows of b bytes:

    device group:  reduce to the first of G, the leader       b over each device's link
    host:          all-reduce among the leader and C          b off the leader's device, one round of b a contributor
    device group:  broadcast from the leader                  b onto it, b over each device's link

A sum among G alone is one device all-reduce (a broadcast if only one contributes); a sum among C alone is one host
round. So only a leader moves activations through the host. The host adds in fp32 in rank order, the devices as their
backend does. In the end all ranks have the bits of the leader or of the host round.

Nothing but the summed tensor changes. GPU ranks that do not contribute zero theirs, which is overwritten anyway, and
the broadcast overwrites what a reduction leaves behind.

Large tensors cross the host in slices (`STAGED_BYTES`), the same on all ranks that meet there, so copies off the
device, rounds and copies back overlap: slice k + 1 leaves the device while the host sums slice k and slice k - 1 goes
back. A link between GPU ranks is their devices'. Other links are the host's, and GPU ranks' devices copy to and from
its memory (staging.py). Small host tensors (sampling, votes) travel over the host exchange.

A leader that lends (models/lending.py) overlaps, too: its device copies off what is lent while it computes its own part
of the MLP, and takes in each helper's sum as soon as it arrives. Only the add waits for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import torch

from hetero_worker.distributed.device_group import DeviceGroup
from hetero_worker.distributed.exchange import (
    SENT,
    Arrived,
    Exchange,
    HostExchange,
    LocalExchange,
    PendingSend,
    PendingTensor,
    SumExchange,
    check_contributors,
    check_summable,
)
from hetero_worker.distributed.gloo_exchange import BroadcastLink
from hetero_worker.distributed.routes import Link, Ranks, device_part, host_part
from hetero_worker.distributed.staging import DirectLinks, Staging

STAGED_BYTES: Final = 512 * 1024
"""Largest slice that crosses the host."""


class HierarchicalExchange:
    """One rank's end, of a GPU rank or CPU rank; see the module.

    `host` is made with `routes_of(plan, num_gpu_ranks)`. `host_links` are a GPU rank's links over the host; by default
    they go through the staging's buffers.
    """

    def __init__(
        self,
        host: HostExchange,
        *,
        num_gpu_ranks: int,
        groups: Mapping[Ranks, DeviceGroup],
        links: Mapping[Link, BroadcastLink],
        staging: Staging,
        host_links: DirectLinks | None = None,
    ) -> None:
        self.host = host
        """Exchange that carries everything that crosses the host."""
        self.rank = host.rank
        self.world_size = host.world_size
        self.link_bytes = host.link_bytes
        self._num_gpu_ranks = num_gpu_ranks
        self._groups = groups
        self._links = links
        self._staging = staging
        self._host_links = host_links or DirectLinks(host, staging)
        self.is_gpu_rank = host.rank < num_gpu_ranks
        """True if this rank computes on a GPU."""
        self._sums: dict[Ranks, SumExchange] = {}

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's host tensor, as Exchange.all_gather."""
        return self.host.all_gather(tensor, counts)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace the host tensor by the source's, as Exchange.broadcast."""
        self.host.broadcast(tensor, source)

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        """Return the exchange of a subgroup, as Exchange.among."""
        if ranks not in self._sums:
            self._sums[ranks] = self._make_sum(ranks)
        return self._sums[ranks]

    def sums_on_devices(self, ranks: Ranks) -> bool:
        """Return True if only devices sum among these ranks, so that a graph may hold the sums."""
        return device_part(ranks, self._num_gpu_ranks) == ranks

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        """Send over a link, as Exchange.send."""
        self.start_send(tensor, link).finish()

    def is_staged(self, link: Link) -> bool:
        """Return True if this rank's device copies to or from the host for the link."""
        return self.is_gpu_rank and link not in self._links

    def start_send(self, tensor: torch.Tensor, link: Link) -> PendingSend:
        """Begin a send, as Exchange.start_send."""
        if link in self._links:
            self._links[link].send(tensor)
            return SENT
        if self.is_gpu_rank:
            return self._host_links.start_send(tensor, link)
        return self.host.start_send(tensor, link)

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:
        """Post a receipt, as Exchange.receive."""
        if link in self._links:
            return self._links[link].receive(out)
        if self.is_gpu_rank:
            return self._host_links.receive(out, link)
        return self.host.receive(out, link)

    def _make_sum(self, ranks: Ranks) -> SumExchange:
        if ranks == (self.rank,):
            return LocalExchange()
        on_host, gpus = host_part(ranks, self._num_gpu_ranks), device_part(ranks, self._num_gpu_ranks)
        if not gpus:
            return self.host.among(ranks)
        host = self.host.among(on_host) if self.rank in on_host and len(on_host) > 1 else None
        if not self.is_gpu_rank:
            assert host is not None, "a CPU rank of the subgroup meets its leader on the host"
            return CpuRankSum(host, ranks, gpus=gpus)
        group = self._groups[gpus] if len(gpus) > 1 else None
        if len(on_host) == 1:
            return _DeviceSum(group, gpus, rank=self.rank)
        return _MixedSum(group, host, ranks, gpus=gpus, rank=self.rank, staging=self._staging)


class CpuRankSum:
    """SumExchange among GPU and CPU ranks, on a CPU rank: one round of `host` for each slice."""

    def __init__(self, host: SumExchange, ranks: Ranks, *, gpus: Ranks) -> None:
        self.host = host
        self.world_size = len(ranks)
        self._ranks = ranks
        self._gpus = gpus

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """Sum in place, as SumExchange.all_reduce."""
        for part, meeting in self.rounds(tensor, contributors):
            self.host.all_reduce(part, meeting)

    def rounds(self, tensor: torch.Tensor, contributors: Sequence[int]) -> list[tuple[torch.Tensor, list[int]]]:
        """Return the rounds of `host` that make up a sum: a slice of `tensor` to sum in place, and its contributors.

        Raises TypeError, ValueError for what cannot be summed.
        """
        _check(tensor, contributors, self._ranks)
        meeting = _with_leader(contributors, self._gpus)
        return [(part, meeting) for part in _slices(tensor)]


class _DeviceSum:
    """SumExchange among GPU ranks only: one device all-reduce, or a broadcast."""

    def __init__(self, group: DeviceGroup | None, gpus: Ranks, *, rank: int) -> None:
        self._group = group
        self._gpus = gpus
        self._rank = rank
        self.world_size = len(gpus)

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        _check(tensor, contributors, self._gpus)
        if self._group is None or not tensor.numel():
            return
        if len(set(contributors)) == 1:
            self._group.broadcast(tensor, contributors[0])
            return
        if self._rank not in contributors:
            tensor.zero_()
        self._group.all_reduce(tensor)


class _MixedSum:
    """SumExchange among GPU and CPU ranks, on a GPU rank; see the module."""

    def __init__(
        self,
        group: DeviceGroup | None,
        host: SumExchange | None,
        ranks: Ranks,
        *,
        gpus: Ranks,
        rank: int,
        staging: Staging,
    ) -> None:
        self._group = group
        self._host = host
        self._ranks = ranks
        self._gpus = gpus
        self._rank = rank
        self._staging = staging
        self.world_size = len(ranks)

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        _check(tensor, contributors, self._ranks)
        if not tensor.numel():
            return
        self._gather_at_leader(tensor, [rank for rank in contributors if rank in self._gpus])
        if self._host is not None:
            self._exchange(tensor, _with_leader(contributors, self._gpus), self._host)
        if self._group is not None:
            self._group.broadcast(tensor, self._gpus[0])

    def _gather_at_leader(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """Sum the GPU ranks' tensors into the leader's; the others' become undefined."""
        if self._group is None or not set(contributors) - {self._gpus[0]}:
            return
        if self._rank not in contributors:
            tensor.zero_()
        self._group.reduce(tensor, self._gpus[0])

    def _exchange(self, tensor: torch.Tensor, contributors: Sequence[int], host: SumExchange) -> None:
        """Exchange the leader's tensor on the host. Slices leave the device while earlier ones are exchanged."""
        parts = list(_slices(tensor))
        staging, begun = self._staging, self._staging.now()
        sends = self._rank in contributors
        leaving = [staging.start_to_host(part) if sends else Arrived(staging.host_buffer(part)) for part in parts]
        for part, pending in zip(parts, leaving, strict=True):
            on_host = pending.wait()
            host.all_reduce(on_host, contributors)
            staging.to_device(on_host, part, after=begun)


def exchange_seconds(exchange: Exchange) -> float:
    """Return the seconds that this rank has spent in its host exchange so far. From any thread."""
    host = exchange.host if isinstance(exchange, HierarchicalExchange) else cast("HostExchange", exchange)
    return host.traffic.seconds


def shared_path(exchange: Exchange) -> Path | None:
    """Return `HostExchange.shared_path` of the exchange that carries what crosses the host."""
    host = exchange.host if isinstance(exchange, HierarchicalExchange) else cast("HostExchange", exchange)
    return host.shared_path


def _slices(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the slices that cross the host one at a time; they are the same on every rank."""
    flat = tensor.view(-1)
    step = STAGED_BYTES // flat.element_size()
    return (flat[begin : begin + step] for begin in range(0, flat.numel(), step))


def _with_leader(contributors: Sequence[int], gpus: Ranks) -> list[int]:
    """Return the contributors to a host round: the leader in the place of all GPU ranks, then the CPU ranks."""
    cpus = sorted(set(contributors).difference(gpus))
    return [gpus[0], *cpus] if len(cpus) < len(set(contributors)) else cpus


def _check(tensor: torch.Tensor, contributors: Sequence[int], ranks: Ranks) -> None:
    check_summable(tensor)
    check_contributors(contributors, ranks)

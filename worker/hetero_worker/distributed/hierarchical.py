"""HierarchicalExchange: the Exchange of a group with GPU ranks.

A sum among GPU ranks G and CPU ranks C, rows of b bytes:

    device group:  reduce to the first of G, the leader       b over each device's link
    host:          all-reduce among the leader and C          b off the leader's device, one round of b a contributor
    device group:  broadcast from the leader                  b onto it, b over each device's link

Only G: one device all-reduce (a broadcast if only one contributes), and nothing on the host. Only C: one host round. So
no GPU rank but a leader moves activations through the host. On the host the sum is taken in fp32 in rank order; on the
devices as their backend does; at last everybody has the leader's, or the round's, very bits.

Nothing but the tensor that is summed changes: GPU ranks that do not contribute zero theirs, which is overwritten
anyway; what a reduction leaves behind elsewhere is overwritten by the broadcast.

Large tensors cross the host in slices (`STAGED_BYTES`), the same on all ranks that meet there, so that copies off the
device, rounds and copies back overlap: slice k + 1 leaves the device while slice k is summed on the host and slice
k - 1 goes back. A link between GPU ranks is their devices'; others are the host's, and GPU ranks' devices copy to and
from its memory (direct_links.py). Small host tensors (sampling, votes) are the host exchange's.

What overlaps where a leader lends (models/lending.py): its device copies off what is lent while it computes its own
part of the MLP, and takes each helper's sum in as soon as that is there, though its own part may not be done; only the
add waits for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from hetero_worker.distributed.device_group import DeviceGroup
from hetero_worker.distributed.direct_links import DirectLinks
from hetero_worker.distributed.exchange import (
    SENT,
    Arrived,
    HostExchange,
    LocalExchange,
    PendingSend,
    PendingTensor,
    SumExchange,
    check_summable,
)
from hetero_worker.distributed.gloo_exchange import BroadcastLink
from hetero_worker.distributed.routes import Link, Ranks, device_part, host_part
from hetero_worker.distributed.staging import Staging

STAGED_BYTES: Final = 512 * 1024
"""Most bytes that cross the host at a time."""


class HierarchicalExchange:
    """One rank's end, GPU rank or CPU rank. See the module; `host` is made with `routes_of(plan, num_gpu_ranks)`.

    `host_links` are a GPU rank's links over the host: by default through the staging's buffers.
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
        self._host = host
        self._num_gpu_ranks = num_gpu_ranks
        self._groups = groups
        self._links = links
        self._staging = staging
        self._host_links = host_links or DirectLinks(host, staging)
        self._is_gpu_rank = host.rank < num_gpu_ranks
        self._sums: dict[Ranks, SumExchange] = {}

    @property
    def rank(self) -> int:
        return self._host.rank

    @property
    def world_size(self) -> int:
        return self._host.world_size

    @property
    def link_bytes(self) -> int:
        return self._host.link_bytes

    @property
    def host(self) -> HostExchange:
        """What carries everything that crosses the host; its traffic is what this rank moved there."""
        return self._host

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        return self._host.all_gather(tensor, counts)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._host.broadcast(tensor, source)

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        if ranks not in self._sums:
            self._sums[ranks] = self._make_sum(ranks)
        return self._sums[ranks]

    def sums_on_devices(self, ranks: Ranks) -> bool:
        """Whether sums among these are their devices' alone, so that a graph may have them in it."""
        return device_part(ranks, self._num_gpu_ranks) == ranks

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        self.start_send(tensor, link).finish()

    def is_staged(self, link: Link) -> bool:
        return self._is_gpu_rank and link not in self._links

    def start_send(self, tensor: torch.Tensor, link: Link) -> PendingSend:
        if link in self._links:
            self._links[link].send(tensor)
            return SENT
        if self._is_gpu_rank:
            return self._host_links.start_send(tensor, link)
        return self._host.start_send(tensor, link)

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:
        if link in self._links:
            return self._links[link].receive(out)
        if self._is_gpu_rank:
            return self._host_links.receive(out, link)
        return self._host.receive(out, link)

    def _make_sum(self, ranks: Ranks) -> SumExchange:
        if ranks == (self.rank,):
            return LocalExchange()
        on_host, gpus = host_part(ranks, self._num_gpu_ranks), device_part(ranks, self._num_gpu_ranks)
        if not gpus:
            return self._host.among(ranks)
        host = self._host.among(on_host) if self.rank in on_host and len(on_host) > 1 else None
        if not self._is_gpu_rank:
            return _CpuRankSum(_HostRounds(host, gpus), ranks)
        group = self._groups[gpus] if len(gpus) > 1 else None
        if len(on_host) == 1:
            return _DeviceSum(group, gpus, rank=self.rank)
        return _MixedSum(group, _HostRounds(host, gpus), ranks, gpus=gpus, rank=self.rank, staging=self._staging)


class _HostRounds:
    """The host's part of sums among GPU and CPU ranks, as their leader or a CPU rank takes part in it."""

    def __init__(self, host: SumExchange | None, gpus: Ranks) -> None:
        self._host = host
        self._gpus = gpus

    @staticmethod
    def slices(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """What crosses at a time: the same on every rank."""
        flat = tensor.view(-1)
        step = STAGED_BYTES // flat.element_size()
        return (flat[begin : begin + step] for begin in range(0, flat.numel(), step))

    def contributors(self, contributors: Sequence[int]) -> list[int]:
        """With the leader in the place of all GPU ranks that contribute."""
        cpus = sorted(rank for rank in set(contributors) if rank not in self._gpus)
        return [self._gpus[0], *cpus] if len(cpus) < len(set(contributors)) else cpus

    def all_reduce(self, part: torch.Tensor, contributors: Sequence[int]) -> None:
        """One slice; `contributors` as above."""
        if self._host is not None:
            self._host.all_reduce(part, contributors)

    @property
    def is_mine(self) -> bool:
        """Whether this rank takes part."""
        return self._host is not None


class _CpuRankSum:
    """A SumExchange among GPU and CPU ranks, on a CPU rank: one host round a slice."""

    def __init__(self, host: _HostRounds, ranks: Ranks) -> None:
        self._host = host
        self._ranks = ranks

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        _check(tensor, contributors, self._ranks)
        meeting = self._host.contributors(contributors)
        for part in self._host.slices(tensor):
            self._host.all_reduce(part, meeting)


class _DeviceSum:
    """A SumExchange among GPU ranks only: one device all-reduce, or a broadcast."""

    def __init__(self, group: DeviceGroup | None, gpus: Ranks, *, rank: int) -> None:
        self._group = group
        self._gpus = gpus
        self._rank = rank

    @property
    def world_size(self) -> int:
        return len(self._gpus)

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
    """A SumExchange among GPU and CPU ranks, on a GPU rank; see the module."""

    def __init__(
        self, group: DeviceGroup | None, host: _HostRounds, ranks: Ranks, *, gpus: Ranks, rank: int, staging: Staging
    ) -> None:
        self._group = group
        self._host = host
        self._ranks = ranks
        self._gpus = gpus
        self._rank = rank
        self._staging = staging

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        _check(tensor, contributors, self._ranks)
        if not tensor.numel():
            return
        self._gather_at_leader(tensor, [rank for rank in contributors if rank in self._gpus])
        if self._host.is_mine:
            self._exchange(tensor, self._host.contributors(contributors))
        if self._group is not None:
            self._group.broadcast(tensor, self._gpus[0])

    def _gather_at_leader(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """The leader's tensor becomes the GPU ranks' sum; others' are of no content then."""
        if self._group is None or not set(contributors) - {self._gpus[0]}:
            return
        if self._rank not in contributors:
            tensor.zero_()
        self._group.reduce(tensor, self._gpus[0])

    def _exchange(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """The leader's part on the host. Slices leave the device while those before them are exchanged."""
        parts = list(self._host.slices(tensor))
        staging, begun = self._staging, self._staging.now()
        sends = self._rank in contributors
        leaving = [staging.start_to_host(part) if sends else Arrived(staging.host_buffer(part)) for part in parts]
        for part, pending in zip(parts, leaving, strict=True):
            on_host = pending.wait()
            self._host.all_reduce(on_host, contributors)
            staging.to_device(on_host, part, after=begun)


def _check(tensor: torch.Tensor, contributors: Sequence[int], ranks: Ranks) -> None:
    check_summable(tensor)
    if not contributors or not set(contributors) <= set(ranks):
        raise ValueError(f"contributors {list(contributors)} are no ranks of a group of {len(ranks)}: {list(ranks)}")

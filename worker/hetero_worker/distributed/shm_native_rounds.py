"""Rounds of a group, or subgroup, by the native library. What a round is, see native/exchange.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch

from hetero_worker.distributed.reduction import check_summable
from hetero_worker.distributed.shm_native import NativeCall, NativeRank, address_of
from hetero_worker.distributed.shm_peers import Late
from hetero_worker.distributed.shm_segment import RoundsLayout
from hetero_worker.native.compute_library import CallOp, Kind, Op
from hetero_worker.native.library import MAX_SEATS, Gathering, GroupState, Route

_MAX_ROUTES: Final = 1024
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class NativeRounds:
    """One rank's end. Ranks are named by their number in the whole group."""

    def __init__(self, rank: NativeRank, layout: RoundsLayout) -> None:
        self._rank = rank
        self._layout = layout
        self._own = layout.ranks.index(rank.segment.rank)
        self._state = GroupState(rank=rank.address, size=len(layout.ranks), own=self._own)
        self._state.ranks[: len(layout.ranks)] = layout.ranks
        self._state.counters[: len(layout.ranks)] = [8 * word for word in layout.counters]
        for seat, areas in enumerate(layout.areas):
            self._state.areas[seat][:] = areas
        self._address = ctypes.addressof(self._state)
        self._share_call = rank.library.share
        self._gather_call = rank.library.gather
        self._routes: dict[tuple[object, ...], tuple[int, Route]] = {}
        self._gatherings: dict[tuple[object, ...], Gathering] = {}

    @property
    def world_size(self) -> int:
        return len(self._layout.ranks)

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        self._check(tensor)
        self._share(tensor, tuple(contributors))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._share(tensor, (source,))

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        if len(counts) != self.world_size or tensor.numel() != counts[self._own]:
            raise ValueError(
                f"counts {list(counts)} do not fit {tensor.numel()} elements of rank {self._layout.ranks[self._own]}"
            )
        gathering = self._gathering(tensor.element_size(), tuple(counts))
        out = torch.empty(sum(counts), dtype=tensor.dtype)
        arguments = self._address, ctypes.addressof(gathering), address_of(tensor), address_of(out)
        if code := self._gather_call(*arguments):
            self._rank.finish(code, lambda: self._gather_call(*arguments), late=self._late, at=self._at)
        bounds = pairwise(accumulate(counts, initial=0))
        return [out[begin:end] for begin, end in bounds]

    def all_reduce_call(self, tensor: torch.Tensor, contributors: Sequence[int]) -> NativeCall:
        """What `all_reduce` does, to be called from native code. The tensor's memory is the caller's to keep."""
        self._check(tensor)
        address, route = self._route(tensor, tuple(contributors))
        data = address_of(tensor)
        function = ctypes.cast(self._share_call, ctypes.c_void_p)
        op = CallOp(op=Op(Kind.CALL, 1), function=function, first=self._address, second=address, third=data)

        def finish(code: int) -> None:
            again = lambda: int(self._share_call(self._address, address, data))  # noqa: E731
            self._rank.finish(code, again, late=self._late, at=self._at)

        return NativeCall(op, finish, (route, self))

    def _share(self, tensor: torch.Tensor, contributors: tuple[int, ...]) -> None:
        route = self._route(tensor, contributors)
        address = address_of(tensor)
        if code := self._share_call(self._address, route[0], address):
            self._rank.finish(
                code, lambda: self._share_call(self._address, route[0], address), late=self._late, at=self._at
            )

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.dtype not in _DTYPES:
            check_summable(tensor)

    def _route(self, tensor: torch.Tensor, contributors: tuple[int, ...]) -> tuple[int, Route]:
        """Found again by the tensor's shape and type."""
        key = (tensor.shape, tensor.dtype, contributors)
        return self._routes.get(key) or self._make_route(key, tensor, contributors)

    def _make_route(
        self, key: tuple[object, ...], tensor: torch.Tensor, contributors: tuple[int, ...]
    ) -> tuple[int, Route]:
        """Its address, and the route, which must live as long."""
        if not contributors or not set(contributors) <= set(self._layout.ranks):
            raise ValueError(
                f"contributors {contributors} are no ranks of a group of {self.world_size}: {self._layout.ranks}"
            )
        mask = sum(1 << self._layout.ranks.index(rank) for rank in set(contributors))
        route = Route(bytes=tensor.nbytes, dtype=_DTYPES.get(tensor.dtype, 0), contributors=mask)
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        self._routes[key] = ctypes.addressof(route), route
        return self._routes[key]

    def _gathering(self, element_bytes: int, counts: tuple[int, ...]) -> Gathering:
        key = (element_bytes, counts)
        if key not in self._gatherings:
            if len(self._gatherings) >= _MAX_ROUTES:
                self._gatherings.clear()
            sizes = [count * element_bytes for count in counts]
            parts = (ctypes.c_uint64 * MAX_SEATS)(*sizes)
            self._gatherings[key] = Gathering(bytes=parts, longest=max(sizes))
        return self._gatherings[key]

    def _late(self) -> Late:
        """Whatever a round waits for, it is that counters reach the round that this rank last published."""
        seats = [seat for seat in range(self.world_size) if self._state.late >> seat & 1]
        ranks = (self._layout.ranks[s] for s in seats if self._rank[self._layout.counters[s]] < self._state.round)
        return Late(tuple(ranks), f"reach round {self._state.round}")

    def _at(self) -> int:
        return int(self._state.round)

"""Rounds of a group or subgroup through shared memory. native_exchange.c explains how a round works."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import torch

from hetero_worker.distributed.exchange import check_summable
from hetero_worker.distributed.native_exchange import address_of, ffi
from hetero_worker.distributed.shm_rank import Late, NativeCall, ShmRank, data_address
from hetero_worker.distributed.shm_segment import RoundsLayout

_MAX_ROUTES: Final = 1024
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class ShmRounds:
    """One rank's end. Ranks are named by their number in the whole group."""

    def __init__(self, rank: ShmRank, layout: RoundsLayout) -> None:
        self._rank = rank
        self._layout = layout
        self._own = layout.ranks.index(rank.segment.rank)
        self._state = ffi.new(
            "hx_group *",
            {
                "rank": rank.state,
                "size": len(layout.ranks),
                "own": self._own,
                "ranks": layout.ranks,
                "counters": [8 * word for word in layout.counters],
                "areas": layout.areas,
            },
        )
        self._share_call = rank.library.hx_share
        self._gather_call = rank.library.hx_gather
        self._routes: dict[tuple[object, ...], Any] = {}
        self._gatherings: dict[tuple[object, ...], Any] = {}

    @property
    def world_size(self) -> int:
        """Return how many ranks take part."""
        return len(self._layout.ranks)

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """Sum in place, as SumExchange.all_reduce."""
        if tensor.dtype not in _DTYPES:
            check_summable(tensor)
        self._share(tensor, tuple(contributors))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace the tensor by the source's, as Exchange.broadcast."""
        self._share(tensor, (source,))

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's tensor, as Exchange.all_gather. Raises ValueError if `counts` do not fit."""
        if len(counts) != self.world_size or tensor.numel() != counts[self._own]:
            raise ValueError(
                f"counts {list(counts)} do not fit {tensor.numel()} elements of rank {self._layout.ranks[self._own]}"
            )
        gathering = self._gathering(tensor.element_size(), tuple(counts))
        out = torch.empty(sum(counts), dtype=tensor.dtype)
        arguments = self._state, gathering, data_address(tensor), data_address(out)
        if code := self._gather_call(*arguments):
            self._rank.finish(code, lambda: self._gather_call(*arguments), late=self._late, at=self._at)
        bounds = pairwise(accumulate(counts, initial=0))
        return [out[begin:end] for begin, end in bounds]

    def all_reduce_call(self, tensor: torch.Tensor, contributors: Sequence[int]) -> NativeCall:
        """Return `all_reduce` of this tensor as a call for native code. The caller keeps the tensor's memory."""
        check_summable(tensor)
        route, data = self._route(tensor, tuple(contributors)), data_address(tensor)
        arguments = address_of(self._state), address_of(route), data

        def finish(code: int) -> None:
            self._finish(code, route, data)

        return NativeCall(address_of(self._share_call), arguments, finish, (route, self))

    def _share(self, tensor: torch.Tensor, contributors: tuple[int, ...]) -> None:
        route, data = self._route(tensor, contributors), data_address(tensor)
        if code := self._share_call(self._state, route, data):
            self._finish(code, route, data)

    def _finish(self, code: int, route: Any, data: int) -> None:
        again = lambda: int(self._share_call(self._state, route, data))  # noqa: E731
        self._rank.finish(code, again, late=self._late, at=self._at)

    def _route(self, tensor: torch.Tensor, contributors: tuple[int, ...]) -> Any:
        key = (tensor.shape, tensor.dtype, contributors)
        return self._routes.get(key) or self._make_route(key, tensor, contributors)

    def _make_route(self, key: tuple[object, ...], tensor: torch.Tensor, contributors: tuple[int, ...]) -> Any:
        """Return the hx_route of tensors of this shape and type, and remember it by its key."""
        ranks = self._layout.ranks
        if not contributors or not set(contributors) <= set(ranks):
            raise ValueError(f"contributors {contributors} are no ranks of a group of {self.world_size}: {ranks}")
        mask = sum(1 << ranks.index(rank) for rank in set(contributors))
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        fields = {"bytes": tensor.nbytes, "dtype": _DTYPES.get(tensor.dtype, 0), "contributors": mask}
        route = self._routes[key] = ffi.new("hx_route *", fields)
        return route

    def _gathering(self, element_bytes: int, counts: tuple[int, ...]) -> Any:
        key = (element_bytes, counts)
        if key not in self._gatherings:
            if len(self._gatherings) >= _MAX_ROUTES:
                self._gatherings.clear()
            sizes = [count * element_bytes for count in counts]
            self._gatherings[key] = ffi.new("hx_gathering *", {"bytes": sizes, "longest": max(sizes)})
        return self._gatherings[key]

    def _late(self) -> Late:
        """Return the ranks whose counters have not reached the round that this rank last published."""
        seats = [seat for seat in range(self.world_size) if self._state.late >> seat & 1]
        counters, current = self._layout.counters, self._state.round
        ranks = tuple(self._layout.ranks[s] for s in seats if self._rank.counter(counters[s]) < current)
        return Late(ranks, f"reach round {current}")

    def _at(self) -> int:
        return int(self._state.round)

"""Rounds of a group, or subgroup, through shared memory, without the native library.

A round, for one rank: write into my area of the round's parity, raise my counter to the round's number, wait until
the contributors' counters reach it, read their areas. Two areas a rank are enough: a counter at n says that its rank
has read everything before round n, and an area is written again (round n + 2) only when all counters have reached
n + 1. A rank that sends nothing still raises its counter. Messages longer than an area take several rounds.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from hetero_worker.distributed.reduction import check_summable, sum_in_order
from hetero_worker.distributed.shm_peers import Late
from hetero_worker.distributed.shm_segment import RoundsLayout, ShmSegment
from hetero_worker.distributed.shm_words import SharedWords
from hetero_worker.distributed.traffic import TrafficCounter

_MAX_ROUTES: Final = 1024


@dataclass(frozen=True, slots=True)
class _Route:
    """What a round of one shape, type and set of contributors touches; indices are the round's parity."""

    own: tuple[torch.Tensor, torch.Tensor] | None
    terms: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
    awaited: tuple[int, ...]
    """Counter words of the contributors other than this rank."""


class ShmRounds:
    """One rank's end; see the module. Ranks are named by their number in the whole group."""

    def __init__(
        self, segment: ShmSegment, layout: RoundsLayout, *, words: SharedWords, counter: TrafficCounter
    ) -> None:
        rank = segment.rank
        self._ranks = layout.ranks
        self._rank = rank
        self._counters = dict(zip(layout.ranks, layout.counters, strict=True))
        self._areas = dict(zip(layout.ranks, layout.areas, strict=True))
        self._area_bytes = segment.layout.area_bytes
        self._memory: mmap.mmap | None = segment.memory
        self._words = words
        self._counter = counter
        self._own_word = self._counters[rank]
        self._peer_words = tuple(word for peer, word in self._counters.items() if peer != rank)
        self._routes: dict[tuple[object, ...], _Route] = {}
        self._round = 0
        self._settled = 0
        """Round that all peers are known to have reached."""

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        check_summable(tensor)
        self._share(tensor, tuple(contributors))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._share(tensor, (source,))

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        self._words.check_open()
        own = self._ranks.index(self._rank)
        if len(counts) != len(self._ranks) or tensor.numel() != counts[own]:
            raise ValueError(f"counts {list(counts)} do not fit {tensor.numel()} elements of rank {self._rank}")
        gathered = [torch.empty(count, dtype=tensor.dtype) for count in counts]
        gathered[own].copy_(tensor)
        step = self._area_bytes // tensor.element_size()
        if any(counts):
            self._counter.count_round(tensor.nbytes)
        for begin in range(0, max(counts), step):
            parts = [whole[begin : begin + step] for whole in gathered]
            self._gather_round(dict(zip(self._ranks, parts, strict=True)))
        return gathered

    def forget(self) -> None:
        """Let go of the memory; nothing may be called afterwards but what finds the words closed."""
        self._routes.clear()
        self._memory = None

    def _share(self, tensor: torch.Tensor, contributors: tuple[int, ...]) -> None:
        self._words.check_open()
        if not tensor.is_contiguous():
            raise ValueError("tensors are exchanged where they lie: they must be contiguous")
        if tensor.numel():
            self._counter.count_round(tensor.nbytes if self._rank in contributors else 0)
            self._share_slice(tensor, contributors)

    def _share_slice(self, tensor: torch.Tensor, contributors: tuple[int, ...]) -> None:
        key = (tensor.shape, tensor.dtype, contributors)
        route = self._routes.get(key)
        if route is None:
            if tensor.nbytes > self._area_bytes:
                self._share_in_slices(tensor.view(-1), contributors)
                return
            route = self._remember(key, self._make_route(tensor, contributors))
        self._share_round(tensor, route)

    def _share_in_slices(self, flat: torch.Tensor, contributors: tuple[int, ...]) -> None:
        step = self._area_bytes // flat.element_size()
        for begin in range(0, flat.numel(), step):
            self._share_slice(flat[begin : begin + step], contributors)

    def _share_round(self, tensor: torch.Tensor, route: _Route) -> None:
        number = self._round + 1
        parity = number & 1
        if route.own is not None:
            if self._settled < number - 1:
                self._await(self._peer_words, number - 1)
            route.own[parity].copy_(tensor)
        self._words[self._own_word] = self._round = number
        self._await(route.awaited, number)
        if len(route.awaited) == len(self._peer_words):
            self._settled = number
        if route.awaited:
            sum_in_order(route.terms[parity], tensor)

    def _gather_round(self, parts: dict[int, torch.Tensor]) -> None:
        number = self._round + 1
        parity = number & 1
        own = parts[self._rank]
        if own.numel():
            if self._settled < number - 1:
                self._await(self._peer_words, number - 1)
            self._view(self._rank, parity, own).copy_(own)
        self._words[self._own_word] = self._round = number
        for peer, part in parts.items():
            if peer != self._rank and part.numel():
                self._await((self._counters[peer],), number)
                part.copy_(self._view(peer, parity, part))

    def _make_route(self, tensor: torch.Tensor, contributors: tuple[int, ...]) -> _Route:
        if not contributors or not set(contributors) <= set(self._ranks):
            raise ValueError(f"contributors {contributors} are no ranks of a group of {self.world_size}: {self._ranks}")
        ranks = sorted(set(contributors))
        own = (self._view(self._rank, 0, tensor), self._view(self._rank, 1, tensor))
        even, odd = (tuple(self._view(rank, parity, tensor) for rank in ranks) for parity in (0, 1))
        awaited = tuple(self._counters[rank] for rank in ranks if rank != self._rank)
        return _Route(own if self._rank in ranks else None, (even, odd), awaited)

    def _remember(self, key: tuple[object, ...], route: _Route) -> _Route:
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        self._routes[key] = route
        return route

    def _view(self, rank: int, parity: int, like: torch.Tensor) -> torch.Tensor:
        offset = self._areas[rank][parity]
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)

    def _await(self, words: tuple[int, ...], number: int) -> None:
        self._words.await_all(words, number, self._late)

    def _late(self, number: int) -> Late:
        ranks = tuple(rank for rank, word in self._counters.items() if self._words[word] < number)
        return Late(ranks, f"reach round {number}")

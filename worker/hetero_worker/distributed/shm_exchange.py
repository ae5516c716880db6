"""ShmExchange: ranks of one host exchange through shared memory.

A round, for rank r: write into my area of the round's parity, raise my counter to the round's number, wait
until the contributors' counters reach it, read their areas. Two areas a rank are enough: a counter at n says
that its rank has read everything before round n, and an area is written again (round n + 2) only when all
counters have reached n + 1. A rank that sends nothing still raises its counter. Messages longer than an area
take several rounds.

There are no fences in Python. The algorithm relies on stores becoming visible in program order, which x86-64
promises (total store order) and other machines do not; the constructor refuses those. Areas stay below the size
from which libc's memcpy uses non-temporal stores.

Waiting: a short spin on the counters, then sched_yield, then sleeps that grow to 200 µs, so that ranks that
share cores with others let them run. All is called from one thread; only `abort` and `close` may come from
another. Abort is a word in the segment: it ends the wait of every rank of the group.
"""

from __future__ import annotations

import mmap
import os
import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from hetero_worker.distributed.reduction import check_summable, sum_in_order
from hetero_worker.distributed.shm_segment import ShmSegment
from hetero_worker.errors import ExchangeAborted, ExchangeError, ExchangeTimeout

AREA_BYTES: Final = 512 * 1024
SUPPORTED_MACHINES: Final = frozenset({"x86_64", "AMD64"})
_ABORT_WORD: Final = 0
_SPINS: Final = 400
_YIELD_S: Final = 0.002
_SLEEP_MIN_S: Final = 20e-6
_SLEEP_MAX_S: Final = 200e-6
_MAX_ROUTES: Final = 1024


def unsupported_reason(machine: str | None = None) -> str | None:
    """Why this machine cannot use ShmExchange; None when it can."""
    machine = machine or platform.machine()
    if machine in SUPPORTED_MACHINES:
        return None
    return f"shared-memory exchange needs the store order of x86-64; this machine is {machine}"


@dataclass(frozen=True, slots=True)
class _Route:
    """What a round of one shape, type and set of contributors touches; indices are the round's parity."""

    own: tuple[torch.Tensor, torch.Tensor] | None
    terms: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
    awaited: tuple[int, ...]
    """Counter words of the contributors other than this rank."""


class ShmExchange:
    """HostExchange over a ShmSegment; see the module. Raises ExchangeError on a machine without store order."""

    def __init__(self, segment: ShmSegment, *, rank: int, timeout_s: float, machine: str | None = None) -> None:
        if reason := unsupported_reason(machine):
            raise ExchangeError(reason)
        layout = segment.layout
        self._rank = rank
        self._world_size = layout.world_size
        self._timeout_s = timeout_s
        self._layout = layout
        self._memory: mmap.mmap | None = segment.memory
        self._words = memoryview(segment.memory).cast("Q")
        self._own_word = layout.counter_word(rank)
        self._peer_words = tuple(layout.counter_word(r) for r in range(layout.world_size) if r != rank)
        self._routes: dict[tuple[object, ...], _Route] = {}
        self._round = 0
        self._settled = 0
        """Round that all peers are known to have reached."""
        self._closed = False
        self._lock = threading.Lock()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        check_summable(tensor)
        self._share(tensor, tuple(contributors))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._share(tensor, (source,))

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        self._check_open()
        if len(counts) != self._world_size or tensor.numel() != counts[self._rank]:
            raise ValueError(f"counts {list(counts)} do not fit {tensor.numel()} elements of rank {self._rank}")
        gathered = [torch.empty(count, dtype=tensor.dtype) for count in counts]
        gathered[self._rank].copy_(tensor)
        step = self._layout.area_bytes // tensor.element_size()
        for begin in range(0, max(counts), step):
            parts = [whole[begin : begin + step] for whole in gathered]
            self._gather_round(parts)
        return gathered

    def abort(self) -> None:
        """Set the segment's abort word: every rank's blocked or later call raises ExchangeAborted."""
        with self._lock:
            if not self._closed:
                self._words[_ABORT_WORD] = 1

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._routes.clear()
            self._words = memoryview(b"\x01" * 8).cast("Q")  # a later call still finds an abort word that is set
            self._memory = None

    def _check_open(self) -> None:
        if self._words[_ABORT_WORD]:
            raise ExchangeAborted("the exchange is closed" if self._closed else "the epoch was aborted")

    def _share(self, tensor: torch.Tensor, contributors: tuple[int, ...]) -> None:
        if self._words[_ABORT_WORD]:
            self._check_open()
        key = (tensor.shape, tensor.dtype, contributors)
        route = self._routes.get(key)
        if route is None:
            if tensor.numel() == 0:
                return
            if tensor.nbytes > self._layout.area_bytes:
                self._share_in_slices(tensor.view(-1), contributors)
                return
            route = self._remember(key, self._make_route(tensor, contributors))
        self._share_round(tensor, route)

    def _share_in_slices(self, flat: torch.Tensor, contributors: tuple[int, ...]) -> None:
        step = self._layout.area_bytes // flat.element_size()
        for begin in range(0, flat.numel(), step):
            self._share(flat[begin : begin + step], contributors)

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

    def _gather_round(self, parts: Sequence[torch.Tensor]) -> None:
        number = self._round + 1
        parity = number & 1
        own = parts[self._rank]
        if own.numel():
            if self._settled < number - 1:
                self._await(self._peer_words, number - 1)
            self._view(self._rank, parity, own).copy_(own)
        self._words[self._own_word] = self._round = number
        for peer, part in enumerate(parts):
            if peer != self._rank and part.numel():
                self._await((self._layout.counter_word(peer),), number)
                part.copy_(self._view(peer, parity, part))

    def _make_route(self, tensor: torch.Tensor, contributors: tuple[int, ...]) -> _Route:
        if not contributors or not set(contributors) <= set(range(self._world_size)):
            raise ValueError(f"contributors {contributors} are no ranks of a group of {self._world_size}")
        ranks = sorted(set(contributors))
        own = (self._view(self._rank, 0, tensor), self._view(self._rank, 1, tensor))
        even, odd = (tuple(self._view(rank, parity, tensor) for rank in ranks) for parity in (0, 1))
        awaited = tuple(self._layout.counter_word(rank) for rank in ranks if rank != self._rank)
        return _Route(own if self._rank in ranks else None, (even, odd), awaited)

    def _remember(self, key: tuple[object, ...], route: _Route) -> _Route:
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        self._routes[key] = route
        return route

    def _view(self, rank: int, parity: int, like: torch.Tensor) -> torch.Tensor:
        offset = self._layout.area_offset(rank, parity)
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)

    def _await(self, words: tuple[int, ...], number: int) -> None:
        shared = self._words
        for word in words:
            if shared[word] < number:
                for _ in range(_SPINS):
                    if shared[word] >= number:
                        break
                else:
                    self._await_patiently(word, number)

    def _await_patiently(self, word: int, number: int) -> None:
        """Yield, then sleep, until the counter comes, the epoch is aborted or the time is over."""
        shared = self._words
        began = time.monotonic()
        sleep_s = _SLEEP_MIN_S
        while shared[word] < number:
            if shared[_ABORT_WORD]:
                raise ExchangeAborted("the epoch was aborted while waiting for a peer")
            waited_s = time.monotonic() - began
            if waited_s < _YIELD_S:
                os.sched_yield()
            elif waited_s < self._timeout_s:
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _SLEEP_MAX_S)
            else:
                raise ExchangeTimeout(self._late(number))

    def _late(self, number: int) -> str:
        late = [r for r in range(self._world_size) if self._words[self._layout.counter_word(r)] < number]
        ranks = ", ".join(map(str, late))
        return f"rank(s) {ranks} did not reach round {number} within {self._timeout_s:g} s"

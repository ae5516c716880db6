"""An exchange between threads of one process: several "ranks" in one test, without processes.

Sums are taken in fp32 in ascending rank order, as HostExchange promises. A barrier with a timeout stands for
the group's timeout; `abort` breaks it for all. Any subgroup and link can be used, without being announced. A link
holds `link_bytes`, and at least one tensor: whoever sends more waits for the slowest receiver.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from hetero_worker.distributed.exchange import (
    HostExchange,
    LocalExchange,
    SendsAtOnce,
    SumExchange,
    Traffic,
    TrafficCounter,
)
from hetero_worker.distributed.routes import Link
from hetero_worker.errors import ExchangeAborted

T = TypeVar("T")


class _Board:
    """Where the ranks of a group or subgroup publish."""

    def __init__(self, ranks: tuple[int, ...], timeout_s: float) -> None:
        self.slots: dict[int, torch.Tensor | None] = dict.fromkeys(ranks)
        self.barrier = threading.Barrier(len(ranks), timeout=timeout_s)
        self.rounds = dict.fromkeys(ranks, 0)


class _Wires:
    """What all threads of a group share."""

    def __init__(self, world_size: int, timeout_s: float, link_bytes: int) -> None:
        self.timeout_s = timeout_s
        self.link_bytes = link_bytes
        self.arrival = threading.Condition()
        self.on_the_way: defaultdict[tuple[Link, int], deque[torch.Tensor]] = defaultdict(deque)
        self.sent: list[Link] = []
        self.aborted = False
        self._everyone = tuple(range(world_size))
        self._boards: dict[tuple[int, ...], _Board] = {}

    def board(self, ranks: tuple[int, ...] = ()) -> _Board:
        """Of these ranks, all if none are given."""
        with self.arrival:
            ranks = ranks or self._everyone
            if ranks not in self._boards:
                self._boards[ranks] = _Board(ranks, self.timeout_s)
                if self.aborted:
                    self._boards[ranks].barrier.abort()
            return self._boards[ranks]

    def abort(self) -> None:
        with self.arrival:
            self.aborted = True
            for board in self._boards.values():
                board.barrier.abort()
            self.arrival.notify_all()


class _ThreadRounds:
    """One rank's end of a group or subgroup."""

    def __init__(self, board: _Board, rank: int, counter: TrafficCounter) -> None:
        self._board = board
        self._counter = counter
        self.rank = rank

    @property
    def world_size(self) -> int:
        return len(self._board.slots)

    @property
    def rounds(self) -> int:
        """Rounds that this rank took part in."""
        return self._board.rounds[self.rank]

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        if not tensor.is_contiguous():
            raise ValueError("exchanged tensors must be contiguous")
        published = self._round(tensor.clone() if self.rank in contributors else None)
        parts = [part.float() for rank in sorted(contributors) if (part := published[rank]) is not None]
        if len(parts) != len(contributors) or any(part.shape != tensor.shape for part in parts):
            raise ValueError("ranks disagree on a round")
        tensor.copy_(sum(parts[1:], start=parts[0]))

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        if tensor.shape != (counts[self.rank],):
            raise ValueError(f"rank {self.rank} sends {tuple(tensor.shape)}, announced {counts[self.rank]}")
        published = self._round(tensor.clone())
        return [part.clone() for part in published.values() if part is not None]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        published = self._round(tensor.clone() if self.rank == source else None)[source]
        if published is None:
            raise ValueError("ranks disagree on a round")
        tensor.copy_(published)

    def _round(self, tensor: torch.Tensor | None) -> dict[int, torch.Tensor | None]:
        board = self._board
        board.slots[self.rank] = tensor
        self._counter.count_round(0 if tensor is None else tensor.nbytes)
        board.rounds[self.rank] += 1
        try:
            board.barrier.wait()
            published = dict(board.slots)
            board.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise ExchangeAborted("the test's group was aborted or timed out") from error
        return published


class ThreadExchange(SendsAtOnce, _ThreadRounds):
    """One rank's end."""

    def __init__(self, wires: _Wires, rank: int) -> None:
        super().__init__(wires.board(), rank, TrafficCounter())
        self._wires = wires

    @property
    def link_bytes(self) -> int:
        return self._wires.link_bytes

    @property
    def traffic(self) -> Traffic:
        return self._counter.total

    @property
    def sent(self) -> list[Link]:
        """Links that anybody has sent over, in the order of sending."""
        return self._wires.sent

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is not among {ranks}")
        if len(ranks) == self.world_size:
            return self
        return LocalExchange() if len(ranks) == 1 else _ThreadRounds(self._wires.board(ranks), self.rank, self._counter)

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        if self.rank != link.source or not tensor.is_contiguous():
            raise ValueError(f"rank {self.rank} cannot send {tuple(tensor.shape)} over {link}")
        if not tensor.numel():
            return
        self._counter.count_message(tensor.nbytes)
        with self._wires.arrival:
            self._await_room(tensor, link)
            self._wires.sent.append(link)
            for receiver in link.receivers:
                self._wires.on_the_way[link, receiver].append(tensor.clone())
            self._wires.arrival.notify_all()

    def _await_room(self, tensor: torch.Tensor, link: Link) -> None:
        wires, deadline = self._wires, time.monotonic() + self._wires.timeout_s

        def is_full() -> bool:
            queues = [wires.on_the_way[link, receiver] for receiver in link.receivers]
            return any(q and sum(t.nbytes for t in q) + tensor.nbytes > wires.link_bytes for q in queues)

        while is_full() and not wires.aborted and time.monotonic() < deadline:
            wires.arrival.wait(deadline - time.monotonic())
        if is_full():
            raise ExchangeAborted("the test's group was aborted or timed out")

    def receive(self, out: torch.Tensor, link: Link) -> ThreadPending:
        if self.rank not in link.receivers or not out.is_contiguous():
            raise ValueError(f"rank {self.rank} cannot receive {tuple(out.shape)} over {link}")
        return ThreadPending(self._wires, out, (link, self.rank))

    def abort(self) -> None:
        self._wires.abort()

    def close(self) -> None:
        """Nothing is held."""


class ThreadPending:
    """A posted receipt."""

    def __init__(self, wires: _Wires, out: torch.Tensor, end: tuple[Link, int]) -> None:
        self._wires = wires
        self._out = out
        self._end = end
        self._done = not out.numel()

    def wait(self) -> torch.Tensor:
        if not self._done:
            self._out.copy_(self._take())
            self._done = True
        return self._out

    def _take(self) -> torch.Tensor:
        deadline = time.monotonic() + self._wires.timeout_s
        with self._wires.arrival:
            queue = self._wires.on_the_way[self._end]
            while not queue and not self._wires.aborted and time.monotonic() < deadline:
                self._wires.arrival.wait(deadline - time.monotonic())
            if not queue:
                raise ExchangeAborted("the test's group was aborted or timed out")
            tensor = queue.popleft()
            self._wires.arrival.notify_all()
        if tensor.shape != self._out.shape:
            raise ValueError(f"{self._end} brought {tuple(tensor.shape)}, expected {tuple(self._out.shape)}")
        return tensor


def thread_exchanges(world_size: int, *, timeout_s: float = 60.0, link_bytes: int = 1 << 20) -> list[ThreadExchange]:
    """The ends of one new group, in rank order."""
    wires = _Wires(world_size, timeout_s, link_bytes)
    return [ThreadExchange(wires, rank) for rank in range(world_size)]


def run_ranks(exchanges: Sequence[HostExchange], body: Callable[[int], T]) -> list[T]:
    """`body(rank)` on a thread a rank; results in rank order. A rank that fails aborts the others."""

    def guarded(rank: int) -> T:
        try:
            return body(rank)
        except BaseException:
            exchanges[rank].abort()
            raise

    with ThreadPoolExecutor(len(exchanges)) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(len(exchanges))]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, ExchangeAborted)), errors[0])
    return [future.result() for future in futures]

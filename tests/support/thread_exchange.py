"""An exchange between threads of one process: several "ranks" in one test, without processes.

Sums are taken in fp32 in ascending rank order, as HostExchange promises. A barrier with a timeout stands for
the group's timeout; `abort` breaks it for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from hetero_worker.errors import ExchangeAborted

T = TypeVar("T")


class _Board:
    """Where ranks publish; shared by one group."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.slots: list[torch.Tensor | None] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=timeout_s)
        self.rounds = [0] * world_size


class ThreadExchange:
    """One rank's end."""

    def __init__(self, board: _Board, rank: int) -> None:
        self._board = board
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
        return [part.clone() for part in published if part is not None]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        published = self._round(tensor.clone() if self.rank == source else None)[source]
        if published is None:
            raise ValueError("ranks disagree on a round")
        tensor.copy_(published)

    def abort(self) -> None:
        self._board.barrier.abort()

    def close(self) -> None:
        """Nothing is held."""

    def _round(self, tensor: torch.Tensor | None) -> list[torch.Tensor | None]:
        board = self._board
        board.slots[self.rank] = tensor
        board.rounds[self.rank] += 1
        try:
            board.barrier.wait()
            published = list(board.slots)
            board.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise ExchangeAborted("the test's group was aborted or timed out") from error
        return published


def thread_exchanges(world_size: int, *, timeout_s: float = 60.0) -> list[ThreadExchange]:
    """The ends of one new group, in rank order."""
    board = _Board(world_size, timeout_s)
    return [ThreadExchange(board, rank) for rank in range(world_size)]


def run_ranks(exchanges: Sequence[ThreadExchange], body: Callable[[int], T]) -> list[T]:
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

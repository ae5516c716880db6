"""Rank processes, as whoever drives them sees them: ask all and hear all, or send plans and take results.

Processes are spawned, not forked: each binds itself to its cores before it imports torch. None outlives the group.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Final, Self

from bench.gpu import rank
from bench.gpu.orders import Device, End, Failed, Form, Hello, Order, Seat
from hetero_api.v1 import ranks_pb2

_ORDER_S: Final = 240.0
_RESULT_S: Final = 120.0
_END_S: Final = 15.0


class RankFailedError(RuntimeError):
    """A rank said that it cannot go on, or fell silent."""


class RankProcesses:
    """One group, from its start to its end; a context manager."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self.seats = tuple(seats)
        self.hellos: tuple[Hello, ...] = ()
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        try:
            for seat in self.seats:
                ours, theirs = context.Pipe()
                process = context.Process(target=rank.main, args=(seat, theirs), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            self.hellos = tuple(self._answers(_ORDER_S))
            address = self.hellos[0].store_address
            self.ask(Form(address, f"hetero-bench-{os.getpid()}-{address.rpartition(':')[2]}"))
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.ask(End(), timeout_s=_END_S)
        finally:
            self._kill()

    def ask(self, order: Order, *, timeout_s: float = _ORDER_S) -> list[Any]:
        """Have all ranks do it; their answers, in rank order. Raises RankFailedError."""
        for pipe in self._pipes:
            pipe.send(order)
        return self._answers(timeout_s)

    def send(self, plan: ranks_pb2.StepPlan) -> None:
        """Have all ranks compute a step, after those that were sent before."""
        payload = plan.SerializeToString()
        for pipe in self._pipes:
            pipe.send(payload)

    def result(self) -> ranks_pb2.StepResult:
        """Of the oldest step whose result was not taken. Raises RankFailedError."""
        deadline_s = time.monotonic() + _RESULT_S
        while True:
            ready = wait(self._pipes, timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise RankFailedError(f"no step's result came within {_RESULT_S:g} s")
            for number, pipe in enumerate(self._pipes):
                if pipe in ready:
                    return ranks_pb2.StepResult.FromString(self._hear(number))

    def _answers(self, timeout_s: float) -> list[Any]:
        deadline_s = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            waiting = {pipe: number for number, pipe in enumerate(self._pipes) if number not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise RankFailedError(f"ranks {sorted(waiting.values())} did not answer within {timeout_s:g} s")
            for pipe, number in waiting.items():
                if pipe in ready:
                    answers[number] = self._hear(number)
        return [answers[number] for number in sorted(answers)]

    def _hear(self, number: int) -> Any:
        try:
            answer = self._pipes[number].recv()
        except EOFError:
            raise RankFailedError(f"rank {number}: the process ended") from None
        if isinstance(answer, Failed):
            raise RankFailedError(f"rank {number}: {answer.reason}")
        return answer

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


def seats_on(cores: Sequence[int], gpu: Device, *, cpu_ranks: int, memory_bytes: int) -> list[Seat]:
    """A GPU rank, and CPU ranks of `memory_bytes` each that share the cores it leaves.

    The first core is left to the program, the next to the GPU rank, where there are enough to leave some for each CPU
    rank; with fewer, ranks have one each, in turn.
    """
    world = 1 + cpu_ranks
    if len(cores) < 2 + cpu_ranks:
        own, *parts = [[cores[rank % len(cores)]] for rank in range(world)]
    elif not cpu_ranks:
        own, parts = list(cores[1:]), []
    else:
        each = (len(cores) - 2) // cpu_ranks
        own, parts = [cores[1]], [list(cores[2 + i * each : 2 + (i + 1) * each]) for i in range(cpu_ranks)]
    gpu_seat = Seat(0, world, 1, gpu, tuple(own), memory_bytes)
    return [gpu_seat, *(Seat(1 + i, world, 1, Device.CPU, tuple(p), memory_bytes) for i, p in enumerate(parts))]

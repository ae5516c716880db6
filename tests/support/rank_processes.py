"""Real rank processes for tests of what happens between ranks.

Processes come from a fork server that has torch loaded already, so that starting one is cheap and nothing of
pytest's process is inherited. A body is a module-level function `body(ranks: RankContext, *args)`; what it returns
is the rank's result. The parent relays one thing only: every rank's turn at a meeting, in rank order.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.distributed.coordinator import GroupCoordinator, form_group
from hetero_worker.distributed.exchange import Exchange, HostExchange
from hetero_worker.distributed.rendezvous import GroupRequest, StoreListener
from hetero_worker.distributed.routes import NO_ROUTES, Routes

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class FormedGroup:
    """A group whose routes are connected."""

    coordinator: GroupCoordinator
    connected: Exchange

    @property
    def kind(self) -> ranks_pb2.ExchangeKind.ValueType:
        return self.coordinator.formed(measure=False).exchange

    @property
    def exchange(self) -> HostExchange:
        """Of a group without GPU ranks."""
        exchange: Any = self.connected
        return exchange  # type: ignore[no-any-return]

    def close(self) -> None:
        self.coordinator.close()


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a rank's body is given."""

    rank: int
    world_size: int
    pipe: Connection
    segment_prefix: str
    """How the names of this run's shared-memory segments begin."""

    def meet(self, word: str = "") -> list[str]:
        """Wait for all ranks; everyone's word, in rank order."""
        self.pipe.send(("meet", word))
        words: list[str] = self.pipe.recv()
        return words

    def form(
        self,
        kind: ranks_pb2.ExchangeKind.ValueType,
        *,
        routes: Routes = NO_ROUTES,
        device_routes: Routes = NO_ROUTES,
        **changes: Any,
    ) -> FormedGroup:
        """Meet, make the epoch's group as FormGroup would have it, and connect."""
        coordinator = self.coordinate(kind, **changes)
        return FormedGroup(coordinator, coordinator.connect_routes(routes, device_routes))

    def coordinate(
        self,
        kind: ranks_pb2.ExchangeKind.ValueType,
        *,
        epoch: int = 1,
        timeout_s: float = 20.0,
        host: str = HOST,
        **changes: Any,
    ) -> GroupCoordinator:
        """Meet, and make the epoch's group; `changes` are GroupRequest's."""
        listener = StoreListener(host)
        address = self.meet(listener.open())[0]
        request = GroupRequest(
            epoch=epoch,
            rank=self.rank,
            world_size=self.world_size,
            store_address=address,
            kind_asked=kind,
            segment_name=f"{self.segment_prefix}{address.rpartition(':')[2]}-{epoch}",
            timeout_s=timeout_s,
            host=host,
            **changes,
        )
        return form_group(request, listener=listener, aborted=lambda: False)

    def coordinate_backend(
        self, kind: ranks_pb2.ExchangeKind.ValueType, backend: DeviceBackend, num_gpu_ranks: int
    ) -> GroupCoordinator:
        """Meet, and make the epoch's group of ranks that compute on `backend`."""
        return self.coordinate(
            kind,
            num_gpu_ranks=num_gpu_ranks,
            device=backend.device,
            device_backend=backend.collectives,
            staging=backend.staging(),
        )


def segment_prefix() -> str:
    """Of the segments of all groups that this process starts."""
    return f"hetero-test-{os.getpid()}-"


class RanksFailedError(AssertionError):
    """A rank's body raised, or its process ended or hung when it should not have."""


def run_ranks(
    body: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0, may_die: Sequence[int] = ()
) -> list[Any]:
    """Run `body` on every rank; results in rank order, None for a rank that died as it may.

    Raises RanksFailedError, with the ranks' tracebacks. No process is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.rank_processes"])
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process: BaseProcess = context.Process(
            target=_rank_main, args=(body, RankContext(rank, world_size, theirs, segment_prefix()), args), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        return _Conversation(pipes, frozenset(may_die)).run(time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


class _Conversation:
    def __init__(self, pipes: Sequence[Connection], may_die: frozenset[int]) -> None:
        self._pipes = pipes
        self._may_die = may_die
        self._talking = dict(enumerate(pipes))
        self._words: dict[int, str] = {}
        self._results: list[Any] = [None] * len(pipes)
        self._failures: list[str] = []

    def run(self, deadline: float) -> list[Any]:
        while self._talking:
            ready = wait(list(self._talking.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RanksFailedError("\n".join([f"ranks {sorted(self._talking)} did not end", *self._failures]))
            for rank in [r for r, pipe in self._talking.items() if pipe in ready]:
                self._listen(rank)
            self._relay()
        if self._failures:
            raise RanksFailedError("\n".join(self._failures))
        return self._results

    def _listen(self, rank: int) -> None:
        try:
            kind, content = self._talking[rank].recv()
        except EOFError:
            kind, content = "died", "the process ended without a result"
        if kind == "meet":
            self._words[rank] = content
            return
        del self._talking[rank]
        if kind == "done":
            self._results[rank] = content
        elif kind == "failed" or rank not in self._may_die:
            self._failures.append(f"rank {rank}: {content}")

    def _relay(self) -> None:
        if len(self._words) == len(self._pipes):
            words = [self._words[rank] for rank in sorted(self._words)]
            self._words.clear()
            for pipe in self._talking.values():
                pipe.send(words)


def _rank_main(body: Callable[..., Any], ranks: RankContext, args: Sequence[Any]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        ranks.pipe.send(("done", body(ranks, *args)))
    except BaseException:  # the parent tells it
        ranks.pipe.send(("failed", traceback.format_exc()))

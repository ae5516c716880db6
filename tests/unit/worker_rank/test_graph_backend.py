"""CudaGraphBackend gives torch.cuda the calls that a capture takes, in their order; torch.cuda is played here."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hetero_worker.backends.cuda.graphs import CudaGraphBackend
from hetero_worker.runners.graphs.breaks import Breaks

pytestmark = pytest.mark.unit

DEVICE = torch.device("cuda", 1)


class PlayedCuda:
    """What torch.cuda is asked, and by whom: names of calls.

    As torch, it gives a pool up with the last graph in it, and frees the workspaces of the recording stream, which live
    graphs use, when an empty graph goes.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pool: weakref.WeakSet[PlayedGraph] | None = None
        """Graphs that are in it."""
        self.empty: set[int] = set()
        """Numbers of graphs in which nothing is."""
        self.graphs = 0
        self.workspaces = 0
        """Times that the workspaces were freed."""
        self.on = "main"

    def graph(self) -> PlayedGraph:
        self.graphs += 1
        return PlayedGraph(self, self.graphs)

    def take(self, num_bytes: int, device: torch.device) -> int:
        self.calls.append(f"{num_bytes} bytes of {device} on {self.on}")
        return 17

    def give(self, address: int) -> None:
        self.calls.append(f"{address} given back")

    @contextlib.contextmanager
    def stream(self, stream: PlayedStream) -> Iterator[None]:
        before, self.on = self.on, stream.name
        yield
        self.on = before


class PlayedStream:
    def __init__(self, cuda: PlayedCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: PlayedStream) -> None:
        self.cuda.calls.append(f"{self.name} waits for {other.name}")


class PlayedGraph:
    def __init__(self, cuda: PlayedCuda, number: int) -> None:
        self.cuda, self.number, self.workspaces = cuda, number, 0

    def __del__(self) -> None:
        self.cuda.workspaces += self.number in self.cuda.empty

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        if self.cuda.pool is None:
            self.cuda.pool = weakref.WeakSet()
        else:
            assert self.cuda.pool, "the pool was given up with its last graph"
        self.cuda.pool.add(self)
        self.cuda.calls.append(f"begin {self.number} on {self.cuda.on} in {pool}, {capture_error_mode}")
        assert not gc.isenabled()

    def capture_end(self) -> None:
        self.cuda.calls.append(f"end {self.number}")
        self.workspaces = self.cuda.workspaces
        if self.number in self.cuda.empty:
            warnings.warn("The CUDA Graph is empty. This usually means ...", stacklevel=1)

    def replay(self) -> None:
        assert self.workspaces == self.cuda.workspaces, "its workspaces were freed with an empty graph"
        self.cuda.calls.append(f"replay {self.number} on {self.cuda.on}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PlayedCuda:
    played = PlayedCuda()
    main, side = PlayedStream(played, "main"), PlayedStream(played, "side")
    monkeypatch.setattr("torch.cuda.Stream", lambda device: side)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: main)
    monkeypatch.setattr("torch.cuda.stream", played.stream)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: "the pool")
    monkeypatch.setattr("torch.cuda.CUDAGraph", played.graph)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (device.index * 1000, 5000))
    monkeypatch.setattr("torch.cuda.caching_allocator_alloc", played.take)
    monkeypatch.setattr("torch.cuda.caching_allocator_delete", played.give)
    return played


def test_each_segment_is_captured_aside_and_done_at_once_then_replayed_where_the_thread_computes(
    cuda: PlayedCuda,
) -> None:
    breaks = Breaks(CudaGraphBackend(DEVICE))
    recorded = breaks.record(lambda: breaks.call(lambda: cuda.calls.append(f"call on {cuda.on}")))
    first = [
        "side waits for main",
        "begin 1 on side in the pool, thread_local",
        "end 1",
        "begin 2 on side in the pool, thread_local",
        "end 2",
        "replay 2 on side",
        "call on side",
        "begin 3 on side in the pool, thread_local",
        "end 3",
        "replay 3 on side",
        "main waits for side",
    ]
    assert cuda.calls == first
    assert gc.isenabled()
    recorded.replay()
    assert cuda.calls[len(first) :] == ["replay 2 on main", "call on main", "replay 3 on main"]


def test_what_graphs_compute_with_has_its_place_before_the_first_of_them(cuda: PlayedCuda) -> None:
    backend = CudaGraphBackend(DEVICE)
    backend.reserve(1000)
    breaks = Breaks(backend)
    for _ in range(2):
        breaks.record(lambda: None)
    place = ["begin 1", "1000 bytes of cuda:1 on side", "17 given back", "end 1", "begin 2", "end 2"]
    told = [call for call in cuda.calls if not call.startswith(("side", "main", "replay"))]
    assert [call.partition(" on side in")[0] for call in told] == [*place, "begin 3", "end 3"]


def test_a_graph_with_nothing_in_it_is_left_out(cuda: PlayedCuda) -> None:
    cuda.empty = {1, 2}
    breaks = Breaks(CudaGraphBackend(DEVICE))
    recorded = breaks.record(lambda: breaks.call(lambda: None))
    assert recorded.num_segments == 1
    assert not any(call.startswith("replay 2") for call in cuda.calls)


def test_an_empty_segment_leaves_the_workspaces_to_the_others(cuda: PlayedCuda) -> None:
    cuda.empty = {1, 3}
    recorded = (breaks := Breaks(CudaGraphBackend(DEVICE))).record(lambda: breaks.call(lambda: None))
    assert recorded.num_segments == 1
    gc.collect()
    recorded.replay()


def test_graphs_that_go_leave_their_pool_to_later_ones(cuda: PlayedCuda) -> None:
    cuda.empty = {1}
    breaks = Breaks(CudaGraphBackend(DEVICE))
    recorded = breaks.record(lambda: None)
    del recorded
    gc.collect()
    assert breaks.record(lambda: None).num_segments == 1


def test_a_pass_that_fails_within_a_segment_ends_its_capture(cuda: PlayedCuda) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("no memory")

    breaks = Breaks(CudaGraphBackend(DEVICE))
    with pytest.raises(torch.OutOfMemoryError):
        breaks.record(fail)
    assert cuda.calls[-1] == "end 2"
    assert gc.isenabled()
    breaks.record(lambda: None)


def test_a_pass_that_fails_between_segments_has_no_capture_to_end(cuda: PlayedCuda) -> None:
    def fail() -> None:
        raise KeyError("a peer is gone")

    breaks = Breaks(CudaGraphBackend(DEVICE))
    with pytest.raises(KeyError):
        breaks.record(lambda: breaks.call(fail))
    assert cuda.calls.count("end 2") == 1
    assert cuda.graphs == 2


def test_free_memory_is_the_devices(cuda: PlayedCuda) -> None:
    assert CudaGraphBackend(DEVICE).free_bytes() == 1000
    assert cuda.calls == []

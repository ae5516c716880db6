"""GraphBackend of a CUDA device.

All graphs of a backend share one memory pool: they never run at the same time, so what one leaves behind another may
use. Recording goes on a stream of its own, for the default one cannot be captured, and so does the pass that prepares
it: libraries keep workspaces by stream, and these have to be there before. Other threads (NCCL's watchdog) may ask the
driver what they like meanwhile. Python's collector rests, lest it frees a tensor of another stream in the middle.

torch gives a pool up with the last graph in it, and refuses to record into it from then on. So the first graph of a
backend is one in which nothing is, which is kept: others may come and go, and a first segment may be empty. While it is
recorded the pool gets its memory, in one piece that later graphs cut up: else each size that is larger than those
before would have pieces of its own. All graphs in which nothing is are kept: when torch destroys one, it frees the
workspaces of the recording stream, which other graphs still use (pytorch#193402).
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Final

import torch

from hetero_worker.runners.graphs.breaks import Replay

_ERRORS_OF: Final = "thread_local"
_EMPTY: Final = "CUDA Graph is empty"


class CudaGraphBackend:
    """Implements GraphBackend; see the module."""

    records_device_sums = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._open: torch.cuda.CUDAGraph | None = None
        self._empty: list[torch.cuda.CUDAGraph] = []
        self._place_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """See `GraphBackend.reserve`."""
        self._place_bytes = num_bytes

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """See `GraphBackend.aside`."""
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            yield
        computing.wait_stream(self._stream)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """See `GraphBackend.recording`."""
        with _collector_resting(), self.aside():
            try:
                if not self._empty:
                    self._make_keeper()
                yield
            finally:
                self._give_up()

    def begin(self) -> None:
        """See `GraphBackend.begin`."""
        self._open = self._begun()

    def end(self) -> Replay | None:
        """See `GraphBackend.end`."""
        graph, self._open = self._open, None
        if graph is None:
            raise RuntimeError("no segment is being recorded")
        if _end_empty(graph):
            self._empty.append(graph)
            return None
        graph.replay()  # while it was captured nothing was done
        return graph.replay

    def free_bytes(self) -> int:
        """See `GraphBackend.free_bytes`."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free

    def _begun(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode=_ERRORS_OF)
        return graph

    def _make_keeper(self) -> None:
        keeper = self._open = self._begun()
        if self._place_bytes:
            place = torch.cuda.caching_allocator_alloc(self._place_bytes, self._device)
            torch.cuda.caching_allocator_delete(place)  # type: ignore[no-untyped-call]
        self._open = None
        _end_empty(keeper)
        self._empty.append(keeper)

    def _give_up(self) -> None:
        graph, self._open = self._open, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):  # that what failed has broken the capture is known
                graph.capture_end()


def _end_empty(graph: torch.cuda.CUDAGraph) -> bool:
    """End the capture; whether nothing was given to the device in it."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        graph.capture_end()
    return any(_EMPTY in str(warning.message) for warning in warned)


@contextlib.contextmanager
def _collector_resting() -> Iterator[None]:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""GraphBackend of a CUDA device.

All graphs of a backend share one memory pool: they never run at the same time, so what one leaves behind another may
use. Recording goes on a stream of its own, for the default one cannot be captured, and so does the pass that prepares
it: libraries keep workspaces by stream, and these have to be there before. Other threads (NCCL's watchdog) may ask the
driver what they like meanwhile. Python's collector rests, lest it frees a tensor of another stream in the middle.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Final

import torch

from hetero_worker.runners.graphs.backend import Replay

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

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            yield
        computing.wait_stream(self._stream)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with _collector_resting(), self.aside():
            try:
                yield
            finally:
                self._give_up()

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode=_ERRORS_OF)
        self._open = graph

    def end(self) -> Replay | None:
        graph, self._open = self._open, None
        if graph is None:
            raise RuntimeError("no segment is being recorded")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            graph.capture_end()
        if any(_EMPTY in str(warning.message) for warning in told):
            return None
        graph.replay()  # while it was captured nothing was done
        return graph.replay

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free

    def _give_up(self) -> None:
        graph, self._open = self._open, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):  # that what failed has broken the capture is known
                graph.capture_end()


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

"""DeviceSteps: the StepMaker of a GPU rank: with graphs where its device has them and nobody has turned them off."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetero_worker.backends.base import Platform
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.forward import EagerForward
from hetero_worker.runners.graphs.backend import GraphBackend
from hetero_worker.runners.graphs.cuda_backend import CudaGraphBackend
from hetero_worker.runners.graphs.device_inputs import DeviceInputs
from hetero_worker.runners.graphs.graph_forward import GraphForward
from hetero_worker.runners.graphs.padding import Padding
from hetero_worker.runners.plan_check import PlanBounds
from hetero_worker.runners.runner_device import StepParts
from hetero_worker.runners.running_step import synchronous_because
from hetero_worker.runners.shard import graph_memory

MakeGraphs = Callable[[torch.device], GraphBackend]
"""One a cache: its memory goes with the cache's graphs."""


def graphs_of(device: torch.device) -> MakeGraphs | None:
    """Return the maker of the device's recorder; None where nothing records."""
    return CudaGraphBackend if device.type == "cuda" else None


class DeviceSteps:
    """Implements StepMaker; see the module."""

    def __init__(self, platform: Platform, make_graphs: MakeGraphs | None) -> None:
        self._platform = platform
        self._make_graphs = make_graphs

    def make(self, bounds: PlanBounds, request: LoadRequest) -> StepParts:
        """Make inputs and forward pass of a new cache."""
        padding = self._padding(request)
        inputs = DeviceInputs(bounds, self._platform, padding)
        async_inputs = None if synchronous_because(request) else inputs
        if self._make_graphs is None or not padding.sizes:
            return StepParts(inputs, EagerForward(), async_inputs)
        backend = self._make_graphs(self._platform.device)
        reserved = graph_memory(request, padding.sizes)
        return StepParts(inputs, GraphForward(backend, padding.sizes, bounds=bounds, reserved=reserved), async_inputs)

    def kernels(self, request: LoadRequest, exchange: Exchange | None) -> tuple[str, ...]:  # noqa: ARG002
        """Return the lines of LoadReport.kernels about steps."""
        problem = synchronous_because(request)
        return (f"graphs={self._padding(request)}", f"steps={f'synchronous ({problem})' if problem else 'async'}")

    def graph_sizes(self, request: LoadRequest) -> tuple[int, ...]:
        """Return LoadReport.graph_sizes."""
        return self._padding(request).sizes

    def _padding(self, request: LoadRequest) -> Padding:
        if self._make_graphs is None:
            return Padding((), f"there are none on {self._platform.device.type}")
        return Padding.of(request)

"""CudaSteps: the StepMaker of a GPU rank, with graphs where steps can be padded and nobody has turned them off."""

from __future__ import annotations

from hetero_worker.backends.cuda.driver import CudaDriver
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.forward import EagerForward
from hetero_worker.runners.graphs.device_inputs import DeviceInputs
from hetero_worker.runners.graphs.graph_forward import GraphForward
from hetero_worker.runners.graphs.padding import HOST_CHOOSES, Padding, has_experts
from hetero_worker.runners.plan_check import PlanBounds
from hetero_worker.runners.running_step import synchronous_because
from hetero_worker.runners.shard import graph_memory
from hetero_worker.runners.step_parts import StepParts


class CudaSteps:
    """Implements StepMaker; see the module."""

    def __init__(self, driver: CudaDriver, *, has_kernels: bool) -> None:
        """`has_kernels`: our kernels compute a layer's experts together, and adapters' products without the host."""
        self._driver = driver
        self._has_kernels = has_kernels

    def make(self, bounds: PlanBounds, request: LoadRequest) -> StepParts:
        """Make inputs and forward pass of a new cache."""
        driver, padding = self._driver, self._padding(request)
        inputs = DeviceInputs(
            bounds, padding, device=driver.device, streams=driver.streams(), pins_memory=driver.pins_memory
        )
        async_inputs = None if self._synchronous_because(request) else inputs
        if not padding.sizes:
            return StepParts(inputs, EagerForward(), async_inputs)
        reserved = graph_memory(request, padding.sizes)
        forward = GraphForward(
            driver.graphs(),
            padding.sizes,
            bounds=bounds,
            reserved=reserved,
            records_adapters=self._all_have_kernels(request) and request.max_adapters > 0,
        )
        return StepParts(inputs, forward, async_inputs)

    def kernels(self, request: LoadRequest, exchange: Exchange | None) -> tuple[str, ...]:  # noqa: ARG002
        """Return the lines of Loaded.kernels about steps."""
        problem = self._synchronous_because(request)
        return (f"graphs={self._padding(request)}", f"steps={f'synchronous ({problem})' if problem else 'async'}")

    def graph_sizes(self, request: LoadRequest) -> tuple[int, ...]:
        """Return Loaded.graph_sizes."""
        return self._padding(request).sizes

    def _padding(self, request: LoadRequest) -> Padding:
        if not self._driver.records_graphs:
            return Padding((), "the device records none")
        return Padding.of(request, joins_experts=self._all_have_kernels(request))

    def _all_have_kernels(self, request: LoadRequest) -> bool:
        return self._has_kernels and request.gpus_have_kernels

    def _synchronous_because(self, request: LoadRequest) -> str:
        if not self._has_kernels and has_experts(request):
            return HOST_CHOOSES
        return synchronous_because(request)

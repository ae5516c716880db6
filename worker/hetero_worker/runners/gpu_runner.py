"""The runner of a rank on a GPU.

Weights, KV cache, token ids, positions and slots lie on the device; lengths and block tables begin on the host, and
attention takes of them what it needs. A step gives work to the device and waits for it where its draws are decided, so
plans that draw nothing do not wait at all; nor does a rank alone before it has begun the next step, if that is there
(`running_step`). Steps that only decode are replayed from graphs (`graphs`).

Weights that sleep (level 1) go to host memory, and come back to the same tensors.
"""

from __future__ import annotations

from hetero_worker.backends.base import Platform
from hetero_worker.layers.sampler import SampleTokens, sample_tokens
from hetero_worker.memory.memory_pool import memory_pool_of
from hetero_worker.runners.graphs.device_steps import DeviceSteps, MakeGraphs, graphs_of
from hetero_worker.runners.largest_step import measure_workspace
from hetero_worker.runners.plan_runner import MeasureWorkspace, PlanRunner
from hetero_worker.runners.runner_device import RunnerDevice


class GpuRunner(PlanRunner):
    """A PlanRunner whose tensors are a device's."""

    def __init__(
        self,
        platform: Platform,
        *,
        sample: SampleTokens = sample_tokens,
        measure: MeasureWorkspace = measure_workspace,
        make_graphs: MakeGraphs | None = None,
    ) -> None:
        """`make_graphs` None: what records on the platform's device, if anything does."""
        device = RunnerDevice(
            platform=platform,
            memory_pool=memory_pool_of(platform.device),
            steps=DeviceSteps(platform, make_graphs or graphs_of(platform.device)),
            offloads_weights=True,
        )
        super().__init__(device, sample=sample, measure=measure)

"""Runners of CPU and of GPU ranks, and the choice between them by the platform's kind.

On host cores everything runs on the calling thread and the native team's or torch's threads; the cores are bound before
torch starts. A steady step that only decodes takes no memory from the system: inputs lie in buffers that last, and
temporaries come from the C library's heap, which keeps them (`host.process_memory`).

On a GPU weights, KV cache, token ids, positions and slots lie on the device; lengths and block tables begin on the
host. Steps that only decode are replayed from graphs (`graphs`). Weights that sleep (level 1) go to host memory, and
come back to the same tensors.
"""

from __future__ import annotations

from hetero_worker.backends.base import Platform
from hetero_worker.backends.cpu import CpuPlatform
from hetero_worker.layers.sampler import SampleTokens, sample_tokens
from hetero_worker.memory.memory_pool import HostMemoryPool, memory_pool_of
from hetero_worker.runners.graphs.device_steps import DeviceSteps, MakeGraphs, graphs_of
from hetero_worker.runners.plan_runner import MeasureWorkspace, PlanRunner
from hetero_worker.runners.profile_run import measure_workspace
from hetero_worker.runners.recorded.steps import NativeSteps
from hetero_worker.runners.runner_device import RunnerDevice


class CpuRunner(PlanRunner):
    """A PlanRunner whose tensors are the host's."""

    def __init__(
        self,
        platform: Platform | None = None,
        *,
        sample: SampleTokens = sample_tokens,
        measure: MeasureWorkspace = measure_workspace,
    ) -> None:
        """`platform` None: all of this process's cores."""
        platform = CpuPlatform() if platform is None else platform
        device = RunnerDevice(
            platform=platform,
            memory_pool=HostMemoryPool(),
            steps=NativeSteps(platform),
            offloads_weights=False,
        )
        super().__init__(device, sample=sample, measure=measure)


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


def runner_of(
    platform: Platform,
    *,
    sample: SampleTokens = sample_tokens,
    measure: MeasureWorkspace = measure_workspace,
) -> PlanRunner:
    """Return a GpuRunner for a GPU, a CpuRunner for host cores."""
    make = CpuRunner if platform.is_host else GpuRunner
    return make(platform, sample=sample, measure=measure)

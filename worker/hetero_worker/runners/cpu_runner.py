"""The runner of a rank on host cores.

Everything runs on the calling thread and torch's intra-op threads; the cores are bound before torch starts, by
the rank.

What a steady step that only decodes takes from memory: inputs are made in buffers that last (`input_batch`), and so
are the indices and scores of attention and what is gathered by it (`attention`). Temporaries are left where torch's
kernels have no out= variant, or packed ones have none: outputs of linear layers and norms, the embedded tokens, the
attention's sum, the sampler's scores. They come from and go back to the C library's heap, which keeps them
(`host_allocator`): a steady step takes nothing from the system.
"""

from __future__ import annotations

from hetero_worker.backends.base import Platform
from hetero_worker.backends.cpu import CpuPlatform
from hetero_worker.layers.sampler import SampleTokens, sample_tokens
from hetero_worker.memory.memory_pool import HostMemoryPool
from hetero_worker.runners.largest_step import measure_workspace
from hetero_worker.runners.native_steps import NativeSteps
from hetero_worker.runners.plan_runner import MeasureWorkspace, PlanRunner
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

"""Which runner a rank has: its platform decides, by kind."""

from __future__ import annotations

from hetero_worker.backends.base import Platform
from hetero_worker.layers.sampler import SampleTokens, sample_tokens
from hetero_worker.runners.cpu_runner import CpuRunner
from hetero_worker.runners.gpu_runner import GpuRunner
from hetero_worker.runners.largest_step import measure_workspace
from hetero_worker.runners.plan_runner import MeasureWorkspace, PlanRunner


def runner_of(
    platform: Platform,
    *,
    sample: SampleTokens = sample_tokens,
    measure: MeasureWorkspace = measure_workspace,
) -> PlanRunner:
    """A GpuRunner for a GPU, a CpuRunner for host cores."""
    make = CpuRunner if platform.is_host else GpuRunner
    return make(platform, sample=sample, measure=measure)

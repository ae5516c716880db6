"""The ways of sampling: on the host, by torch and natively, and the device's, played on the host's tensors.

Sampler tests say `usefixtures("both_paths")` and run on each; the fixture is in tests/unit/worker_model/conftest.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType

import pytest
import torch

from hetero_worker.distributed.staging import PlainStaging
from hetero_worker.layers.sampler import sample_tokens
from hetero_worker.memory.streams import HOST
from hetero_worker.sampling.base import HOST_SAMPLER, HostSampler, ShardSampler, StartedDraws, UnknownTokens
from hetero_worker.sampling.device import DeviceSampler
from hetero_worker.sampling.device_kernels import SamplingKernels, TorchSamplingKernels
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import Float64Array, native_best
from tests.support import sampling_reference
from tests.support.native_compute import op_queue_of

PATHS = ("host", "native", "device", "mixed")


def device_sampler(kernels: SamplingKernels | None = None) -> DeviceSampler:
    """Return the sampler of a device that is the host."""
    return DeviceSampler(HOST, kernels or TorchSamplingKernels(), PlainStaging().start_to_host)


class NativeOfThread:
    """`native_best` with a queue for each thread: ranks are threads here."""

    def __init__(self) -> None:
        self._own = threading.local()

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingRow], begin: int) -> Float64Array:
        if not hasattr(self._own, "queue"):
            self._own.queue = op_queue_of(1)
        return native_best(self._own.queue, logits, rows, begin)


class AlternatingSampler:
    """Sampler of a mixed group: by turns the device's and the host's, as shards happen to come."""

    name = "mixed"

    def __init__(self) -> None:
        self._device = device_sampler()
        self._turn = 0

    def start(
        self,
        rows: Sequence[SamplingRow],
        logits: torch.Tensor,
        begin: int,
        *,
        is_whole: bool = False,
        unknown: UnknownTokens | None = None,
    ) -> StartedDraws:
        assert unknown is None
        self._turn += 1
        sampler: ShardSampler = self._device if self._turn % 2 else HOST_SAMPLER
        return sampler.start(rows, logits, begin, is_whole=is_whole)

    def to_host(self, logits: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        return self._device.to_host(logits, chosen)


@contextmanager
def sampled_by(sampler: ShardSampler, *modules: ModuleType) -> Iterator[None]:
    """Let `sample_tokens` in these modules and in the reference's draws use this sampler."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (sampling_reference, *modules):
            if hasattr(module, "sample_tokens"):
                patch.setattr(module, "sample_tokens", partial(sample_tokens, sampler=sampler))
        yield


def path(name: str) -> ShardSampler:
    """Return the sampler of one of PATHS."""
    paths: dict[str, ShardSampler] = {
        "host": HOST_SAMPLER,
        "native": HostSampler(NativeOfThread()),
        "device": device_sampler(),
        "mixed": AlternatingSampler(),
    }
    return paths[name]

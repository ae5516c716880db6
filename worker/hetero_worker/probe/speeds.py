"""How fast a rank is: its device, which it tells at Hello, and the model's parts on it, which it tells when the group
has formed: then the arithmetic type is known, and all ranks measure at once, as they will compute. Two ranks that read
one memory are slower together than each was alone.

`costs_dtype` says in which type the parts were measured; who predicts another one scales.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Final

import torch

from hetero_api.host.memory import release_freed_memory
from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.distributed.coordinator import GroupCoordinator
from hetero_worker.layers.linear_kernels import LinearKernel, kept_bits
from hetero_worker.probe.costs import measure_costs
from hetero_worker.probe.layers import Site, WorkRecorder, as_it_is
from hetero_worker.probe.sizes import WEIGHT_BYTES
from hetero_worker.probe.synthetic import SyntheticWeights
from hetero_worker.process.tuning_cache import TuningCache
from hetero_worker.runners.base import WorkProgress
from hetero_worker.runners.shard import DTYPES

logger = logging.getLogger(__name__)

_MEMORY_SHARE: Final = 8
"""A rank with little memory measures with so small a part of it."""

_MATRIX_SIZE: Final = 256


class RankProbe:
    """Measures for one rank; costs once for each arithmetic type and width of weights of a model, named by `model`."""

    def __init__(
        self, backend: DeviceBackend, kept: TuningCache, *, model: str, progress: WorkProgress | None = None
    ) -> None:
        self._backend = backend
        self._progress = progress
        self._kept = kept
        self._model = model

    def costs(self, dtype: str, config: ModelConfig, peers: GroupCoordinator) -> ranks_pb2.DeviceSpeeds:
        """See `measure_parts`, with bandwidths; measured again unless all ranks of the peers have before. Collective.

        `config`: the rank's, maybe with other weights.
        """

        def measure() -> ranks_pb2.DeviceSpeeds:
            speeds = measure_parts(self._backend, config, dtype=dtype, peers=peers, progress=self._progress)
            bandwidths = peers.shared_bandwidth(self._backend.bandwidth)
            speeds.memory_bandwidth, speeds.lone_memory_bandwidth = bandwidths
            return speeds

        return self._kept.speeds(f"{self._model} {dtype} {config.weights}", measure, all_have=peers.all_can)

    def fixed_needs(self, dtype: str, config: ModelConfig) -> ranks_pb2.Formed:
        """See `fixed_needs`."""
        return fixed_needs(self._backend, config, dtype=dtype)

    def compute(self) -> None:
        """Compute a product that is worth all of the rank's threads, and takes well under a millisecond."""
        matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, device=self._backend.device)
        torch.mm(matrix, matrix)


def measure_speeds(
    backend: DeviceBackend,
    config: ModelConfig,
    *,
    peers: GroupCoordinator,
    dtype: str = "",
    kernel: LinearKernel | None = None,
) -> ranks_pb2.DeviceSpeeds:
    """Measure the device, then the parts.

    `dtype` as in LoadModel; empty: the backend's default. `kernel` as in `measure_parts`.
    """
    speeds = measure_device(backend)
    dtype = dtype or backend.default_dtype
    speeds.MergeFrom(measure_parts(backend, config, dtype=dtype, peers=peers, kernel=kernel))
    return speeds


def measure_parts(
    backend: DeviceBackend,
    config: ModelConfig,
    *,
    dtype: str,
    peers: GroupCoordinator,
    kernel: LinearKernel | None = None,
    progress: WorkProgress | None = None,
) -> ranks_pb2.DeviceSpeeds:
    """Measure the model's parts, with weights as wide as the model's; takes some two seconds.

    `kernel` None: the one that a rank with the backend uses. `progress` counts visits. Collective.
    """
    began_s = time.perf_counter()
    config = replace(config, weights=config.weights.made_at_load)
    site = _site(backend, config, DTYPES[dtype], kernel)
    weight_bytes = min(WEIGHT_BYTES, backend.memory_bytes // _MEMORY_SHARE)
    measured = measure_costs(
        config, site, clock=backend, weight_bytes=weight_bytes, peers=peers, progress=progress or WorkProgress()
    )
    site.backend.release()
    release_freed_memory()
    logger.info("measured the model's parts in %s in %.2f s", dtype, time.perf_counter() - began_s)
    return ranks_pb2.DeviceSpeeds(
        costs=measured.parts, costs_dtype=dtype, meeting_s=measured.meeting_s, lone_gain=measured.lone_gain
    )


def fixed_needs(backend: DeviceBackend, config: ModelConfig, *, dtype: str) -> ranks_pb2.Formed:
    """Return the memory that a rank with the backend needs now, before its part of the model, as fields of Formed.

    With a dtype it names the widths below it, too, in which the rank would keep the model's weights. Call it once all
    communicators exist: they take memory.
    """
    bits = kept_bits(backend.linear(DTYPES[dtype], batch_invariant=False), DTYPES[dtype], config) if dtype else ()
    return ranks_pb2.Formed(
        runtime_bytes=backend.memory_pool.runtime_bytes(),
        gather_bytes=backend.attention(config, batch_invariant=False).gather_bytes,
        weight_bits=sorted(bits),
    )


def measure_device(backend: DeviceBackend) -> ranks_pb2.DeviceSpeeds:
    """All but the costs; takes half a second."""
    measured = backend.measure()
    return ranks_pb2.DeviceSpeeds(
        memory_bandwidth=measured.memory_bandwidth,
        matmul=[
            ranks_pb2.MatmulRate(dtype=dtype, flops=flops) for dtype, flops in sorted(measured.matmul_flops.items())
        ],
        to_device_bandwidth=measured.to_device_bandwidth,
        from_device_bandwidth=measured.from_device_bandwidth,
        device_latency_s=measured.device_latency_s,
    )


def _site(backend: DeviceBackend, config: ModelConfig, dtype: torch.dtype, kernel: LinearKernel | None) -> Site:
    return Site(
        device=backend.device,
        dtype=dtype,
        kernel=kernel or backend.linear(dtype, batch_invariant=False),
        backend=backend.attention(config, batch_invariant=False),
        checkpoint=SyntheticWeights(floats=config.weights.floats),
        ops=backend.fused_ops(batch_invariant=False),
        sampler=backend.sampler(),
        zeros=backend.memory_pool.zeros,
        record=WorkRecorder(backend.op_queue) if backend.op_queue is not None else as_it_is,
    )

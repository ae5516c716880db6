"""One CUDA device: Triton's kernels, graphs of steps, copies on streams. Only ranks that compute there import it.

Weights, KV cache, token ids, positions and slots lie on the device; lengths and block tables begin on the host. Steps
that only decode are replayed from graphs (`runners.graphs`). Weights that sleep (level 1) go to host memory, and come
back to the same tensors. Where Triton does not work or the kernels lack a model's shapes, torch's operators serve, and
reports say why; batch-invariant mode is then refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final

import torch
from torch.profiler import ProfilerActivity

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.attention.base import AttentionBackend, LatentExpansion
from hetero_worker.attention.torch_paged import TorchPagedAttention
from hetero_worker.backends.base import DeviceBackend, Measurement, Work
from hetero_worker.backends.cuda.driver import CudaDriver
from hetero_worker.backends.cuda.steps import CudaSteps
from hetero_worker.backends.speeds import copy_bandwidths, matmul_flops, read_bandwidth, round_trip_s
from hetero_worker.distributed.staging import Staging, StreamStaging
from hetero_worker.errors import DeviceError
from hetero_worker.kernels.availability import attention_problem, triton_problem
from hetero_worker.layers.fused_ops import FusedOps, PlainOps
from hetero_worker.layers.linear_kernels import LinearKernel, PlainKernel
from hetero_worker.memory.memory_pool import MemoryPool
from hetero_worker.memory.streams import DeviceStreams
from hetero_worker.memory.weight_offload import OffloadedWeights
from hetero_worker.runners.step_parts import StepMaker
from hetero_worker.sampling.base import ShardSampler
from hetero_worker.sampling.device import DeviceSampler
from hetero_worker.sampling.device_kernels import SamplingKernels, TorchSamplingKernels

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 4 * 1024 * 1024 * 1024
"""So long a read that neither the caches nor the beginning of a kernel count."""
_MATRIX_SIZE: Final = 8192
_PROGRAMS_PER_MULTIPROCESSOR: Final = 4
"""Programs that run at a time: enough warps to hide the memory's latency."""


class CudaBackend(DeviceBackend):
    """The device of an index, among those that this process sees. `pool` is named in errors."""

    kind = ranks_pb2.DEVICE_KIND_CUDA
    default_dtype = "bfloat16"
    computes_beside_copies = True

    def __init__(self, index: int, *, pool: str, driver: CudaDriver | None = None) -> None:
        """`driver` None: the device's own."""
        self._index = index
        self._pool = pool
        self._driver = driver or CudaDriver(index)

    @property
    def name(self) -> str:
        """Name of the device, as the driver reports it."""
        return self._driver.name

    @property
    def device(self) -> torch.device:
        """Device of the rank's tensors."""
        return self._driver.device

    @property
    def memory_bytes(self) -> int:
        """Memory of the whole device."""
        return self._driver.memory_bytes

    @property
    def dtypes(self) -> frozenset[str]:
        """Arithmetic types of the device."""
        narrow = {"bfloat16", "float16"} if self._driver.has_bfloat16 else {"float16"}
        return frozenset({"float32", *narrow})

    @property
    def has_kernels(self) -> bool:
        """See `DeviceBackend.has_kernels`. One of Triton's is compiled for it, which takes seconds the first time."""
        return self._triton_problem is None

    def cache_dtypes(self, dtype: str) -> frozenset[str]:  # noqa: ARG002 - the same for all
        """Return all types that the device computes in: what is cached is converted where it is read."""
        return self.dtypes

    @property
    def collectives(self) -> str:
        """NCCL."""
        return self._driver.collectives

    @property
    def profiler_activities(self) -> Sequence[ProfilerActivity]:
        """See `DeviceBackend.profiler_activities`."""
        return self._driver.profiler_activities

    def open(self) -> None:
        """Take the device. Raises DeviceError, with what to do, if there is none."""
        if (problem := self._driver.problem()) is not None:
            raise DeviceError(f"pool {self._pool}: this rank is to compute on cuda:{self._index}, but {problem}")
        self._driver.take()

    def memory_share(self, asked: float) -> float:
        """Return the share that the resource asks for; all without one."""
        return asked or 1.0

    def bandwidth(self) -> float:
        """See `DeviceBackend.bandwidth`."""
        num_bytes = min(_READ_BYTES, self._driver.free_bytes() // 4)
        return read_bandwidth(self.device, num_bytes, self.laps)

    def measure(self) -> Measurement:
        """Measure bandwidth, matrix products, and copies over the bus."""
        device, pinned, laps = self.device, self._driver.pins_memory, self.laps
        to_device, from_device = copy_bandwidths(device, laps, pins_memory=pinned)
        return Measurement(
            memory_bandwidth=self.bandwidth(),
            matmul_flops=matmul_flops(device, self.dtypes, size=_MATRIX_SIZE, laps=laps),
            to_device_bandwidth=to_device,
            from_device_bandwidth=from_device,
            device_latency_s=round_trip_s(device, laps, pins_memory=pinned),
        )

    def laps(self, works: Sequence[Work]) -> list[float]:
        """See `DeviceBackend.laps`."""
        return self._driver.laps(works)

    @cached_property
    def memory_pool(self) -> MemoryPool:
        """Pool of the device's memory."""
        return self._driver.memory_pool()

    def touch_cache(self, caches: Iterable[torch.Tensor]) -> None:
        """Do nothing: a device's memory has its pages when it is allocated."""

    def staging(self) -> Staging:
        """Return staging on new streams."""
        return StreamStaging(self._driver.streams())

    def streams(self) -> DeviceStreams:
        """See `DeviceBackend.streams`."""
        return self._driver.streams()

    def offload(self, tensors: Iterable[torch.Tensor]) -> OffloadedWeights:
        """See `DeviceBackend.offload`."""
        return OffloadedWeights(tensors, pool=self.memory_pool, streams=self._driver.streams())

    def attention(self, config: ModelConfig, *, batch_invariant: bool) -> AttentionBackend:
        """See `DeviceBackend.attention`."""
        shapes, value_dim = _attention_shapes(config), None if config.latent is None else config.latent.rank
        expansion = None if config.latent is None else LatentExpansion(config.latent)
        problems = [self._triton_problem]
        if config.latent is not None and batch_invariant:
            problems.append("torch norms and rotates what latent attention caches")
        problems += [attention_problem(head_dim=dim, group_size=group, value_dim=value_dim) for dim, group in shapes]
        problem = next(filter(None, problems), None)
        if problem is not None:
            _refuse_if(batch_invariant, problem)
            return TorchPagedAttention(self.device, reason=problem, expansion=expansion)
        from hetero_worker.attention.triton_paged import TritonPagedAttention  # imports triton

        programs = _PROGRAMS_PER_MULTIPROCESSOR * self._driver.num_multiprocessors
        return TritonPagedAttention(
            self.device, head_dim=max(dim for dim, _ in shapes), group_size=max(group for _, group in shapes),
            value_dim=value_dim, expansion=expansion, batch_invariant=batch_invariant, num_programs=programs,
        )  # fmt: skip

    def linear(self, dtype: torch.dtype, *, batch_invariant: bool) -> LinearKernel:
        """See `DeviceBackend.linear`. Without Triton, quantised weights are widened."""
        if (problem := self._triton_problem) is not None:
            _refuse_if(batch_invariant, problem)
            return PlainKernel()
        from hetero_worker.layers.triton.linear import DeviceKernel, TritonKernel  # imports triton

        kind = TritonKernel if batch_invariant else DeviceKernel
        return kind(self.device, dtype)

    def fused_ops(self, *, batch_invariant: bool) -> FusedOps:
        """See `DeviceBackend.fused_ops`."""
        if (problem := self._triton_problem) is not None:
            _refuse_if(batch_invariant, problem)
            logger.warning("fused steps and sampling use torch's operators, which are slower: %s", problem)
            return PlainOps(problem)
        from hetero_worker.layers.triton_ops import InvariantTritonOps, TritonOps  # imports triton

        return InvariantTritonOps() if batch_invariant else TritonOps()

    @cached_property
    def steps(self) -> StepMaker:
        """Maker of steps that are replayed from graphs."""
        return CudaSteps(self._driver, has_kernels=self.has_kernels)

    def sampler(self) -> ShardSampler:
        """Return a sampler on the device, with streams of its own."""
        return DeviceSampler(self.device, self.sampling_kernels(), self.staging().start_to_host)

    def sampling_kernels(self) -> SamplingKernels:
        """Return Triton's sampling kernels, or torch's operators without Triton."""
        if self._triton_problem is not None:
            return TorchSamplingKernels()
        from hetero_worker.kernels.sampling import TritonSamplingKernels  # imports triton

        return TritonSamplingKernels()

    @cached_property
    def _triton_problem(self) -> str | None:
        """Reason why Triton's kernels cannot run on the device; tried once."""
        return triton_problem(self.device)


def _attention_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Return elements of a head and query heads of a KV head, of all kinds of layers that the model has."""
    if config.latent is not None:  # one KV head for all query heads
        return [(config.latent.cached_dim, config.num_heads)]
    layers = [config.of_layer(layer) for layer in range(config.num_layers)]
    return sorted({(own.head_dim, own.group_size // own.kv_heads_a_unit) for own in layers})


def _refuse_if(batch_invariant: bool, problem: str | None) -> None:
    if batch_invariant and problem is not None:
        raise ModelError(
            f"batch-invariant mode needs our kernels on this device, but {problem}; install what is missing, or turn "
            "engine.batchInvariant off"
        )

"""DeviceBackend: everything that depends on the kind of device that a rank computes on.

The rank's entry makes one object and hands it on; no other module asks what a device is. A rank on host cores never
comes near a GPU's driver: that code is imported by the ranks that compute there.

In the order below: facts, speeds, memory and copies, operators of a model, steps and sampling. Another accelerator
needs a subclass, kernels, and a line in `process.rank.backend_of`. Tests play a GPU by the CUDA backend's own code,
with the driver's calls faked and the operators of `torch_reference`.

In batch-invariant mode (`engine.batchInvariant`) a request's numbers are the same to the last bit, regardless of the
rest of its batch and of how its prompt was split over steps or found in the cache. Every part of a step then computes
each row on its own: attention, linear layers and the operators between them (here), and the order in which ranks' sums
are added (`distributed.rank_order`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity

from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.attention.base import AttentionBackend
from hetero_worker.distributed.staging import Staging
from hetero_worker.layers.fused_ops import FusedOps
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.memory.memory_pool import MemoryPool
from hetero_worker.memory.streams import DeviceStreams
from hetero_worker.memory.weight_offload import OffloadedWeights
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.runners.step_parts import StepMaker
from hetero_worker.sampling.base import ShardSampler

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Speeds of the threads and memory, or the device, that the rank has."""

    memory_bandwidth: float
    """Bytes read a second, from memory, not from cache."""
    matmul_flops: Mapping[str, float]
    """FLOP a second of a square matrix product (2·n³ each), by arithmetic type."""
    to_device_bandwidth: float = 0.0
    """Bytes a second from pinned host memory to the device's; 0 where they are the same."""
    from_device_bandwidth: float = 0.0
    """Bytes a second back."""
    device_latency_s: float = 0.0
    """Seconds of the smallest copy from the device to the host and back."""


class DeviceBackend(ABC):
    """One device, and the ways to compute on it.

    Made without a look at the device; `open` takes it, and everything else is asked for later.
    """

    kind: ranks_pb2.DeviceKind.ValueType
    """Kind of device, as the contract numbers it."""
    default_dtype: str
    """Arithmetic type of a group whose resource leaves it open, as far as one rank can know."""
    op_queue: OpQueue | None = None
    """Queue of native operations; None where there are no native kernels."""
    home: int | None = None
    """CPU that the thread of the steps should keep to; None: it may be anywhere."""
    computes_beside_copies: bool = False
    """True if copies to and from the host overlap with the rank's computing."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the device, as the system reports it."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the rank's tensors."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory that the rank may use: the host's share of it, or the whole device's."""

    @property
    @abstractmethod
    def has_kernels(self) -> bool:
        """Whether our own kernels run on the device, rather than torch's operators alone."""

    @property
    @abstractmethod
    def dtypes(self) -> frozenset[str]:
        """Arithmetic types, by the names of LoadModel.dtype."""

    @abstractmethod
    def cache_dtypes(self, dtype: str) -> frozenset[str]:
        """Return the types of cached keys and values that attention reads where the arithmetic type is `dtype`."""

    @property
    @abstractmethod
    def collectives(self) -> str | None:
        """torch.distributed's backend for collectives among devices of this kind; None: ranks meet on the host."""

    @property
    def profiler_activities(self) -> Sequence[ProfilerActivity]:
        """Activities that a profile of steps includes."""
        return (ProfilerActivity.CPU,)

    @abstractmethod
    def open(self) -> None:
        """Take the device for this process. Raises DeviceError when there is no such device. Idempotent."""

    @abstractmethod
    def memory_share(self, asked: float) -> float:
        """Return the share of `memory_bytes` that the rank may take; `asked` is LoadModel's, 0 if unset."""

    @abstractmethod
    def bandwidth(self) -> float:
        """Return the bytes of memory read a second, now; takes some hundredths of a second."""

    @abstractmethod
    def measure(self) -> Measurement:
        """Measure the device; takes well under a second. The placement solver sees this, never a data sheet."""

    @abstractmethod
    def laps(self, works: Sequence[Work]) -> list[float]:
        """Do each once, in order, and return the seconds of each.

        On a device that works off a queue: what it adds to the device's time, or to the host's where that is longer.
        """

    @property
    @abstractmethod
    def memory_pool(self) -> MemoryPool:
        """Pool of the device's memory; the same object every time."""

    @abstractmethod
    def touch_cache(self, caches: Iterable[torch.Tensor]) -> None:
        """Make the first pages of a new KV cache ready to be written, where that saves the first steps time."""

    @abstractmethod
    def staging(self) -> Staging:
        """Return new staging for copies to and from the host, on streams of its own."""

    def streams(self) -> DeviceStreams | None:
        """Return new streams for copies between the host and the device; None where they are the same."""
        return None

    @abstractmethod
    def offload(self, tensors: Iterable[torch.Tensor]) -> OffloadedWeights | None:
        """Copy weights that go to sleep to the host; None where they are there already and stay.

        Raises MemoryBudgetError if the host has no room.
        """

    @abstractmethod
    def attention(self, config: ModelConfig, *, batch_invariant: bool) -> AttentionBackend:
        """Return the fastest attention for the model.

        `batch_invariant` here, in `linear` and in `fused_ops`: a row's bits must not depend on the rest of its batch,
        nor on how its prompt was split. Raises ModelError where the device cannot compute so.
        """

    @abstractmethod
    def linear(self, dtype: torch.dtype, *, batch_invariant: bool) -> LinearKernel:
        """Return the kernel of linear layers for inputs of `dtype`."""

    @abstractmethod
    def fused_ops(self, *, batch_invariant: bool) -> FusedOps:
        """Return the operators between linear layers and attention."""

    @property
    @abstractmethod
    def steps(self) -> StepMaker:
        """Maker of steps, which records those that only decode where it can."""

    @abstractmethod
    def sampler(self) -> ShardSampler:
        """Return a sampler of logits that lie on the device."""

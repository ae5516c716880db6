"""Host cores: native kernels in C, with steps that only decode recorded.

Everything runs on the calling thread and the native team's threads; the cores are bound before torch starts. A steady
step that only decodes takes no memory from the system: inputs lie in buffers that last, and temporaries come from the C
library's heap, which keeps them (`host.process_memory`).
"""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import Final

import torch

from hetero_api.model_config import ModelConfig
from hetero_worker.attention.base import AttentionBackend
from hetero_worker.attention.native_paged import NativePagedAttention
from hetero_worker.backends.torch_reference import READ_BYTES, TorchReference
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.invariant_ops import InvariantOps
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.layers.native_ops import NativeOps
from hetero_worker.native.build import COMPUTE_LIBRARY
from hetero_worker.native.op_library import open_op_library
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.runners.recorded.steps import NativeSteps
from hetero_worker.runners.step_parts import StepMaker
from hetero_worker.sampling.base import HostSampler, ShardSampler
from hetero_worker.sampling.shard import native_best

_BF16_ISAS: Final = ("avx512_bf16", "amx")


class CpuBackend(TorchReference):
    """Host cores that compute by the native kernels, whose rows are independent of each other in any mode."""

    has_kernels = True

    def __init__(
        self,
        op_queue: OpQueue,
        *,
        home: int | None = None,
        memory_bytes: int = 0,
        read_bytes: int = READ_BYTES,
        records: bool = True,
    ) -> None:
        """`home` as in OpLibrary; bytes as in TorchReference; `records` False: steps run operator by operator."""
        super().__init__(memory_bytes=memory_bytes, read_bytes=read_bytes)
        self.op_queue: OpQueue = op_queue
        self.home = home
        self._records = records

    @property
    def measured_dtypes(self) -> frozenset[str]:
        """See `TorchReference`. Kernels without instructions for bfloat16 widen it; torch's products take seconds."""
        return self.dtypes if self.op_queue.team.library.isa in _BF16_ISAS else frozenset({"float32"})

    def attention(self, config: ModelConfig, *, batch_invariant: bool) -> AttentionBackend:  # noqa: ARG002
        """See `DeviceBackend.attention`."""
        return NativePagedAttention(self.op_queue)

    def linear(self, dtype: torch.dtype, *, batch_invariant: bool) -> LinearKernel:  # noqa: ARG002
        """See `DeviceBackend.linear`."""
        return NativeLinear(self.op_queue, dtype)

    def fused_ops(self, *, batch_invariant: bool) -> FusedOps:
        """See `DeviceBackend.fused_ops`."""
        return NativeOps(self.op_queue, others=InvariantOps() if batch_invariant else PLAIN_OPS)

    def sampler(self) -> ShardSampler:
        """Return the host's sampler with native draws."""
        return HostSampler(partial(native_best, self.op_queue))

    @cached_property
    def steps(self) -> StepMaker:
        """Maker of recorded steps."""
        return NativeSteps(self.op_queue) if self._records else NativeSteps(None, "recording is turned off")


def cpu_backend(
    *, memory_bytes: int = 0, read_bytes: int = READ_BYTES, library: Path = COMPUTE_LIBRARY, records: bool = True
) -> TorchReference:
    """Return the backend of this process's cores: a CpuBackend where the library is built, else a TorchReference.

    It starts a native team of as many threads as torch has, on the cores that the process is bound to.
    """
    native = open_op_library(torch.get_num_threads(), path=library)
    if native.op_queue is None:
        return TorchReference(native.reason, memory_bytes=memory_bytes, read_bytes=read_bytes)
    return CpuBackend(
        native.op_queue, home=native.home, memory_bytes=memory_bytes, read_bytes=read_bytes, records=records
    )


_GRAIN: Final = 32768
"""Elements that torch gives a thread at least: at::internal::GRAIN_SIZE."""


def start_compute_threads(num_threads: int) -> None:
    """Use that many threads, the calling one included, from now on. Costs some hundred microseconds.

    OpenMP starts its threads at the first piece of work that is large enough, and they keep the affinity that the
    caller has at that moment. A rank leaves its cores for a while when it forms groups (`numa.threads_started_on`),
    and on a rank that has all its measurements already that may be the first piece of work. So they are started here.
    """
    torch.set_num_threads(num_threads)
    torch.empty(2 * _GRAIN * num_threads, dtype=torch.uint8).fill_(0)

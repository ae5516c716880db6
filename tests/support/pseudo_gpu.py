"""Pseudo GPUs: GPU ranks whose device is the host, so that a mixed group runs where there is no GPU.

They are the CUDA backend's own code, with its driver's calls faked and operators by torch: tensors that are copied to
"the device" on streams, graphs of steps where a test records them, a device group (Gloo's, beside the one of all
ranks), weights that sleep elsewhere. Only the tensors lie on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity

from hetero_api.model_config import ModelConfig
from hetero_worker.attention.base import AttentionBackend, LatentExpansion
from hetero_worker.attention.torch_paged import TorchPagedAttention
from hetero_worker.backends.base import Measurement, Work
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.backends.cuda.driver import CudaDriver
from hetero_worker.backends.torch_reference import TorchOperators, TorchReference
from hetero_worker.memory.memory_pool import HostMemoryPool, MemoryPool
from hetero_worker.memory.streams import HOST, PAST, Copies, DeviceStreams, Moment, Way
from hetero_worker.runners.graphs.breaks import GraphBackend

MEMORY_BYTES = 2 * 1024**3

MakeGraphs = Callable[[torch.device], GraphBackend]
"""Makes the recorder of a cache's graphs."""


class PlayedStreams:
    """DeviceStreams of the host: everything is done when it is asked for. PlayedDevice is one that takes its time."""

    def now(self) -> Moment:
        return PAST

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def copy(self, way: Way, copies: Copies, *, after: Moment) -> Moment:
        for source, target in copies:
            target.copy_(source)
        return PAST

    def compute_after(self, moment: Moment) -> None:
        """Nothing is under way."""

    def settle(self) -> None:
        """Nothing is under way."""

    def pin(self, address: int, num_bytes: int) -> str:
        return ""

    def unpin(self, address: int) -> None:
        """Nothing was done."""


class PlayedDriver(CudaDriver):
    """Calls of a driver of a device that is none. `make_graphs` None: it records no graphs."""

    collectives = "gloo"
    pins_memory = False
    profiler_activities = (ProfilerActivity.CPU,)

    def __init__(self, index: int, memory_bytes: int, make_graphs: MakeGraphs | None) -> None:
        super().__init__(index)
        self._memory_bytes = memory_bytes
        self._make_graphs = make_graphs
        self.records_graphs = make_graphs is not None

    @property
    def device(self) -> torch.device:
        return HOST

    @property
    def name(self) -> str:
        return f"pseudo GPU {self._index}"

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    @property
    def has_bfloat16(self) -> bool:
        return True

    def problem(self) -> str | None:
        return None

    def take(self) -> None:
        """The host is there."""

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def free_bytes(self) -> int:
        return self._memory_bytes

    def laps(self, works: Sequence[Work]) -> list[float]:
        return TorchReference().laps(works)

    def memory_pool(self) -> MemoryPool:
        return HostMemoryPool()

    def streams(self) -> DeviceStreams:
        return PlayedStreams()

    def graphs(self) -> GraphBackend:
        assert self._make_graphs is not None
        return self._make_graphs(HOST)


class PseudoGpu(TorchOperators, CudaBackend):
    """A GPU rank's backend, on the host."""

    _triton_problem: str | None = "the host's tensors are for torch's operators"

    def __init__(
        self, index: int = 0, *, memory_bytes: int = MEMORY_BYTES, make_graphs: MakeGraphs | None = None
    ) -> None:
        CudaBackend.__init__(self, index, pool="test", driver=PlayedDriver(index, memory_bytes, make_graphs))

    def attention(self, config: ModelConfig, *, batch_invariant: bool) -> AttentionBackend:
        """Torch's, which expands spans of latent attention as GPUs do, and short ones, too."""
        expansion = None if config.latent is None else LatentExpansion(config.latent, least_rows=2)
        return TorchPagedAttention(self.device, batch_invariant=batch_invariant, expansion=expansion)

    def bandwidth(self) -> float:
        return TorchReference(memory_bytes=self.memory_bytes).bandwidth()

    def measure(self) -> Measurement:
        """Return the host's, measured on matrices of its size."""
        return TorchReference(memory_bytes=self.memory_bytes).measure()

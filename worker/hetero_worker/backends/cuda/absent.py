"""A GPU that is not there: its rank serves any model, and computes nothing.

Its tensors are torch's meta tensors, which have a shape and no memory; each token is token 0. Everything else is the
CUDA backend's own code, Triton's launches included (`launches.collected`). So a model's kernels are compiled before
there is a GPU, and tests see what a step gives to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, Self

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import Work
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.backends.cuda.driver import CudaDriver
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.memory.memory_pool import HostMemoryPool, MemoryPool
from hetero_worker.memory.streams import PAST, Copies, DeviceStreams, Moment, Way
from hetero_worker.runners.base import LoadRequest, StepOutput
from hetero_worker.runners.graphs.breaks import GraphBackend
from hetero_worker.runners.plan_runner import PlanRunner

SHAPES: Final = torch.device("meta")
"""Device of tensors without memory."""
_MEMORY_BYTES: Final = 1 << 50
_MULTIPROCESSORS: Final = 132


class AbsentStreams:
    """DeviceStreams of shapes; what comes off the device is zeros."""

    def now(self) -> Moment:
        """Return the past."""
        return PAST

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros, which no copy changes."""
        return torch.zeros(shape, dtype=dtype)

    def copy(self, way: Way, copies: Copies, *, after: Moment) -> Moment:  # noqa: ARG002
        """Copy nothing."""
        return PAST

    def compute_after(self, moment: Moment) -> None:
        """Do nothing: nothing is under way."""

    def settle(self) -> None:
        """Do nothing: nothing is under way."""

    def pin(self, address: int, num_bytes: int) -> str:  # noqa: ARG002
        """Return "": there is nothing against it."""
        return ""

    def unpin(self, address: int) -> None:
        """Do nothing, like `pin`."""


class _Pool(HostMemoryPool):
    """Memory pool without memory."""

    def available_bytes(self) -> int | None:
        return None

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=SHAPES)

    def begin_peak(self) -> bool:
        return False


class AbsentDriver(CudaDriver):
    """Calls of a driver that is not there."""

    pins_memory = False
    device = SHAPES
    name = "a GPU that is not there"
    memory_bytes = _MEMORY_BYTES
    has_bfloat16 = True
    num_multiprocessors = _MULTIPROCESSORS

    def __init__(self, graphs: GraphBackend | None = None, streams: DeviceStreams | None = None) -> None:
        """`graphs` records graphs of steps; None: none are recorded."""
        super().__init__(0)
        self._graphs = graphs
        self._streams = streams or AbsentStreams()
        self.records_graphs = graphs is not None

    def problem(self) -> str | None:
        """Return None: it is not there on purpose."""
        return None

    def take(self) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing: nothing is under way."""

    def free_bytes(self) -> int:
        """Return all of its memory."""
        return _MEMORY_BYTES

    def laps(self, works: Sequence[Work]) -> list[float]:
        """Raise RuntimeError: it has no clock."""
        raise RuntimeError(f"{self.name} cannot time {len(works)} works")

    def memory_pool(self) -> MemoryPool:
        """Return a pool of shapes."""
        return _Pool()

    def streams(self) -> DeviceStreams:
        """Return the streams of shapes."""
        return self._streams

    def graphs(self) -> GraphBackend:
        """Return the recorder that was given."""
        assert self._graphs is not None, "it records no graphs"
        return self._graphs


class AbsentGpu(CudaBackend):
    """The CUDA backend on a GPU that is not there."""

    def __init__(self, driver: AbsentDriver | None = None) -> None:
        super().__init__(0, pool="absent", driver=driver or AbsentDriver())

    @cached_property
    def _triton_problem(self) -> str | None:
        return None


class ShapesOnly(Checkpoint):
    """Weights of any model, without content: has every tensor that it is asked for, as floats."""

    def __enter__(self) -> Self:
        return self

    def has(self, tensor: str) -> bool:  # noqa: ARG002
        """Return False: nothing is there that need not be."""
        return False

    def left_out(self) -> tuple[str, ...]:
        """Return nothing, since no file has any other part."""
        return ()

    def read(self, part: TensorSlice, into: torch.Tensor) -> None:
        """Leave `into` as it is."""

    def release_pages(self) -> None:
        """Do nothing: no file is read."""


@dataclass
class AbsentRank:
    """A rank with a whole model on a GPU that is not there. It takes plans without ids."""

    config: ModelConfig
    dtype: str = "bfloat16"
    batch_invariant: bool = False
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    max_model_len: int = 2048
    block_size: int = 16
    backend: AbsentGpu = field(default_factory=AbsentGpu)
    runner: PlanRunner = field(init=False)
    _steps: int = 0

    def __post_init__(self) -> None:
        """Load the shapes, and allocate a cache with room for all sequences."""
        self.runner = PlanRunner(self.backend)
        self.runner.attach(LocalExchange())
        self.runner.load(
            LoadRequest(
                directory=Path("shapes"),
                config=self.config,
                dtype=self.dtype,
                shard_plan=ShardPlan.whole(self.config),
                rank=0,
                max_model_len=min(self.max_model_len, self.config.max_position),
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                memory_bytes=_MEMORY_BYTES,
                cache_size_is_given=True,
                batch_invariant=self.batch_invariant,
                open_weights=ShapesOnly,
                num_gpu_ranks=1,
            )
        )
        self.runner.allocate(1 + self.max_num_seqs * -(-self.max_model_len // self.block_size), self.block_size)

    def execute(self, plan: ranks_pb2.StepPlan) -> StepOutput:
        """Compute a step. Masks allow every token."""
        self._steps += 1
        plan.step_id = self._steps
        mask = bytes([255]) * -(-self.config.vocab_size // 8)
        return self.runner.execute(plan, lambda: [mask] * len(plan.masked_slots))

    def prompts(self, lengths: Sequence[int], draws: Sequence[ranks_pb2.Sampling]) -> ranks_pb2.StepPlan:
        """Return a plan that begins a sequence in each of the first slots, with room for as much again."""
        plan, blocks = ranks_pb2.StepPlan(), -(-self.max_model_len // self.block_size)
        for slot, (length, sampling) in enumerate(zip(lengths, draws, strict=True)):
            new = plan.new_sequences.add(slot=slot, token_ids=[0] * length, num_prompt_tokens=length)
            new.sampling.CopyFrom(sampling)
            plan.spans.add(slot=slot, num_tokens=length, sample=True)
            own = range(-(-2 * length // self.block_size))
            plan.block_slots.extend([slot] * len(own))
            plan.block_ids.extend(1 + slot * blocks + block for block in own)
        return plan

"""What the program and its rank processes say to each other; plain values, no torch on either side of the border.

An order goes to all ranks, in rank order, and each answers it, but for a StepPlan's bytes: those only rank 0 answers,
with a StepResult's. A rank that cannot go on says why, whatever was asked, and ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan


class Device(Enum):
    """What a rank computes on."""

    CUDA = "cuda"
    """cuda:0."""
    PSEUDO = "pseudo GPU"
    """Host tensors, by a GPU rank's code."""
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place in its group, and on the machine."""

    rank: int
    world_size: int
    num_gpu_ranks: int
    device: Device
    cores: tuple[int, ...]
    memory_bytes: int
    """Of a CPU rank or a pseudo GPU; 0: the machine's."""


@dataclass(frozen=True, slots=True)
class Options:
    """What ablations turn off, and on."""

    graphs: bool = True
    fused: bool = True
    own_attention: bool = True
    """GPU ranks' by our kernels; else by torch's operators."""
    async_steps: bool = True
    """A GPU rank alone begins a step before it has finished the one before."""
    batch_invariant: bool = False
    """A sequence's numbers do not depend on what else is computed with it."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of steps."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Form:
    """Make the group. Answer: None."""

    store_address: str
    segment_name: str


@dataclass(frozen=True, slots=True)
class MeasureDevice:
    """Answer: bytes of a DeviceSpeeds."""


@dataclass(frozen=True, slots=True)
class MeasureParts:
    """Exchange and parts of a model, all ranks at once. Answer: bytes of a Formed."""

    config: ModelConfig
    dtype: str


@dataclass(frozen=True, slots=True)
class Load:
    """Begin an epoch with this model; weights that are there already are kept. Answer: Loaded."""

    config: ModelConfig
    dtype: str
    plan: ShardPlan
    bounds: Bounds
    memory_bytes: tuple[int, ...]
    """By rank; 0: all that its device has."""
    options: Options = Options()
    expert_buffer_bytes: int = 0
    """Of the GPU rank's buffers for experts of the others, which share them with it; 0: nothing is streamed."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Report of a shard in memory, as ranks.proto's Loaded, or the refusal of it."""

    weight_bytes: int
    kv_budget_bytes: int
    kv_bytes_per_token: int
    kernels: tuple[str, ...]
    graph_sizes: tuple[int, ...] = ()
    refusal: str = ""
    """Why the rank has too little memory; empty: the shard is there."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """Make the KV cache, null block included, and share experts. Answer: why they cannot be shared, or ""."""

    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class End:
    """Leave the group and end. Answer: None."""


Order = Form | MeasureDevice | MeasureParts | Load | Allocate | End


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank is there; the address of its rendezvous store, and its device's name and memory."""

    store_address: str
    device_name: str
    memory_bytes: int
    torch_version: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank cannot go on."""

    reason: str

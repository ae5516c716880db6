"""What the solver is asked and what it answers: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero_api.placement_mode import PlacementMode
from hetero_api.sharding import ShardPlan
from hetero_placement.shares import GivenShares, Shares


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What the resource fixes; the rest is solved."""

    mode: PlacementMode = PlacementMode.AUTO
    shares: Shares = field(default_factory=GivenShares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of the engine: what memory must be there for, and how prompts are cut."""

    max_model_len: int
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    block_size: int = 16
    kv_cache_bytes: int | None = None
    """spec.engine.kvCacheMemoryBytes, a rank's; None: room for one longest sequence is enough."""
    enforce_eager: bool = False
    """spec.engine.enforceEager: GPU ranks make no graphs, and need no memory for them."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one plan makes of the workload."""

    decode_tokens_per_s: float
    """Over all streams."""
    prefill_tokens_per_s: float
    workload_s: float
    """All prompts, then all outputs."""
    decode_step_s: float


@dataclass(frozen=True, slots=True)
class Option:
    """One way to spread the model."""

    name: str
    mode: PlacementMode | None
    """The mode that it belongs to; None: told for comparison, cannot be chosen."""
    plan: ShardPlan | None = None
    prediction: Prediction | None = None
    why_not: str = ""
    """Why it cannot be had, or may not be chosen; empty if it may."""
    weight_shares: tuple[float, ...] = ()
    """Each rank's part of the weights' bytes; () where there is no plan."""

    @property
    def eligible(self) -> bool:
        """Whether it may be chosen."""
        return self.plan is not None and not self.why_not


@dataclass(frozen=True, slots=True)
class Decision:
    """The plan to use, out of what, and why."""

    plan: ShardPlan
    options: tuple[Option, ...]
    chosen: Option
    reason: str

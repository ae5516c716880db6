"""Parts of a model's shape that some models have and others do not: rotations, windows, norms, experts.

ModelConfig is made of them; what reads a config.json (hf_config) makes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""Activation of an MLP's gate; "gelu_tanh" is GELU in its approximation by tanh.

"clamped_swiglu" is GPT-OSS's: (up + 1) · gate · sigmoid(SWIGLU_ALPHA · gate), with gate at most SWIGLU_LIMIT and up
between its negative and itself.
"""
SWIGLU_ALPHA: Final = 1.702
SWIGLU_LIMIT: Final = 7.0
QkNorm = Literal["head", "all heads"]
"""Elements that a norm of queries or keys covers: those of each head, or of all heads of a token together."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    `kind` is "default", "linear", "llama3", "yarn" or "proportional". For "linear" and "proportional", frequencies are
    divided by `factor`; for the latter only the first pairs of a head rotate (`moving`). For
    "llama3" (Llama 3.1's `rope_scaling`), low frequencies are divided by `factor`, high ones kept, with a
    smooth step between `low_freq_factor` and `high_freq_factor` of `original_max_position`. For "yarn"
    (arXiv:2309.00071), the step is between pairs that turn `beta_slow` and `beta_fast` times in that many positions.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether "yarn" rounds the ends of its step to whole pairs."""
    amplitude: float = 1.0
    """Factor of what is rotated."""
    share: float = 1.0
    """Part of a head that is rotated; 0: nothing is."""
    divisors: tuple[float, ...] = ()
    """Numbers by which the frequencies of "default" are divided, as GGUF has them in place of "llama3"; (): 1."""
    moving: float = 1.0
    """Part of the rotated pairs whose frequency is not 0, from the fastest on."""

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many elements of a head are rotated."""
        return int(head_dim * self.share)

    def inverse_frequencies(self, head_dim: int) -> tuple[float, ...]:
        """Return the angular frequencies of the pairs that are rotated, radians a position."""
        dim = self.rotary_dim(head_dim)
        base = [self.theta ** -(i / dim) for i in range(0, dim, 2)][: int(self.moving * dim // 2)]
        if self.divisors:
            return tuple(f / divisor for f, divisor in zip(base, self.divisors, strict=True))
        if self.kind in ("linear", "proportional"):
            return tuple(f / self.factor for f in base)
        if self.kind == "llama3":
            return tuple(self._llama3(f) for f in base)
        if self.kind == "yarn":
            return self._yarn(base, dim)
        return tuple(base)

    def _yarn(self, base: Sequence[float], dim: int) -> tuple[float, ...]:
        def pair_that_turns(times: float) -> float:
            wavelengths = self.original_max_position / (times * 2 * math.pi)
            return dim * math.log(wavelengths) / (2 * math.log(self.theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low or 0.001
        slow = [min(max((pair - low) / width, 0.0), 1.0) for pair in range(len(base))]
        return tuple(f / self.factor * part + f * (1 - part) for f, part in zip(base, slow, strict=True))

    def _llama3(self, frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength > self.original_max_position / self.low_freq_factor:
            return frequency / self.factor
        if wavelength < self.original_max_position / self.high_freq_factor:
            return frequency
        smooth = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return (1 - smooth) * frequency / self.factor + smooth * frequency


NO_ROTATION: Final = RopeConfig(1.0, share=0.0)


class RowOrder(NamedTuple):
    """Order in which the rows of a head are kept, so that a rotation of its halves is the one that the model means.

    Elements i and i + head_dim / 2 are rotated together everywhere in the worker. A checkpoint may have pairs side by
    side, or rotate the first elements only. Queries and keys are kept in one order, so their products stay the same.
    """

    head_dim: int
    rotary_dim: int
    interleaved: bool
    before: int = 0
    """Elements at a head's begin that stay where they are."""

    @property
    def is_identity(self) -> bool:
        """True if heads are kept as they are stored."""
        return self.rotary_dim == self.head_dim - self.before and not self.interleaved

    @property
    def rows(self) -> tuple[int, ...]:
        """The stored element at each place of a head."""
        half, pairs = (self.head_dim - self.before) // 2, self.rotary_dim // 2
        step, second = (2, 1) if self.interleaved else (1, pairs)
        rest = range(2 * pairs, 2 * half)
        firsts = [*range(0, step * pairs, step), *rest[: half - pairs]]
        seconds = [*range(second, second + step * pairs, step), *rest[half - pairs :]]
        return (*range(self.before), *(self.before + row for row in (*firsts, *seconds)))


class KvShape(NamedTuple):
    """KV heads of a layer."""

    heads: int
    """KV heads in each unit of `ModelConfig.num_kv_heads`."""
    head_dim: int


@dataclass(frozen=True, slots=True)
class SlidingAttention:
    """Layers in which a token attends to the `window` tokens up to and including itself."""

    window: int
    layers: tuple[int, ...]
    """Ascending."""
    rope: RopeConfig
    """Rotation of these layers."""
    kv: KvShape | None = None
    """Their KV heads; None: as those of the other layers."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): all heads' keys and values come of one vector.

    A token's cached key is that vector, `rank` elements, and `rope_dim` rotated ones; a value is its first `rank`
    elements. Queries are brought to the same space, and results back from it, by a matrix of each head.
    """

    rank: int
    query_rank: int | None
    """Elements that queries are made of; None: queries are made of hidden states."""
    nope_dim: int
    """Elements of a query head that are not rotated."""
    rope_dim: int
    value_dim: int

    @property
    def query_dim(self) -> int:
        """Elements of a query head."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Elements of a token in the cache."""
        return self.rank + self.rope_dim

    @property
    def by_head_elements(self) -> int:
        """Elements of a head's matrices to the cache's space and back: a row takes as many products with them as a
        cached token does that is expanded.
        """
        return self.rank * (self.nope_dim + self.value_dim)

    @property
    def expanded_elements(self) -> int:
        """Elements that a head's key and value of a token take while they are made: a part of the key, the key, the
        value, and the value at least as wide as the key.
        """
        return self.nope_dim + self.query_dim + self.value_dim + max(self.query_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Layers with the gated delta rule (arXiv:2412.06464) in place of attention: a state for each sequence, no keys and
    values for each token.

    Each key head has the queries and keys of `group` value heads. A causal convolution over `taps` tokens comes before
    the rule.
    """

    layers: tuple[int, ...]
    """Ascending."""
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_head: bool = False
    """Whether projections are stored as one tensor of key heads, each with its queries, keys, values and gates."""

    @property
    def group(self) -> int:
        """Value heads a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Elements of a key head that the convolution mixes: its queries, keys and values."""
        return 2 * self.key_dim + self.group * self.value_dim

    @property
    def state_elements(self) -> int:
        """Elements of a key head's state."""
        return self.group * self.key_dim * self.value_dim

    @property
    def window_elements(self) -> int:
        """Elements of a key head's inputs to the convolution that the next token needs."""
        return self.channels * (self.taps - 1)

    def heads_of(self, begin: int, end: int, *, of: int) -> tuple[int, int]:
        """Return the range of key heads that is dealt with the KV heads [begin, end) of `of`."""
        return begin * self.key_heads // of, end * self.key_heads // of

    def most_heads(self, kv_heads: int, *, of: int) -> int:
        """Return the most key heads that are dealt with so many KV heads of `of`."""
        return kv_heads * -(-self.key_heads // of)

    def params_per_head(self, hidden_size: int) -> int:
        """Return the weights of one key head, in one layer."""
        projections = 2 * self.key_dim + 3 * self.group * self.value_dim + 2 * self.group
        return hidden_size * projections + self.channels * self.taps + 2 * self.group


@dataclass(frozen=True, slots=True)
class NormNames:
    """Names of a layer's norms in a checkpoint, below `model.layers.<layer>.`."""

    attention: str = "input_layernorm"
    mlp: str = "post_attention_layernorm"
    sums: tuple[str, ...] = ()
    """Norms of what attention and MLP add to the residual stream, if the model has them."""


USUAL_NORMS: Final = NormNames()


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of experts in a checkpoint, below `model.layers.<layer>.`.

    The router is `<block>.<router>`, and an expert's parts are `<block>.experts.<number>.<gate, up or down>`. Stacked
    experts are two tensors of a layer, `<block>.experts.<gate>` and `<down>`, [experts, in, out], with biases beside
    them. Outputs of `gate` alternate with those of the up projection. If they are `rows_first`, the tensors are
    [experts, out, in], and the up projection comes behind the gate.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    """Bias of the choice, below the block, if the model has one."""
    shared: str = "shared_experts"
    """Experts of all tokens, below the block, if the model has them."""
    shared_gate: str | None = None
    """Row whose product's sigmoid is the factor of the experts of all tokens, below the block; None: there is none."""
    stacked: bool = False
    rows_first: bool = False

    def block_of(self, layer: int) -> str:
        """Return the whole name of a layer's block; "" as `block` means the layer itself."""
        return f"model.layers.{layer}.{self.block}".rstrip(".")


USUAL_EXPERT_NAMES: Final = ExpertNames()


class ExpertNorms(NamedTuple):
    """Names of norms in a layer whose experts and expert of all tokens have their own."""

    experts: str
    """Of the experts' input; that of the other's is the layer's."""
    shared_sum: str
    """Of the sum over ranks of the expert of all tokens."""
    experts_sum: str


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses experts for a token, and how it weighs them."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    """Whether the chosen ones' weights are scaled to add up to 1."""
    scale: float = 1.0
    """Factor of the weights."""
    biased: bool = False
    """Whether the router's product has a bias."""
    scaled: bool = False
    """Whether the router has a norm of its own, whose weight is `<block>.router.scale` / √hidden_size, and a factor of
    each expert's weight, `<block>.router.per_expert_scale`."""
    corrected: bool = False
    """Whether a bias is added to the scores for the choice, and not for the weights."""
    groups: int = 1
    """Experts are in so many groups, by their numbers."""
    kept_groups: int = 1
    """A token's experts are of this many groups: those whose two best scores have the largest sum."""


USUAL_ROUTING: Final = Routing()


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Layers whose MLP is a number of small ones, of which a router chooses some for each token."""

    number: int
    """Experts a layer."""
    per_token: int
    intermediate_size: int
    """Columns of one expert."""
    layers: tuple[int, ...]
    """Ascending; the other layers are dense."""
    names: ExpertNames = USUAL_EXPERT_NAMES
    routing: Routing = USUAL_ROUTING
    shared_columns: int = 0
    """Columns of one more expert, whose output is added for all tokens; 0: there is none."""
    biased: bool = False
    """Whether an expert's projections have biases."""
    norms: ExpertNorms | None = None
    """Norms of experts apart from those of the expert of all tokens; None: they share the layer's."""

    @property
    def has_shared_gate(self) -> bool:
        """Whether the expert of all tokens has a factor of its own for each token."""
        return bool(self.shared_columns) and self.names.shared_gate is not None

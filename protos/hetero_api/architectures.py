"""The architectures that can be served, what their names alone say about a model, and parts that only some models have.

Everything else stands in config.json. What is named here becomes a switch of ModelConfig, so no other module asks
for an architecture's name. ModelConfig is made of the parts: rotations, windows, experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

Activation = Literal["silu", "gelu_tanh"]
"""Activation of an MLP's gate; "gelu_tanh" is GELU in its approximation by tanh."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    `kind` is "default", "linear" or "llama3". For "linear", frequencies are divided by `factor`. For
    "llama3" (Llama 3.1's `rope_scaling`), low frequencies are divided by `factor`, high ones kept, with a
    smooth step between `low_freq_factor` and `high_freq_factor` of `original_max_position`.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0

    def inverse_frequencies(self, head_dim: int) -> tuple[float, ...]:
        """Return the head_dim/2 angular frequencies, radians a position."""
        base = [self.theta ** -(i / head_dim) for i in range(0, head_dim, 2)]
        if self.kind == "linear":
            return tuple(f / self.factor for f in base)
        if self.kind == "llama3":
            return tuple(self._llama3(f) for f in base)
        return tuple(base)

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


@dataclass(frozen=True, slots=True)
class SlidingAttention:
    """Layers in which a token attends to the `window` tokens up to and including itself."""

    window: int
    layers: tuple[int, ...]
    """Ascending."""
    rope: RopeConfig
    """Rotation of these layers."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of experts in a checkpoint, below `model.layers.<layer>.`.

    The router is `<block>.gate`, and an expert's parts are `<block>.experts.<number>.<gate, up or down>`.
    """

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Layers whose MLP is a number of small ones, of which a router chooses some for each token."""

    number: int
    """Experts a layer."""
    per_token: int
    intermediate_size: int
    """Columns of one expert."""
    normalised: bool
    """Whether the chosen ones' weights are scaled to add up to 1."""
    layers: tuple[int, ...]
    """Ascending; the other layers are dense."""
    names: ExpertNames


class SlidingLayers(Enum):
    """Which layers a sliding window is for, where config.json gives no layer_types."""

    NONE = "none"
    ALL = "all"
    UPPER = "from max_window_layers on"
    ALL_BUT_EVERY_NTH = "all but every sliding_window_pattern-th"


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. Names of fields are those of config.json, whose defaults these are."""

    biased_qkv: bool = False
    """q, k and v have biases whatever attention_bias says, and the output projection has none."""
    qk_norm: bool = False
    hidden_act: str = "silu"
    norm_offset: float = 0.0
    post_norms: bool = False
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of hidden_size."""
    tie_word_embeddings: bool = False
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    rope_theta: float = 10_000.0
    rope_local_base_freq: float | None = None
    """None: layers with a sliding window rotate as the others do."""
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding: SlidingLayers = SlidingLayers.NONE
    use_sliding_window: bool = True
    sliding_window_pattern: int = 1
    experts: ExpertNames | None = None
    moe_intermediate_size: str = "intermediate_size"
    """The field that says how wide an expert is."""
    norm_topk_prob: bool = True


_QWEN2: Final = Architecture(biased_qkv=True, sliding=SlidingLayers.UPPER, use_sliding_window=False)
_QWEN3: Final = Architecture(qk_norm=True, sliding=SlidingLayers.UPPER, use_sliding_window=False)

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(sliding=SlidingLayers.ALL),
    "MixtralForCausalLM": Architecture(
        rope_theta=1_000_000.0,
        sliding=SlidingLayers.ALL,
        experts=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": Architecture(
        qk_norm=True,
        sliding=SlidingLayers.ALL,
        use_sliding_window=False,
        experts=ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        moe_intermediate_size="moe_intermediate_size",
        norm_topk_prob=False,
    ),
    "Gemma2ForCausalLM": Architecture(
        hidden_act="gelu_pytorch_tanh",
        norm_offset=1.0,
        post_norms=True,
        scaled_embedding=True,
        tie_word_embeddings=True,
        head_dim=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding=SlidingLayers.ALL_BUT_EVERY_NTH,
        sliding_window_pattern=2,
    ),
    "Gemma3ForCausalLM": Architecture(
        qk_norm=True,
        hidden_act="gelu_pytorch_tanh",
        norm_offset=1.0,
        post_norms=True,
        scaled_embedding=True,
        tie_word_embeddings=True,
        head_dim=256,
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        sliding=SlidingLayers.ALL_BUT_EVERY_NTH,
        sliding_window_pattern=6,
    ),
}
SUPPORTED_ARCHITECTURES: Final = tuple(ARCHITECTURES)

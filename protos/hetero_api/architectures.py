"""The architectures that can be served, and what their names alone say about a model.

Everything else stands in config.json. What is named here becomes a switch of ModelConfig, so no other module asks
for an architecture's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hetero_api.model_parts import ExpertNames


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

"""The architectures that can be served, and what their names alone say about a model.

Everything else stands in config.json. What is named here becomes a switch of ModelConfig, so no other module asks
for an architecture's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from hetero_api.model_parts import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    USUAL_EXPERT_NAMES,
    USUAL_NORMS,
    USUAL_ROUTING,
    Activation,
    ExpertNames,
    ExpertNorms,
    NormNames,
    QkNorm,
    Routing,
)


class SlidingLayers(Enum):
    """Which layers a sliding window is for, where config.json gives no layer_types."""

    NONE = "none"
    ALL = "all"
    UPPER = "from max_window_layers on"
    ALL_BUT_EVERY_NTH = "all but every sliding_window_pattern-th"
    ALL_BUT_EVERY_NTH_AND_LAST = "all but every sliding_window_pattern-th and the last"
    UNROTATED = "those that are not rotated"


@dataclass(frozen=True, slots=True)
class ExpertTraits:
    """Experts of one architecture. Names of fields are those of config.json."""

    names: ExpertNames = USUAL_EXPERT_NAMES
    routing: Routing = USUAL_ROUTING
    """Values for fields of config.json that are missing: norm_topk_prob, routed_scaling_factor, n_group, topk_group."""
    intermediate_size: str = "moe_intermediate_size"
    """The field that says how wide an expert is."""
    has_shared: bool = False
    """n_shared_experts more experts serve all tokens; together they are one wide one."""
    shared_intermediate_size: str | None = None
    """The field that says how wide the expert of all tokens is, where n_shared_experts does not; 0: there is none."""
    first_k_dense_replace: int = 0
    biased: bool = False
    enabled: str | None = None
    """The field that says whether there are experts; None: there are."""
    dense_beside: bool = False
    """The dense MLP of a layer with experts serves all tokens beside them."""
    norms: ExpertNorms | None = None


@dataclass(frozen=True, slots=True)
class DeltaTraits:
    """Layers with the gated delta rule of one architecture. Names of fields are those of config.json."""

    full_attention_interval: int = 4
    """Every so many layers one has attention, where config.json gives no layer_types."""
    by_head: bool = False
    """As in DeltaShape."""


@dataclass(frozen=True, slots=True)
class HeadTraits:
    """Multi-token-prediction heads of one architecture. Names of fields are those of config.json."""

    number: str = "num_nextn_predict_layers"
    """Field that says how many there are."""
    default: int = 0
    prefixes: Mapping[str, str] = field(
        default_factory=lambda: {
            "model.norm.": "model.layers.{layer}.shared_head.norm.",
            "model.layers.0.": "model.layers.{layer}.",
        }
    )
    """Beginnings of names in a model of one layer, and what files have for them; the first that fits counts. `layer` is
    the number of layers before the head."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. Names of fields are those of config.json, whose defaults these are."""

    biased_qkv: bool | None = None
    """Whether q, k and v have biases; None: attention_bias says."""
    attention_bias: bool = False
    biased_output: bool = True
    """Whether attention_bias is for the output projection, too."""
    qk_norm: QkNorm | None = None
    use_qk_norm: bool = True
    """Whether there are norms of queries and keys where `qk_norm` names them."""
    hidden_act: str = "silu"
    activation: Activation | None = None
    """The gate's activation whatever hidden_act says; None: hidden_act says."""
    norm_offset: float = 0.0
    norms: NormNames = USUAL_NORMS
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of hidden_size."""
    tie_word_embeddings: bool = False
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    global_head_dim: int | None = None
    """head_dim of layers without a window, where they have one of their own, and a number of KV heads; None: they have
    none."""
    value_norm: bool = False
    """Values are normed, without a weight."""
    layer_scalars: bool = False
    """The residual stream behind each layer is multiplied by a stored number."""
    rope_theta: float = 10_000.0
    rope_local_base_freq: float | None = None
    """None: layers with a sliding window rotate as the others do."""
    partial_rotary_factor: float = 1.0
    interleaved_rope: bool = False
    """Pairs that rotate lie side by side in a head."""
    no_rope_layer_interval: int | None = None
    """Every so many layers one is not rotated."""
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    is_latent: bool = False
    """Attention is multi-head latent attention."""
    has_sinks: bool = False
    """A learned score of each head takes part in the softmax of attention."""
    is_gated: bool = False
    """Attention's results are multiplied by the sigmoid of gates, which are stored beside each query head."""
    delta: DeltaTraits | None = None
    """Most layers have the gated delta rule in place of attention."""
    sliding: SlidingLayers = SlidingLayers.NONE
    use_sliding_window: bool = True
    sliding_window_pattern: int = 1
    fused_gate_up: bool = False
    """A dense layer's gate and up projections are one tensor, gate first."""
    experts: ExpertTraits | None = None
    heads: HeadTraits | None = None
    """Multi-token-prediction heads, which files may have."""
    expects: Mapping[str, object] = field(default_factory=dict)
    """Fields of config.json that are supported with this value only, if they are there."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values for fields of config.json that are missing and that no switch above is for."""


_QWEN2: Final = Architecture(
    biased_qkv=True, biased_output=False, sliding=SlidingLayers.UPPER, use_sliding_window=False
)
_QWEN3: Final = Architecture(qk_norm="head", sliding=SlidingLayers.UPPER, use_sliding_window=False)
_GEMMA_NORMS: Final = NormNames(
    mlp="pre_feedforward_layernorm", sums=("post_attention_layernorm", "post_feedforward_layernorm")
)
_MIXTRAL_NAMES: Final = ExpertNames(
    "block_sparse_moe", gate="w1", up="w3", down="w2", correction="e_score_correction_bias"
)
_SIGMOID: Final = Routing(score="sigmoid", corrected=True)
_HEADS: Final = HeadTraits()
_QWEN3_5_HEADS: Final = HeadTraits(
    number="mtp_num_hidden_layers",
    prefixes={
        "model.layers.0.enorm.": "mtp.pre_fc_norm_embedding.",
        "model.layers.0.hnorm.": "mtp.pre_fc_norm_hidden.",
        "model.layers.0.eh_proj.": "mtp.fc.",
        "model.layers.0.": "mtp.layers.0.",
        "model.norm.": "mtp.norm.",
    },
)
_QWEN3_5: Final = Architecture(
    qk_norm="head",
    norm_offset=1.0,
    head_dim=256,
    partial_rotary_factor=0.25,
    is_gated=True,
    delta=DeltaTraits(),
    heads=_QWEN3_5_HEADS,
)
_GATED_EXPERTS: Final = ExpertTraits(
    ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate"),
    shared_intermediate_size="shared_expert_intermediate_size",
)

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(sliding=SlidingLayers.ALL, defaults={"sliding_window": 4096}),
    "MixtralForCausalLM": Architecture(
        rope_theta=1_000_000.0,
        sliding=SlidingLayers.ALL,
        experts=ExpertTraits(_MIXTRAL_NAMES, intermediate_size="intermediate_size"),
        defaults={"rms_norm_eps": 1e-5},
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": Architecture(
        qk_norm="head",
        sliding=SlidingLayers.ALL,
        use_sliding_window=False,
        experts=ExpertTraits(routing=Routing(normalised=False)),
    ),
    "Gemma2ForCausalLM": Architecture(
        hidden_act="gelu_pytorch_tanh",
        norm_offset=1.0,
        norms=_GEMMA_NORMS,
        scaled_embedding=True,
        tie_word_embeddings=True,
        head_dim=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding=SlidingLayers.ALL_BUT_EVERY_NTH,
        sliding_window_pattern=2,
        defaults={"sliding_window": 4096},
    ),
    "Gemma3ForCausalLM": Architecture(
        qk_norm="head",
        hidden_act="gelu_pytorch_tanh",
        norm_offset=1.0,
        norms=_GEMMA_NORMS,
        scaled_embedding=True,
        tie_word_embeddings=True,
        head_dim=256,
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        sliding=SlidingLayers.ALL_BUT_EVERY_NTH,
        sliding_window_pattern=6,
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
        },
    ),
    "Gemma4ForCausalLM": Architecture(
        qk_norm="head",
        hidden_act="gelu_pytorch_tanh",
        norms=_GEMMA_NORMS,
        scaled_embedding=True,
        tie_word_embeddings=True,
        head_dim=256,
        global_head_dim=512,
        value_norm=True,
        layer_scalars=True,
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        sliding=SlidingLayers.ALL_BUT_EVERY_NTH_AND_LAST,
        sliding_window_pattern=6,
        experts=ExpertTraits(
            ExpertNames("", gate="gate_up_proj", router="router.proj", shared="mlp", stacked=True, rows_first=True),
            Routing(scaled=True),
            enabled="enable_moe_block",
            dense_beside=True,
            norms=ExpertNorms(
                "pre_feedforward_layernorm_2",
                shared_sum="post_feedforward_layernorm_1",
                experts_sum="post_feedforward_layernorm_2",
            ),
        ),
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262_144,
            "max_position_embeddings": 131_072,
            "sliding_window": 512,
            "query_pre_attn_scalar": 1,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_type": "default"},
            },
        },
    ),
    "SmolLM3ForCausalLM": Architecture(
        tie_word_embeddings=True,
        rope_theta=2_000_000.0,
        no_rope_layer_interval=4,
        sliding=SlidingLayers.UNROTATED,
        use_sliding_window=False,
    ),
    "Glm4ForCausalLM": Architecture(
        attention_bias=True,
        biased_output=False,
        norms=NormNames(sums=("post_self_attn_layernorm", "post_mlp_layernorm")),
        head_dim=128,
        partial_rotary_factor=0.5,
        interleaved_rope=True,
        fused_gate_up=True,
        defaults={"rms_norm_eps": 1.5625e-7},
    ),
    "Glm4MoeForCausalLM": Architecture(
        biased_output=False,
        qk_norm="head",
        use_qk_norm=False,
        partial_rotary_factor=0.5,
        experts=ExpertTraits(routing=_SIGMOID, has_shared=True, first_k_dense_replace=1),
        heads=_HEADS,
        expects={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "Glm4MoeLiteForCausalLM": Architecture(
        is_latent=True,
        interleaved_rope=True,
        experts=ExpertTraits(routing=replace(_SIGMOID, scale=1.8), has_shared=True, first_k_dense_replace=1),
        heads=_HEADS,
        expects={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        defaults={"rms_norm_eps": 1e-5},
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        qk_norm="all heads",
        head_dim=128,
        rope_theta=5_000_000.0,
        experts=ExpertTraits(_MIXTRAL_NAMES, _SIGMOID, intermediate_size="intermediate_size"),
        expects={
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "shared_intermediate_size": 0,
            "qk_norm_type": "per_layer",
        },
    ),
    "DeepseekV3ForCausalLM": Architecture(
        is_latent=True,
        interleaved_rope=True,
        experts=ExpertTraits(
            routing=replace(_SIGMOID, scale=2.5, groups=8, kept_groups=4), has_shared=True, first_k_dense_replace=3
        ),
        heads=_HEADS,
        expects={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    ),
    "Qwen3NextForCausalLM": replace(
        _QWEN3_5,
        delta=DeltaTraits(by_head=True),
        experts=_GATED_EXPERTS,
        heads=replace(_QWEN3_5_HEADS, number="num_nextn_predict_layers", default=1),
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": replace(_QWEN3_5, experts=_GATED_EXPERTS, expects={"norm_topk_prob": True}),
    "GptOssForCausalLM": Architecture(
        attention_bias=True,
        activation="clamped_swiglu",
        head_dim=64,
        rope_theta=150_000.0,
        has_sinks=True,
        sliding=SlidingLayers.ALL_BUT_EVERY_NTH,
        sliding_window_pattern=2,
        experts=ExpertTraits(
            ExpertNames(gate="gate_up_proj", router="router", stacked=True),
            Routing(biased=True),
            intermediate_size="intermediate_size",
            biased=True,
        ),
        expects={"swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT},
        defaults={
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}
SUPPORTED_ARCHITECTURES: Final = tuple(ARCHITECTURES)
_SPARSE_INDEXER: Final = "an indexer chooses the tokens that its attention reads, and there are no kernels for that"
REFUSED_ARCHITECTURES: Final[Mapping[str, str]] = {
    "DeepseekV32ForCausalLM": _SPARSE_INDEXER,
    "DeepseekV4ForCausalLM": _SPARSE_INDEXER,
    "GlmMoeDsaForCausalLM": _SPARSE_INDEXER,
    "Ministral3ForCausalLM": "it scales queries by their position, and there are no kernels for that",
}
"""Architectures that people ask for, and why they are not served."""

"""config.json of the supported architectures, and of those that are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig, model_fingerprint
from hetero_api.model_parts import DeltaShape, LatentShape, RowOrder
from hetero_api.rank_memory import ModelMemory, StepLimits
from hetero_placement.shard_plans import shard_of_layers

pytestmark = pytest.mark.unit

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def test_smollm2_has_its_published_size() -> None:
    config = ModelConfig.from_hf(BASE)
    assert config.num_parameters == 134_515_008
    assert (config.head_dim, config.group_size, config.eos_token_ids) == (64, 3, (2,))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, (True, False, False, None)),
        ({"architectures": ["Qwen3ForCausalLM"]}, (False, False, False, "head")),
        ({"attention_bias": True, "mlp_bias": True}, (True, True, True, None)),
        ({"architectures": ["MistralForCausalLM"]}, (False, False, False, None)),
    ],
)
def test_architectures_are_switches(change: dict[str, Any], expected: tuple[object, ...]) -> None:
    config = ModelConfig.from_hf(BASE | change)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == expected


def _windows(architecture: str, **fields: Any) -> tuple[int | None, ...]:
    small = BASE | {"num_hidden_layers": 4, "sliding_window": 64} | fields
    return ModelConfig.from_hf(small | {"architectures": [architecture]}).windows


@pytest.mark.parametrize(
    ("architecture", "fields", "layers"),
    [
        ("LlamaForCausalLM", {}, ()),
        ("MistralForCausalLM", {}, (0, 1, 2, 3)),
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        ("MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2}, (0, 1, 2, 3)),
        ("Qwen2ForCausalLM", {}, ()),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}, (3,)),
        ("Qwen3ForCausalLM", {"use_sliding_window": True}, ()),
        ("Gemma2ForCausalLM", {}, (0, 2)),
        ("Gemma3ForCausalLM", {}, (0, 1, 2, 3)),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 3}, (0, 1, 3)),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, (3,)),
    ],
)
def test_sliding_windows_are_told_by_layer(architecture: str, fields: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert _windows(architecture, **fields) == tuple(64 if i in layers else None for i in range(4))


def test_a_sliding_window_does_not_bound_the_length() -> None:
    mistral = BASE | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    assert ModelConfig.from_hf(mistral).max_position == 8192


def test_gemma_is_switches() -> None:
    gemma2 = ModelConfig.from_hf(BASE | {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 144})
    assert (gemma2.norm_offset, len(gemma2.norms.sums), gemma2.embedding_scale) == (1.0, 2, 24.0)
    assert (gemma2.activation, gemma2.attention_scale, gemma2.head_dim) == ("gelu_tanh", 1 / 12, 256)
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap, gemma2.tie_word_embeddings) == (50.0, 30.0, True)
    gemma3 = ModelConfig.from_hf(BASE | {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None})
    assert (gemma3.qk_norm, gemma3.attention_soft_cap, gemma3.logit_soft_cap) == ("head", None, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 7e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 7e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ],
    ids=["old", "new"],
)
def test_gemma3_has_rotations_for_each_kind_of_layer(fields: dict[str, Any]) -> None:
    gemma3 = BASE | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, "sliding_window": 64}
    config = ModelConfig.from_hf(gemma3 | fields)
    thetas = [(rope.theta, rope.factor) for rope in config.ropes]
    assert thetas == [(2e4, 1.0)] * 5 + [(7e5, 8.0)]


def test_experts_are_in_the_layers_that_have_them() -> None:
    qwen3 = BASE | {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 96, "decoder_sparse_step": 2, "mlp_only_layers": [3, 5],
    }  # fmt: skip
    config = ModelConfig.from_hf(qwen3)
    assert config.expert_layers == (1, *range(7, 30, 2))
    assert config.experts is not None
    assert (config.num_experts, config.experts.per_token, config.experts.routing.normalised) == (16, 4, False)
    assert config.params_per_expert == 3 * 576 * 96
    dense = ModelConfig.from_hf(qwen3 | {"mlp_only_layers": list(range(30))})
    assert (dense.experts, dense.num_experts, dense.expert_layers) == (None, 0, ())


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Mixtral-8x7B": (
        {
            "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
            "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False,
        },
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "tie_word_embeddings": False,
        },
        30_532_122_624,
    ),
    "gemma-2-2b": (
        {
            "architectures": ["Gemma2ForCausalLM"], "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256,
            "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256000,
        },
        2_614_341_888,
    ),
    "gemma-3-1b": (
        {
            "architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152, "intermediate_size": 6912, "head_dim": 256,
            "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144,
        },
        999_885_952,
    ),
    "gemma-4-31B": (
        {
            "architectures": ["Gemma4ForCausalLM"], "hidden_size": 5376, "intermediate_size": 21504,
            "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
            "num_global_key_value_heads": 4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
        },
        30_697_345_340,
    ),
    "gemma-4-26B-A4B": (
        {
            "architectures": ["Gemma4ForCausalLM"], "hidden_size": 2816, "intermediate_size": 2112,
            "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
            "num_global_key_value_heads": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
            "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
        },
        25_233_141_790,
    ),
    "gemma-4-E2B": (
        {
            "architectures": ["Gemma4ForCausalLM"], "hidden_size": 1536, "intermediate_size": 6144,
            "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        },
        4_628_569_379,
    ),
    "gemma-4-E4B": (
        {
            "architectures": ["Gemma4ForCausalLM"], "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 42, "num_key_value_heads": 2, "num_kv_shared_layers": 18,
        },
        7_463_013_418,
    ),
    "gpt-oss-20b": (
        {
            "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
            "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088,
            "num_local_experts": 32, "num_experts_per_tok": 4, "attention_bias": True, "swiglu_limit": 7.0,
        },
        20_914_757_184,
    ),
    "DeepSeek-V3": (
        {
            "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
            "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
        },
        671_026_419_200,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_their_published_size(name: str) -> None:
    fields, size = PUBLISHED[name]
    assert ModelConfig.from_hf({"max_position_embeddings": 8192} | fields).num_parameters == size


QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144,
}  # fmt: skip


def test_most_layers_of_qwen3_next_keep_states() -> None:
    config = ModelConfig.from_hf(QWEN3_NEXT)
    assert config.attention_layers == tuple(range(3, 48, 4))
    assert config.delta is not None
    assert config.delta_layers == config.delta.layers == tuple(i for i in range(48) if i % 4 != 3)
    assert (config.gated_attention, config.norm_offset, config.rope.share) == (True, 1.0, 0.25)
    assert [config.delta.heads_of(head, head + 1, of=config.num_kv_heads) for head in range(2)] == [(0, 8), (8, 16)]
    memory = ModelMemory(config, StepLimits(512, 1, 4096), element_bytes=2)
    matrices, windows = 36 * 32 * 128 * 128 * 4, 36 * 8192 * 3 * 4
    assert memory.state_bytes(shard_of_layers(config, 0, 48)) == matrices + windows


@pytest.mark.parametrize(("key_heads", "kv_heads"), [(16, 2), (5, 3), (7, 7), (9, 4)])
def test_heads_of_the_delta_rule_are_dealt_with_kv_heads(key_heads: int, kv_heads: int) -> None:
    delta = DeltaShape((0,), key_heads, key_heads, key_dim=4, value_dim=4, taps=4)
    ranges = [delta.heads_of(head, head + 1, of=kv_heads) for head in range(kv_heads)]
    assert [head for begin, end in ranges for head in range(begin, end)] == list(range(key_heads))
    assert all(0 < end - begin <= delta.most_heads(1, of=kv_heads) for begin, end in ranges)


@pytest.mark.parametrize(
    ("architecture", "kind", "fields"),
    [
        ("MistralForCausalLM", "mistral", ["sliding_window"]),
        ("MixtralForCausalLM", "mixtral", ["rms_norm_eps"]),
        ("Gemma2ForCausalLM", "gemma2", ["sliding_window"]),
        ("Glm4ForCausalLM", "glm4", ["rms_norm_eps"]),
        ("Glm4MoeLiteForCausalLM", "glm4_moe_lite", ["rms_norm_eps"]),
        ("GptOssForCausalLM", "gpt_oss", ["sliding_window", "rms_norm_eps", "rope_parameters"]),
    ],
)
def test_fields_that_are_missing_are_those_of_transformers(architecture: str, kind: str, fields: list[str]) -> None:
    from transformers import AutoConfig

    whole = AutoConfig.for_model(kind).to_dict() | {"architectures": [architecture]}
    expected = ModelConfig.from_hf(whole)
    for field in fields:
        assert ModelConfig.from_hf({name: whole[name] for name in whole if name != field}) == expected, field


YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"truncate": False}, {"mscale": 1.0, "mscale_all_dim": 0.7}])
def test_yarn_equals_transformers(changes: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = YARN | changes
    reference_config = LlamaConfig(hidden_size=576, num_attention_heads=9, rope_parameters=dict(scaling))
    reference, amplitude = ROPE_INIT_FUNCTIONS["yarn"](reference_config, "cpu")
    rope = ModelConfig.from_hf(BASE | {"rope_parameters": scaling}).rope
    assert rope.inverse_frequencies(64) == pytest.approx(reference.tolist(), rel=1e-6)
    assert rope.amplitude == pytest.approx(amplitude)
    old_fields = {name: value for name, value in scaling.items() if name not in ("rope_type", "rope_theta")}
    old = BASE | {"rope_theta": 150000.0, "rope_scaling": {"type": "yarn", **old_fields}}
    assert ModelConfig.from_hf(old).rope == rope


@pytest.mark.parametrize(
    ("changes", "amplitude"),
    [
        ({"attn_factor": 0.5}, 0.5 * (1 + 0.1 * math.log(32))),
        ({"attn_factor": 0.5, "attention_factor": 2.0}, 2),
        ({"attn_factor": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}, 0.5),
    ],
)
def test_yarns_amplitude_counts_attn_factor_unless_it_is_given_whole(changes: dict[str, Any], amplitude: float) -> None:
    """DeepSeek-R1-0528-Qwen3-8B has one."""
    rope = ModelConfig.from_hf(BASE | {"rope_parameters": YARN | changes}).rope
    assert rope.amplitude == pytest.approx(amplitude)


@pytest.mark.parametrize(
    ("kind", "factor", "most"), [("yarn", 4.0, 32_768), ("yarn", 0.5, 8192), ("linear", 4.0, 8192)]
)
def test_yarn_makes_more_positions(kind: str, factor: float, most: int) -> None:
    """As Qwen's model cards set it: beside a max_position_embeddings that stays as it was."""
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": 8192}
    assert ModelConfig.from_hf(BASE | {"rope_scaling": scaling}).max_position == most


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "before"), [(16, 16, 0), (16, 8, 0), (20, 6, 0), (28, 8, 20)])
def test_rows_of_a_head_are_ordered_so_that_halves_rotate(
    head_dim: int, rotary_dim: int, before: int, interleaved: bool
) -> None:
    order = RowOrder(head_dim, rotary_dim, interleaved, before)
    half, pairs = (head_dim - before) // 2, rotary_dim // 2
    rows = order.rows
    assert sorted(rows) == list(range(head_dim))
    assert rows[:before] == tuple(range(before))
    found = [(rows[before + i] - before, rows[before + half + i] - before) for i in range(pairs)]
    assert found == [(2 * i, 2 * i + 1) if interleaved else (i, i + pairs) for i in range(pairs)]
    assert order.is_identity == (rows == tuple(range(head_dim)))


def test_parts_that_some_configs_name_otherwise() -> None:
    """As they are published, before transformers 5."""
    small = BASE | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 4}
    minimax = small | {
        "architectures": ["MiniMaxM2ForCausalLM"], "rotary_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True,
    }  # fmt: skip
    config = ModelConfig.from_hf(minimax)
    assert (config.qk_norm, config.head_order) == ("all heads", RowOrder(64, 32, interleaved=False))
    glm = small | {"architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 0.25, "attention_bias": False}
    config = ModelConfig.from_hf(glm)
    assert (config.qkv_bias, config.head_order) == (False, RowOrder(64, 16, interleaved=True))
    smollm3 = small | {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2}
    assert ModelConfig.from_hf(smollm3).unrotated == (1, 3)
    kimi = small | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "kv_lora_rank": 32, "q_lora_rank": 48,
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20, "n_routed_experts": 6, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "num_nextn_predict_layers": 0,
    }  # fmt: skip
    config = ModelConfig.from_hf(kimi)
    assert (config.latent, config.head_dim) == (LatentShape(32, 48, 24, 16, 20), 48)
    assert (config.expert_layers, config.shared_columns, config.mlp_columns(0)) == ((1, 2, 3), 40, 1536)


def test_rope_frequencies_equal_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048,
    }  # fmt: skip
    reference_config = LlamaConfig(hidden_size=576, num_attention_heads=9, rope_parameters=scaling)
    reference, _ = ROPE_INIT_FUNCTIONS["llama3"](reference_config, "cpu")
    ours = ModelConfig.from_hf(BASE | {"rope_parameters": scaling}).rope.inverse_frequencies(64)
    assert ours == pytest.approx(reference.tolist(), rel=1e-6)


QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; supported: Llama"),
        ({"architectures": None}, r"architecture \(none\) is not supported"),
        ({"hidden_size": None}, "hidden_size must be a whole number of at least 1, not None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, not 0"),
        ({"num_key_value_heads": 2}, r"num_attention_heads \(9\) is no multiple of num_key_value_heads \(2\)"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config must be an object"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"model_type": "llama"}},
            "text_config.model_type 'llama' is not supported; supported: gemma3_text",
        ),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "ministral3"}},
            "Ministral3ForCausalLM is not supported: it scales queries by their position",
        ),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"quantization_config": {"a": 1}}},
            "text_config.quantization_config is set; it must stand beside text_config",
        ),
        (
            {
                "architectures": ["Glm4MoeLiteForCausalLM"],
                "mlp_layer_types": ["dense"],
                "kv_lora_rank": 8,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
            },
            "mlp_layer_types must list dense or sparse for each of the 30 layers",
        ),
        (
            {"architectures": ["Gemma4ForCausalLM"]},
            r"vocab_size_per_layer_input 262144 is not supported; supported: vocab_size \(49152\)",
        ),
        (
            {"architectures": ["Gemma4ForCausalLM"], "vocab_size": 262_144, "num_kv_shared_layers": 28},
            r"num_kv_shared_layers \(28\): the last 28 of 30 layers read .* and there is none",
        ),
        (
            {
                "architectures": ["Gemma4ForCausalLM"],
                "vocab_size": 262_144,
                "num_kv_shared_layers": 10,
                "use_double_wide_mlp": True,
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 8,
            },
            "use_double_wide_mlp is set; it is not supported in a model of experts",
        ),
        (
            {
                "architectures": ["Gemma4ForCausalLM"],
                "hidden_size_per_layer_input": 0,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 2,
            },
            r"num_attention_heads \(9\) is no multiple of num_key_value_heads \(2\)",
        ),
        (
            {"architectures": ["Gemma4ForCausalLM"], "hidden_size_per_layer_input": 0, "per_layer_config": [1]},
            "per_layer_config must map numbers of layers to fields",
        ),
        (
            {
                "architectures": ["Gemma4ForCausalLM"],
                "hidden_size_per_layer_input": 0,
                "per_layer_config": {"5": {"head_dim": 32}},
            },
            "per_layer_config must give all full_attention layers, and no others, the same",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping must be a number of more than 0 or null, not 0"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": -1},
            "sliding_window must be a whole number of at least 1, not -1",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": ["chunked_attention"] * 30},
            "layer_types chunked_attention are not supported; supported: full_attention, sliding_attention",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": ["full_attention"]},
            "layer_types must list a kind for each of the 30 layers",
        ),
        ({"architectures": ["MixtralForCausalLM"]}, "num_local_experts must be a whole number of at least 1"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 5},
            r"num_experts_per_tok \(5\) is more than the 4 experts of a layer",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2},
            "moe_intermediate_size must be a whole number",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": -4.0}},
            "rope field factor must be a number of more than 0",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, "rope field factor must be a number of more than 0"),
        ({"rope_theta": [1]}, "rope field rope_theta must be a number of more than 0"),
        ({"head_dim": 15}, "15 elements of a head are rotated, which must be an even number"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32ForCausalLM is not supported: an indexer chooses"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "DeepseekV4ForCausalLM is not supported: an indexer chooses"),
        ({"architectures": ["GlmMoeDsaForCausalLM"]}, "GlmMoeDsaForCausalLM is not supported: an indexer chooses"),
        ({"rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta is set"),
        (
            {"architectures": ["GptOssForCausalLM"], "swiglu_limit": 9.0},
            r"swiglu_limit 9\.0 is not supported; supported: 7\.0",
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "topk_method": "greedy"},
            "topk_method 'greedy' is not supported; supported: 'noaux_tc'",
        ),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "kv_lora_rank must be a whole number of at least 1, not None"),
        (
            {"architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 1.5},
            r"partial_rotary_factor must be more than 0 and at most 1, not 1\.5",
        ),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]},
            "no_rope_layers must list a 0 or a 1 for each of the 30 layers",
        ),
        (
            {
                "architectures": ["Glm4MoeForCausalLM"],
                "n_routed_experts": 10,
                "num_experts_per_tok": 2,
                "n_group": 4,
                "moe_intermediate_size": 8,
            },
            r"n_group \(4\) and topk_group \(1\) do not fit 10 experts",
        ),
        (
            QWEN3_5 | {"linear_num_value_heads": 24},
            r"linear_num_value_heads \(24\) is no multiple of linear_num_key_heads \(16\)",
        ),
        (
            QWEN3_5 | {"linear_num_key_heads": 2},
            r"linear_num_key_heads \(2\) is less than num_key_value_heads \(3\), with which they are dealt to ranks",
        ),
        (QWEN3_5 | {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be a whole number of at least 2, not 1"),
        (
            QWEN3_5 | {"layer_types": ["sliding_attention"] * 30},
            "layer_types sliding_attention are not supported; supported: full_attention, linear_attention",
        ),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quant_method 'bitsandbytes' is not supported: its weights are blocks across rows",
        ),
    ],
)
def test_what_cannot_be_served_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(BASE | change)


def test_the_text_part_of_a_model_of_several_media_is_served() -> None:
    """As Gemma 3 4B is published: what equals a default is left out, and some fields stand beside text_config."""
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, "eos_token_id": 1,
    }  # fmt: skip
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152}, "hidden_size": 7,
    }  # fmt: skip
    config = ModelConfig.from_hf(published)
    assert config.num_parameters == 3_880_263_168
    assert (config.architecture, config.eos_token_ids) == ("Gemma3ForCausalLM", (1, 106))
    assert (config.weights.floats, config.rope.factor, config.max_position) == ("bfloat16", 8.0, 131_072)


def test_end_tokens_come_from_both_files_and_the_fingerprint_from_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (0, 2)
    before = model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"rms_norm_eps": 1e-6}))
    assert model_fingerprint(tmp_path) != before


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file"), ("{", "cannot be read as JSON"), ("[]", "JSON object")]
)
def test_a_bad_config_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        ModelConfig.from_directory(tmp_path)

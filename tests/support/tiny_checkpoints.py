"""Tiny random checkpoints in Hugging Face format, saved by transformers, one an architecture switch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 200
"""No multiple of 64: the last shard of the vocabulary is an odd one."""

NUM_EXPERTS = 6
_QWEN3_MOE: dict[str, Any] = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
_GLM4_MOE: dict[str, Any] = {"n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
_GPT_OSS: dict[str, Any] = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 3}
_MINIMAX_M2: dict[str, Any] = {
    "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 3, "rope_parameters": {"rope_theta": 100.0}
}  # fmt: skip
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 16.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_DEEPSEEK_V3: dict[str, Any] = {
    "n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2, "num_attention_heads": 8, "kv_lora_rank": 24,
    "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "num_key_value_heads": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "sliding_window": 4,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}  # fmt: skip
_GEMMA4_INPUTS: dict[str, Any] = {
    **_GEMMA4, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB_SIZE,
}  # fmt: skip
# Heads' outputs may be tiny before their norm, which multiplies rounding: with the usual eps and weights of 0.3 float32
# is up to 2e-3 from float64 in transformers' own class.
_QWEN3_5: dict[str, Any] = {
    "rms_norm_eps": 0.01, "initializer_range": 0.15,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 6, "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 3, "rope_parameters": {
        "rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
_QWEN3_NEXT: dict[str, Any] = {**_QWEN3_MOE, **_QWEN3_5, "shared_expert_intermediate_size": 24}
_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.3,
}

VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 3, "sliding_window": 4}),
    "qwen3-moe": ("qwen3_moe", {**_QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": ("qwen3_moe", {**_QWEN3_MOE, "mlp_only_layers": [1]}),
    "qwen3-moe-every-second": ("qwen3_moe", {**_QWEN3_MOE, "decoder_sparse_step": 2}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3-window": ("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5}),
    "glm4": ("glm4", {}),
    "glm4-unbiased": (
        "glm4",
        {
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
        },
    ),
    "glm4-moe": ("glm4_moe", {**_GLM4_MOE, "use_qk_norm": True}),
    "glm4-moe-grouped": (
        "glm4_moe",
        {
            **_GLM4_MOE,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
            "attention_bias": True,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
        },
    ),
    "minimax-m2": ("minimax_m2", {**_MINIMAX_M2, "rotary_dim": 6}),
    "minimax-m2-whole": ("minimax_m2", _MINIMAX_M2),
    "deepseek-v3": ("deepseek_v3", _DEEPSEEK_V3),
    "deepseek-v3-dense": ("deepseek_v3", {**_DEEPSEEK_V3, "first_k_dense_replace": 4}),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        {
            **_DEEPSEEK_V3,
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8, "truncate": True},
        },
    ),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        {**_DEEPSEEK_V3, "mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 1},
    ),
    "glm4-moe-lite-direct": (
        "glm4_moe_lite",
        {**_DEEPSEEK_V3, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "qwen3-next": ("qwen3_next", _QWEN3_NEXT),
    "qwen3-next-odd": (
        "qwen3_next",
        {
            **_QWEN3_NEXT,
            "linear_num_key_heads": 11,
            "linear_num_value_heads": 11,
            "linear_key_head_dim": 5,
            "linear_value_head_dim": 7,
            "linear_conv_kernel_dim": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "qwen3-next-no-delta": ("qwen3_next", {**_QWEN3_NEXT, "layer_types": ["full_attention"] * 3}),
    "qwen3.5": ("qwen3_5_text", _QWEN3_5),
    "qwen3.5-odd": (
        "qwen3_5_text",
        {
            **_QWEN3_5,
            "linear_num_key_heads": 9,
            "linear_num_value_heads": 27,
            "linear_conv_kernel_dim": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-moe": ("qwen3_5_moe_text", _QWEN3_NEXT),
    "qwen3.5-moe-odd": (
        "qwen3_5_moe_text",
        {
            **_QWEN3_NEXT,
            "linear_num_key_heads": 11,
            "linear_num_value_heads": 33,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_experts_per_tok": 1,
            "shared_expert_intermediate_size": 7,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": ("gpt_oss", {**_GPT_OSS, "sliding_window": 5, "rope_parameters": _YARN}),
    "gpt-oss-full": ("gpt_oss", {**_GPT_OSS, "layer_types": ["full_attention"] * 3, "attention_bias": False}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4": ("gemma4_text", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 8}),
    "gemma4-values": (
        "gemma4_text",
        {**_GEMMA4, "num_key_value_heads": 8, "head_dim": 12, "global_head_dim": 8, "attention_bias": True},
    ),
    "gemma4-inputs": ("gemma4_text", {**_GEMMA4_INPUTS, "num_key_value_heads": 8}),
    "gemma4-readers": (
        "gemma4_text",
        {
            **_GEMMA4_INPUTS,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 8,
        },
    ),
    "gemma4-moe": (
        "gemma4_text",
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 8,
            "enable_moe_block": True,
            "num_experts": NUM_EXPERTS,
            "top_k_experts": 3,
            "moe_intermediate_size": 20,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 12,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}

_QWEN3_5_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 32, "patch_size": 8,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
WRAPPED: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "mistral3": (
        "mistral3",
        "mistral-window",
        {"vision_config": {**_VISION, "model_type": "pixtral"}, "tie_word_embeddings": False},
    ),
    "gemma3": (
        "gemma3",
        "gemma3",
        {"vision_config": {**_VISION, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4},
    ),
    "gemma4": (
        "gemma4",
        "gemma4-moe",
        {"vision_config": {**_VISION, "num_key_value_heads": 2, "head_dim": 8, "model_type": "gemma4_vision"}},
    ),
    "qwen3.5": ("qwen3_5", "qwen3.5", {"vision_config": _QWEN3_5_VISION}),
    "qwen3.5-moe": ("qwen3_5_moe", "qwen3.5-moe", {"vision_config": _QWEN3_5_VISION}),
}
"""Models of text and images: type, variant of the text part, and fields beside text_config."""


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """A saved model and transformers' own idea of its logits."""

    directory: Path
    reference: Any

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [tokens, vocabulary], by transformers."""
        with torch.inference_mode():
            result: torch.Tensor = self.reference(torch.tensor([token_ids])).logits[0].float()
        return result


def save_tiny(
    variant: str,
    directory: Path,
    *,
    max_shard_size: str = "5GB",
    seed: int = 0,
    stacks_experts: bool = False,
    **changes: Any,
) -> TinyCheckpoint:
    """Save a seeded random float32 model of the variant, its config changed; biases and norms are random too.

    `stacks_experts`: tensors are saved as transformers has them in memory.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, overrides = VARIANTS[variant]
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **overrides, **changes})
    torch.manual_seed(seed)
    # The faster ways to compute experts want widths of whole 16 bytes.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
    return _saved(model, directory, max_shard_size, stacks_experts=stacks_experts)


def save_wrapped(name: str, directory: Path, *, max_shard_size: str = "5GB") -> TinyCheckpoint:
    """Save a seeded random float32 model of text and images."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    model_type, variant, beside = WRAPPED[name]
    text_type, overrides = VARIANTS[variant]
    of_text = {"model_type": text_type, "pad_token_id": 0}  # Gemma 4 pads where an image stood.
    config = AutoConfig.for_model(model_type, text_config={**_SHAPE, **overrides, **of_text}, **beside)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    return _saved(model, directory, max_shard_size)


def _saved(model: Any, directory: Path, max_shard_size: str, *, stacks_experts: bool = False) -> TinyCheckpoint:
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or name.endswith(("bias", "sinks", "layer_scalar", "router.scale", "expert_scale")):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(directory, max_shard_size=max_shard_size, save_original_format=not stacks_experts)
    return TinyCheckpoint(directory, model)


def edit_config(directory: Path, **fields: Any) -> None:
    """Overwrite fields of the saved config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

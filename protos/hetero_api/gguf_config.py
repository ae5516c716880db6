"""Reads GGUF metadata as the config.json that the model's directory would have.

Fields are those that llama.cpp's conversion writes; what it leaves out, because llama.cpp's own code has it, is added
here. Values are checked as those of a config.json are (`hf_config`); here it is checked that they are there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hetero_api.errors import ModelError
from hetero_api.gguf_file import GgufHeader
from hetero_api.gguf_metadata import GgufMetadata
from hetero_api.gguf_model import gguf_delta, gguf_header
from hetero_api.gguf_names import GGUF_ARCHITECTURES

_TOKENS: Final = "tokenizer.ggml.tokens"
_WINDOW_PATTERN: Final = "attention.sliding_window_pattern"
_RECURRENT: Final = "attention.recurrent_layers"
_KV_HEADS: Final = "attention.head_count_kv"
_MLP_WIDTH: Final = "feed_forward_length"
_LAYER_INPUTS: Final = "per_layer_token_embd.weight"
_KV_READERS: Final = "attention.shared_kv_layers"
CONFIG_LISTS: Final = (
    _TOKENS,
    *(
        f"{name}.{field}"
        for name in GGUF_ARCHITECTURES
        for field in (_WINDOW_PATTERN, _RECURRENT, _KV_HEADS, _MLP_WIDTH)
    ),
)
"""Fields that are lists and needed here."""
_END_FIELDS: Final = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
_END_TEXTS: Final = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|return|>", "<|call|>", "<|user|>", "<|observation|>",
    "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>",
    "<end_of_utterance>", "<|end|>", "<｜end▁of▁sentence｜>",
})  # fmt: skip
"""Tokens that end a turn whatever the fields say, as llama.cpp has them, and those that GLM's generation ends with."""
_MESSAGE_END: Final = "<|end|>"
"""Ends a message only, not the turn, where turns end with <|return|>: in the Harmony format."""
_FREQUENCY_DIVISORS: Final = "rope_freqs.weight"
_MAX_DIVISORS: Final = 1 << 16
_SIGMOID: Final = 2
"""Number of sigmoid among the functions that score experts."""
_GROUPED_EXPERTS: Final = 256
"""Experts of DeepSeek-V3 and R1, whose earlier files do not say that experts are in groups: 8, of which 4 are kept."""
_PARTLY_ROTATED: Final = ("glm4", "glm4moe", "minimax-m2", "deepseek2", "qwen3next", "qwen35", "qwen35moe")
_LARGE_GEMMAS: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27B, whose attention scores are scaled by the hidden size a head."""


def read_gguf_config(files: tuple[Path, ...]) -> tuple[dict[str, Any], tuple[float, ...]]:
    """Return the fields of a config.json, and the divisors of `RopeConfig`. Raises ModelError naming file and field."""
    header = gguf_header(files, lists=CONFIG_LISTS)
    found = GgufMetadata(header)
    config = _base(found) | _rope(found) | _OWN.get(found.architecture, _nothing)(found)
    return config, _divisors(header)


def _base(found: GgufMetadata) -> dict[str, Any]:
    embedding = found.header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{found.header.path}: has no matrix token_embd.weight; is it a whole model?")
    heads = found.whole("attention.head_count")
    return {
        "architectures": [GGUF_ARCHITECTURES[found.architecture].hugging_face],
        "num_hidden_layers": found.num_layers,
        "hidden_size": found.whole("embedding_length"),
        "intermediate_size": _mlp_width(found),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(found, heads, slides=True if found.architecture == "gemma4" else None),
        "head_dim": found.head_dim,
        "max_position_embeddings": found.whole("context_length"),
        "rms_norm_eps": found.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": not found.has("output.weight"),
        "attention_bias": found.in_first_layer("attn_q.bias"),
        "mlp_bias": found.in_first_layer("ffn_gate.bias"),
        "eos_token_id": _end_tokens(found),
        "bos_token_id": found.header.metadata.get("tokenizer.ggml.bos_token_id"),
    }


def _mlp_width(found: GgufMetadata) -> int | None:
    """Return the columns of a dense layer's MLP; None where no layer is dense and none are given.

    Those of Gemma 4's layers that read other layers' keys and values may be twice as many. Raises ModelError.
    """
    listed = found.listed(_MLP_WIDTH)
    if listed is None:
        is_left_out = found.find(_MLP_WIDTH) is None and found.find("expert_count") is not None
        return None if is_left_out else found.whole(_MLP_WIDTH)
    first = listed[0]
    makers = found.num_layers - found.whole(_KV_READERS, 0)
    is_known = isinstance(first, int) and set(listed[:makers]) <= {first} and set(listed[makers:]) <= {first, 2 * first}
    if not is_known or len(set(listed[makers:])) > 1:
        raise found.error(_MLP_WIDTH, "differs from layer to layer, which is not supported")
    return int(first)


def _kv_heads(found: GgufMetadata, heads: int, *, slides: bool | None = None) -> int:
    """Return the KV heads of each layer that has a window, or of each that has none; `slides` None: of each layer.

    Raises ModelError if these layers differ.
    """
    listed, kinds = found.listed(_KV_HEADS), found.listed(_WINDOW_PATTERN) or ()
    if listed is None:
        return found.whole(_KV_HEADS, heads)
    chosen = {count for count, kind in zip(listed, kinds, strict=False) if bool(kind) is slides} or set(listed)
    if len(chosen) > 1:
        raise found.error(_KV_HEADS, "differs between layers of one kind, which is not supported")
    (count,) = chosen
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise found.error(_KV_HEADS, f"must list whole numbers of at least 1, not {count!r}")
    return count


def _end_tokens(found: GgufMetadata) -> list[Any]:
    named = [found.header.metadata[name] for name in _END_FIELDS if name in found.header.metadata]
    texts = found.header.lists.get(_TOKENS, ())
    ends = _END_TEXTS - {_MESSAGE_END} if "<|return|>" in texts else _END_TEXTS
    return [*named, *(number for number, text in enumerate(texts) if text in ends)]


def _rope(found: GgufMetadata) -> dict[str, Any]:
    """Return the rotation of layers with full attention."""
    rotated = found.whole("rope.dimension_count", found.head_dim)
    if rotated != found.head_dim and found.architecture not in _PARTLY_ROTATED:
        raise found.error("rope.dimension_count", f"must be that of a head, {found.head_dim}, not {rotated}")
    theta = {"rope_theta": found.number("rope.freq_base", 10_000.0)}
    factor = found.number("rope.scaling.factor", 0.0) or found.number("rope.scale_linear", 0.0)
    kind = found.find("rope.scaling.type", "none" if factor in (0, 1) else "linear")
    if kind == "none":
        return theta
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor or 1.0, "attn_factor": 1.0}
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        scaling["attn_factor"] *= found.number(name, 1.0)
        if kind != "yarn" and scaling["attn_factor"] != 1.0:
            raise found.error(name, f"{found.find(name)!r} is not supported; supported: 1")
    for field, name in {
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }.items():
        if found.find(name) is not None:
            scaling[field] = found.number(name)
    return theta | {"rope_scaling": scaling}


def _divisors(header: GgufHeader) -> tuple[float, ...]:
    """Return the numbers that frequencies are divided by; none where there are no such."""
    tensor = header.tensors.get(_FREQUENCY_DIVISORS)
    if tensor is None:
        return ()
    if tensor.kind.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_DIVISORS:
        raise ModelError(f"{tensor.path}: tensor {_FREQUENCY_DIVISORS} must be a vector of F32")
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        divisors = struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes))
    if not all(0 < divisor < math.inf for divisor in divisors):
        raise ModelError(f"{tensor.path}: tensor {_FREQUENCY_DIVISORS} must hold numbers of more than 0")
    return divisors


def _experts(found: GgufMetadata, width: str = "moe_intermediate_size") -> dict[str, Any]:
    """Return how many experts there are; `width`: field of config.json that says how wide one is."""
    return {
        "num_local_experts": found.whole("expert_count"),
        "num_experts_per_tok": found.whole("expert_used_count"),
        width: found.whole("expert_feed_forward_length"),
    }


def _sigmoid_experts(found: GgufMetadata) -> dict[str, Any]:
    """Return experts with shared ones beside them, which GLM-4.5 and DeepSeek-V3 have."""
    is_grouped = found.find("expert_count") == _GROUPED_EXPERTS and found.architecture == "deepseek2"
    return _experts(found) | {
        "first_k_dense_replace": found.whole("leading_dense_block_count", 0),
        "n_shared_experts": found.whole("expert_shared_count", 0),
        "n_group": found.whole("expert_group_count", 8 if is_grouped else 1) or 1,
        "topk_group": found.whole("expert_group_used_count", 4 if is_grouped else 1) or 1,
        "routed_scaling_factor": found.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(found.find("expert_weights_norm", False)),
    }


def _check_scores(found: GgufMetadata, default: int) -> None:
    if found.whole("expert_gating_func", default) != _SIGMOID:
        raise found.error(
            "expert_gating_func", f"must be {_SIGMOID}, sigmoid; models that score otherwise are not served"
        )


def _nothing(_: GgufMetadata) -> dict[str, Any]:
    return {}


def _llama(found: GgufMetadata) -> dict[str, Any]:
    if not found.whole("expert_count", 0):
        return {}
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": found.whole("expert_count"),
        "num_experts_per_tok": found.whole("expert_used_count"),
    }


def _mistral3(found: GgufMetadata) -> dict[str, Any]:
    if found.number("attention.temperature_scale", 0.0):
        raise found.error("attention.temperature_scale", "is set; scaling queries by their position is not supported")
    return {"sliding_window": None}


def _qwen3_moe(found: GgufMetadata) -> dict[str, Any]:
    return _experts(found) | {"norm_topk_prob": True}


def _gemma(found: GgufMetadata) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: found.number(name) for name in ("attn_logit_softcapping", "final_logit_softcapping") if found.find(name)
    }
    window = found.whole("attention.sliding_window", 4096 if found.architecture == "gemma2" else 0)
    fields |= {"sliding_window": window or None} | _window_pattern(found)
    if found.architecture == "gemma3":
        fields["rope_local_base_freq"] = found.number("rope.freq_base_swa", 10_000.0)
    is_large = found.num_layers == _LARGE_GEMMAS[found.architecture]
    usual = found.whole("embedding_length") // found.whole("attention.head_count")
    return fields | {"query_pre_attn_scalar": usual if is_large else found.head_dim}


def _window_pattern(found: GgufMetadata) -> dict[str, Any]:
    """Return which layers have a sliding window: every n-th has none, or one field for each layer."""
    listed = found.header.lists.get(f"{found.architecture}.{_WINDOW_PATTERN}")
    if listed is not None:
        return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in listed]}
    if found.find(_WINDOW_PATTERN) is not None:
        return {"sliding_window_pattern": found.whole(_WINDOW_PATTERN)}
    return {}


def _gemma4(found: GgufMetadata) -> dict[str, Any]:
    slides = found.listed(_WINDOW_PATTERN)
    if slides is None:
        raise found.error(_WINDOW_PATTERN, "must list which layers have a sliding window")
    if found.header.tensors.get(_FREQUENCY_DIVISORS) is None:
        raise ModelError(f"{found.header.path}: has no {_FREQUENCY_DIVISORS}, which layers without a window rotate by")
    own, rotated = found.whole("attention.key_length_swa"), found.find("rope.dimension_count_swa")
    if rotated not in (None, own):
        raise found.error("rope.dimension_count_swa", f"must be attention.key_length_swa, {own}, not {rotated!r}")
    others = [layer for layer, slid in enumerate(slides) if not slid]
    kv = _kv_heads(found, found.whole("attention.head_count"), slides=False)
    widths = found.listed(_MLP_WIDTH) or ()
    inputs = found.header.tensors.get(_LAYER_INPUTS)
    return {
        "layer_types": ["sliding_attention" if slid else "full_attention" for slid in slides],
        "sliding_window": found.whole("attention.sliding_window"),
        "head_dim": own,
        "per_layer_config": {str(layer): {"num_key_value_heads": kv, "head_dim": found.head_dim} for layer in others},
        "attention_k_eq_v": bool(others) and not found.has(f"blk.{others[0]}.attn_v.weight"),
        "final_logit_softcapping": found.find("final_logit_softcapping"),
        "hidden_size_per_layer_input": found.whole("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": inputs.shape[0] if inputs and inputs.shape else None,
        "num_kv_shared_layers": found.whole(_KV_READERS, 0),
        "use_double_wide_mlp": len(set(widths)) > 1,
        "rope_parameters": {
            "full_attention": _rope(found),
            "sliding_attention": {"rope_theta": found.number("rope.freq_base_swa", 10_000.0)},
        },
        **({"enable_moe_block": True, **_experts(found)} if found.whole("expert_count", 0) else {}),
    }


def _delta(found: GgufMetadata) -> dict[str, Any]:
    heads, listed = gguf_delta(found.header), found.listed(_RECURRENT)
    kinds = [] if listed is None else ["linear_attention" if recurs else "full_attention" for recurs in listed]
    return {
        "linear_num_key_heads": heads.key_heads,
        "linear_num_value_heads": heads.value_heads,
        "linear_key_head_dim": heads.key_dim,
        "linear_value_head_dim": heads.value_dim,
        "linear_conv_kernel_dim": found.whole("ssm.conv_kernel"),
        "full_attention_interval": found.whole("full_attention_interval", 4),
        **({"layer_types": kinds} if kinds else {}),
        **_rotated_share(found),
    }


def _delta_moe(found: GgufMetadata) -> dict[str, Any]:
    shared = found.whole("expert_shared_feed_forward_length")
    return _delta(found) | _experts(found) | {"shared_expert_intermediate_size": shared, "norm_topk_prob": True}


def _rotated_share(found: GgufMetadata) -> dict[str, Any]:
    """Return the part of a head that is rotated."""
    return {"partial_rotary_factor": found.whole("rope.dimension_count", found.head_dim) / found.head_dim}


def _glm4_moe(found: GgufMetadata) -> dict[str, Any]:
    _check_scores(found, _SIGMOID)
    return _sigmoid_experts(found) | _rotated_share(found) | {"use_qk_norm": found.in_first_layer("attn_q_norm.weight")}


def _gpt_oss(found: GgufMetadata) -> dict[str, Any]:
    fields = _experts(found, "intermediate_size") | {"sliding_window": found.whole("attention.sliding_window")}
    scaling = _rope(found).get("rope_scaling", {})
    # llama.cpp rounds the ends of YaRN's step, as it does for all models; the model itself does not.
    return fields | _window_pattern(found) | {"rope_scaling": scaling | {"truncate": False}}


def _minimax_m2(found: GgufMetadata) -> dict[str, Any]:
    _check_scores(found, _SIGMOID)
    return _experts(found, "intermediate_size") | {"rotary_dim": found.whole("rope.dimension_count", found.head_dim)}


def _deepseek2(found: GgufMetadata) -> dict[str, Any]:
    _check_scores(found, 1)
    rotated = found.whole("rope.dimension_count")
    # Earlier files have heads as they are, later ones as one of the cache's width, and heads beside it.
    query = found.whole("attention.key_length_mla", 0) or found.whole("attention.key_length")
    value = found.whole("attention.value_length_mla", 0) or found.whole("attention.value_length")
    if query <= rotated:
        raise found.error("attention.key_length_mla", f"must be more than rope.dimension_count, {rotated}, not {query}")
    return {
        **_sigmoid_experts(found),
        "kv_lora_rank": found.whole("attention.kv_lora_rank"),
        "q_lora_rank": found.whole("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": query - rotated,
        "v_head_dim": value,
        "attention_bias": False,
        **_yarn_of_latent(found),
    }


def _yarn_of_latent(found: GgufMetadata) -> dict[str, Any]:
    """Return the scaling of rotations with its factor of attention scores, stored as a tenth of it."""
    scaling = _rope(found).get("rope_scaling")
    if scaling is None:
        return {}
    mscale = 10 * found.number("rope.scaling.yarn_log_multiplier", 0.0)
    return {"rope_scaling": scaling | {"mscale": mscale, "mscale_all_dim": mscale}}


_OWN: Final[Mapping[str, Callable[[GgufMetadata], dict[str, Any]]]] = {
    "llama": _llama,
    "mistral3": _mistral3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma4": _gemma4,
    "glm4": _rotated_share,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "minimax-m2": _minimax_m2,
    "deepseek2": _deepseek2,
    "qwen3next": _delta_moe,
    "qwen35": _delta,
    "qwen35moe": _delta_moe,
}
"""Fields of one architecture, which go before those of all."""

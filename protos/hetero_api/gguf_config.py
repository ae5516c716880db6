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
from hetero_api.gguf_file import GgufHeader, Scalar
from hetero_api.gguf_model import GGUF_ARCHITECTURES, architecture_of, gguf_header

_TOKENS: Final = "tokenizer.ggml.tokens"
_WINDOW_PATTERN: Final = "attention.sliding_window_pattern"
CONFIG_LISTS: Final = (_TOKENS, *(f"{name}.{_WINDOW_PATTERN}" for name in GGUF_ARCHITECTURES))
"""Fields that are lists and needed here."""
_END_FIELDS: Final = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
_END_TEXTS: Final = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|return|>", "<|call|>", "<|user|>", "<|observation|>",
})  # fmt: skip
"""Tokens that end a turn whatever the fields say, as llama.cpp has them, and those that GLM's generation ends with."""
_FREQUENCY_DIVISORS: Final = "rope_freqs.weight"
_MAX_DIVISORS: Final = 1 << 16
_SIGMOID: Final = 2
"""Number of sigmoid among the functions that score experts."""
_GROUPED_EXPERTS: Final = 256
"""Experts of DeepSeek-V3 and R1, whose earlier files do not say that experts are in groups: 8, of which 4 are kept."""
_PARTLY_ROTATED: Final = ("glm4", "glm4moe", "minimax-m2", "deepseek2")
_LARGE_GEMMAS: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27B, whose attention scores are scaled by the hidden size a head."""


def read_gguf_config(files: tuple[Path, ...]) -> tuple[dict[str, Any], tuple[float, ...]]:
    """Return the fields of a config.json, and the divisors of `RopeConfig`. Raises ModelError naming file and field."""
    header = gguf_header(files, lists=CONFIG_LISTS)
    found = _Metadata(header)
    config = _base(found) | _rope(found) | _OWN.get(found.architecture, _nothing)(found)
    return config, _divisors(header)


class _Metadata:
    """Metadata of one model; fields are named without the architecture before them."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = architecture_of(header)

    def find(self, name: str, default: Scalar | None = None) -> Scalar | None:
        """Return a field as it is."""
        return self.header.metadata.get(f"{self.architecture}.{name}", default)

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a whole number; without a default it must be there and more than 0."""
        value, least = self.find(name, default), 1 if default is None else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"must be a whole number of at least {least}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self.find(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(name, f"must be a number, not {value!r}")
        return float(value)

    def has(self, tensor: str) -> bool:
        """Return whether there is a tensor of this name."""
        return tensor in self.header.tensors

    def in_first_layer(self, tensor: str) -> bool:
        """Return whether the first layer has such a tensor."""
        return self.has(f"blk.0.{tensor}")

    @property
    def num_layers(self) -> int:
        """Layers without those that predict further tokens."""
        layers = self.whole("block_count") - self.whole("nextn_predict_layers", 0)
        if layers < 1:
            raise self.error("nextn_predict_layers", "must be less than block_count")
        return layers

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        usual = self.whole("embedding_length") // self.whole("attention.head_count")
        return self.whole("attention.key_length", usual)

    def error(self, name: str, problem: str) -> ModelError:
        """Return an error that names file and field."""
        return ModelError(f"{self.header.path}: {self.architecture}.{name} {problem}")


def _base(found: _Metadata) -> dict[str, Any]:
    embedding = found.header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{found.header.path}: has no matrix token_embd.weight; is it a whole model?")
    heads = found.whole("attention.head_count")
    return {
        "architectures": [GGUF_ARCHITECTURES[found.architecture].hugging_face],
        "num_hidden_layers": found.num_layers,
        "hidden_size": found.whole("embedding_length"),
        "intermediate_size": found.whole("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": found.whole("attention.head_count_kv", heads),
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


def _end_tokens(found: _Metadata) -> list[Any]:
    named = [found.header.metadata[name] for name in _END_FIELDS if name in found.header.metadata]
    texts = enumerate(found.header.lists.get(_TOKENS, ()))
    return [*named, *(number for number, text in texts if text in _END_TEXTS)]


def _rope(found: _Metadata) -> dict[str, Any]:
    """Return the rotation of layers with full attention."""
    rotated = found.whole("rope.dimension_count", found.head_dim)
    if rotated != found.head_dim and found.architecture not in _PARTLY_ROTATED:
        raise found.error("rope.dimension_count", f"must be that of a head, {found.head_dim}, not {rotated}")
    theta = {"rope_theta": found.number("rope.freq_base", 10_000.0)}
    kind = found.find("rope.scaling.type", "none")
    if kind == "none":
        return theta
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if found.number(name, 1.0) != 1.0:
            raise found.error(name, f"{found.find(name)!r} is not supported; supported: 1")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": found.number("rope.scaling.factor", 1.0)}
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


def _experts(found: _Metadata, width: str = "moe_intermediate_size") -> dict[str, Any]:
    """Return how many experts there are; `width`: field of config.json that says how wide one is."""
    return {
        "num_local_experts": found.whole("expert_count"),
        "num_experts_per_tok": found.whole("expert_used_count"),
        width: found.whole("expert_feed_forward_length"),
    }


def _sigmoid_experts(found: _Metadata) -> dict[str, Any]:
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


def _check_scores(found: _Metadata, default: int) -> None:
    if found.whole("expert_gating_func", default) != _SIGMOID:
        raise found.error(
            "expert_gating_func", f"must be {_SIGMOID}, sigmoid; models that score otherwise are not served"
        )


def _nothing(_: _Metadata) -> dict[str, Any]:
    return {}


def _llama(found: _Metadata) -> dict[str, Any]:
    if not found.whole("expert_count", 0):
        return {}
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": found.whole("expert_count"),
        "num_experts_per_tok": found.whole("expert_used_count"),
    }


def _mistral3(found: _Metadata) -> dict[str, Any]:
    if found.number("attention.temperature_scale", 0.0):
        raise found.error("attention.temperature_scale", "is set; scaling queries by their position is not supported")
    return {}


def _qwen3_moe(found: _Metadata) -> dict[str, Any]:
    return _experts(found) | {"norm_topk_prob": True}


def _gemma(found: _Metadata) -> dict[str, Any]:
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


def _window_pattern(found: _Metadata) -> dict[str, Any]:
    """Return which layers have a sliding window: every n-th has none, or one field for each layer."""
    listed = found.header.lists.get(f"{found.architecture}.{_WINDOW_PATTERN}")
    if listed is not None:
        return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in listed]}
    if found.find(_WINDOW_PATTERN) is not None:
        return {"sliding_window_pattern": found.whole(_WINDOW_PATTERN)}
    return {}


def _rotated_share(found: _Metadata) -> dict[str, Any]:
    """Return the part of a head that is rotated."""
    return {"partial_rotary_factor": found.whole("rope.dimension_count", found.head_dim) / found.head_dim}


def _glm4_moe(found: _Metadata) -> dict[str, Any]:
    _check_scores(found, _SIGMOID)
    return _sigmoid_experts(found) | _rotated_share(found) | {"use_qk_norm": found.in_first_layer("attn_q_norm.weight")}


def _gpt_oss(found: _Metadata) -> dict[str, Any]:
    fields = _experts(found, "intermediate_size") | {"sliding_window": found.whole("attention.sliding_window")}
    scaling = _rope(found).get("rope_scaling", {})
    # llama.cpp rounds the ends of YaRN's step, as it does for all models; the model itself does not.
    return fields | _window_pattern(found) | {"rope_scaling": scaling | {"truncate": False}}


def _minimax_m2(found: _Metadata) -> dict[str, Any]:
    _check_scores(found, _SIGMOID)
    return _experts(found, "intermediate_size") | {"rotary_dim": found.whole("rope.dimension_count", found.head_dim)}


def _deepseek2(found: _Metadata) -> dict[str, Any]:
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


def _yarn_of_latent(found: _Metadata) -> dict[str, Any]:
    """Return the scaling of rotations with its factor of attention scores, stored as a tenth of it."""
    scaling = _rope(found).get("rope_scaling")
    if scaling is None:
        return {}
    mscale = 10 * found.number("rope.scaling.yarn_log_multiplier", 0.0)
    return {"rope_scaling": scaling | {"mscale": mscale, "mscale_all_dim": mscale}}


_OWN: Final[Mapping[str, Callable[[_Metadata], dict[str, Any]]]] = {
    "llama": _llama,
    "mistral3": _mistral3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "glm4": _rotated_share,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "minimax-m2": _minimax_m2,
    "deepseek2": _deepseek2,
}
"""Fields of one architecture, which go before those of all."""

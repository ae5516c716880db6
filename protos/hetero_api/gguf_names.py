"""Architectures as GGUF has them, and the names of their tensors.

Tensors are those of Hugging Face under other names, with these differences: experts of a layer lie in one tensor,
norms include the number that some models add to them, latent attention's `kv_b_proj` is split by its use, and heads of
the gated delta rule are in another order. Names are those that llama.cpp's conversion gives (gguf-py's tensor_mapping).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """An architecture as GGUF has it."""

    hugging_face: str
    interleaved_heads: bool = False
    """Whether rows of q and k are stored with the two halves of a head interleaved."""
    tiled_values: bool = False
    """Whether the delta rule's value heads stand in the order of their numbers within their key heads."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of a layer's modules that differ from those of other architectures."""


_POST_NORM: Final = {"post_attention_layernorm": "post_attention_norm"}
_GEMMA4: Final = {
    **_POST_NORM,
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
GGUF_ARCHITECTURES: Final[Mapping[str, GgufArchitecture]] = {
    "llama": GgufArchitecture("LlamaForCausalLM", interleaved_heads=True),
    "mistral3": GgufArchitecture("MistralForCausalLM", interleaved_heads=True),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", interleaved_heads=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM"),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", names=_POST_NORM),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", names=_POST_NORM),
    "gemma4": GgufArchitecture("Gemma4ForCausalLM", names=_GEMMA4),
    "glm4": GgufArchitecture("Glm4ForCausalLM"),
    "glm4moe": GgufArchitecture("Glm4MoeForCausalLM", names=_POST_NORM),
    "gpt-oss": GgufArchitecture("GptOssForCausalLM", names=_POST_NORM),
    "qwen3next": GgufArchitecture("Qwen3NextForCausalLM", names=_POST_NORM),
    "qwen35": GgufArchitecture("Qwen3_5ForCausalLM", tiled_values=True, names=_POST_NORM),
    "qwen35moe": GgufArchitecture("Qwen3_5MoeForCausalLM", tiled_values=True, names=_POST_NORM),
    "minimax-m2": GgufArchitecture("MiniMaxM2ForCausalLM"),
    "deepseek2": GgufArchitecture("DeepseekV3ForCausalLM"),
}
"""By the names that GGUF has for them. Models of "llama" with experts are Mixtral's."""

_WHOLE: Final[Mapping[str, str]] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_PARTS: Final = ("gate", "up", "down")
_SHARED: Final = ("shared_expert", "shared_experts")
_OF_LAYER: Final[Mapping[str, str]] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "post_attention_layernorm": "ffn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "router.proj": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in _PARTS},
    **{f"mlp.{shared}.{part}_proj": f"ffn_{part}_shexp" for shared in _SHARED for part in _PARTS},
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_LONE: Final[Mapping[str, str]] = {
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
}
"""Tensors that are no module's weight or bias."""
_GATES: Final = "ffn_gate_exps"
_UPS: Final = "ffn_up_exps"
_GATES_AND_UPS: Final = "ffn_gate_up_exps"
_STACKS: Final[Mapping[str, tuple[str, ...]]] = {
    f"{block}experts.{name}": stacks
    for block in ("mlp.", "")
    for name, stacks in (("gate_up_proj", (_GATES, _UPS)), ("down_proj", ("ffn_down_exps",)))
}
"""Stacks of experts; where there are two, rows of Hugging Face's are divided between them."""
_DELTA_INPUTS: Final = "linear_attn.in_proj_qkvz.weight"
_DELTA_INPUTS_APART: Final = ("attn_qkv.weight", "attn_gate.weight")
_DELTA_INPUTS_WHOLE: Final = "ssm_in.weight"
"""As earlier files have them, in Hugging Face's order."""
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
_EXPERT_PARTS: Final = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"
}  # fmt: skip


class GgufPart(NamedTuple):
    """A tensor, or one half of the rows of each matrix of a stack."""

    tensor: str
    half: int | None = None


class GgufName(NamedTuple):
    """Where a tensor of Hugging Face's lies."""

    parts: tuple[GgufPart, ...]
    """One, or those between which its rows are divided."""
    expert: int | None = None
    """Its entry of a stack of experts; None: it is no expert's, or the reader says which."""


def gguf_name(architecture: str, name: str, stored: Collection[str]) -> GgufName | None:
    """Return where a tensor that Hugging Face names so lies among the stored ones; None if it is unknown."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        stem, _, kind = name.rpartition(".")
        return GgufName((GgufPart(f"{_WHOLE[stem]}.{kind}"),)) if stem in _WHOLE else None
    block, within = f"blk.{layer[1]}.", layer[2]
    expert, tensors = _expert(within)
    tensors = tensors or _lone_or_stack(within) or _module(GGUF_ARCHITECTURES[architecture], within)
    if within == _DELTA_INPUTS:
        tensors = (_DELTA_INPUTS_WHOLE,) if block + _DELTA_INPUTS_WHOLE in stored else _DELTA_INPUTS_APART
    return GgufName(tuple(_part(block + tensor, stored) for tensor in tensors), expert) if tensors else None


def _part(tensor: str, stored: Collection[str]) -> GgufPart:
    """Return a tensor, or where it is not stored, the half of a stack of gates and ups that it is."""
    if tensor not in stored:
        for half, stack in enumerate((_GATES, _UPS)):
            joined = tensor.replace(f".{stack}.", f".{_GATES_AND_UPS}.")
            if joined != tensor and joined in stored:
                return GgufPart(joined, half)
    return GgufPart(tensor)


def _lone_or_stack(name: str) -> tuple[str, ...]:
    """Look up a tensor of a layer that is not named `<module>.<weight or bias>`; () if it is unknown."""
    if name in _LONE:
        return (_LONE[name],)
    stem, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    return tuple(f"{stack}.{kind}" for stack in _STACKS.get(stem, ()))


def _expert(name: str) -> tuple[int | None, tuple[str, ...]]:
    """Return an expert's number and its stack; (None, ()) for what is no expert's."""
    stem, _, kind = name.rpartition(".")
    expert = _EXPERT.fullmatch(stem)
    return (int(expert[1]), (f"ffn_{_EXPERT_PARTS[expert[2]]}_exps.{kind}",)) if expert else (None, ())


def _module(architecture: GgufArchitecture, name: str) -> tuple[str, ...]:
    stem, _, kind = name.rpartition(".")
    stored = architecture.names.get(stem) or _OF_LAYER.get(stem)
    return (f"{stored}.{kind}",) if stored else ()

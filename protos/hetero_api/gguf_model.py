"""A model in GGUF: which files of a directory hold it, what their tensors are called, and how matrices are stored.

A model directory has such files where it has no safetensors files: one, or several that llama.cpp split, which are
named NAME-00001-of-0000N.gguf. Their metadata say what config.json and the tokenizer's files say elsewhere
(`gguf_config`); where a directory has config.json as well, that counts.

Tensors are those of Hugging Face under other names, with three differences: experts of a layer lie in one tensor,
norms include the number that some models add to them, and latent attention's `kv_b_proj` is split by its use. Names
are those that llama.cpp's conversion gives (gguf-py's tensor_mapping).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Final, NamedTuple

from hetero_api.errors import ModelError
from hetero_api.gguf_file import GgmlType, GgufHeader, GgufTensor
from hetero_api.weight_format import StoredWeights, WeightFormat

ARCHITECTURE: Final = "general.architecture"
_SPLIT_FILE: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_SPLIT_NUMBER: Final = "split.no"
_SPLIT_COUNT: Final = "split.count"
_SPLIT_TENSORS: Final = "split.tensors.count"
_VISION_PREFIX: Final = "mmproj"
"""Begin of the name of a file with the vision part of a model, which is not read."""


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """An architecture as GGUF has it."""

    hugging_face: str
    interleaved_heads: bool = False
    """Whether rows of q and k are stored with the two halves of a head interleaved."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of a layer's modules that differ from those of other architectures."""


_POST_NORM: Final = {"post_attention_layernorm": "post_attention_norm"}
GGUF_ARCHITECTURES: Final[Mapping[str, GgufArchitecture]] = {
    "llama": GgufArchitecture("LlamaForCausalLM", interleaved_heads=True),
    "mistral3": GgufArchitecture("MistralForCausalLM", interleaved_heads=True),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", interleaved_heads=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM"),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", names=_POST_NORM),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", names=_POST_NORM),
    "glm4": GgufArchitecture("Glm4ForCausalLM"),
    "glm4moe": GgufArchitecture("Glm4MoeForCausalLM", names=_POST_NORM),
    "gpt-oss": GgufArchitecture("GptOssForCausalLM", names=_POST_NORM),
    "minimax-m2": GgufArchitecture("MiniMaxM2ForCausalLM"),
    "deepseek2": GgufArchitecture("DeepseekV3ForCausalLM"),
}
"""By the names that GGUF has for them. Models of "llama" with experts are Mixtral's."""

_WHOLE: Final[Mapping[str, str]] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
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
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_LONE: Final[Mapping[str, str]] = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
}
"""Tensors that are no module's weight or bias."""
_STACKS: Final[Mapping[str, tuple[str, ...]]] = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down_proj": ("ffn_down_exps",),
}
"""Stacks of experts; where there are two, rows of Hugging Face's alternate between them."""
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
_EXPERT_PARTS: Final = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"
}  # fmt: skip
_VOCABULARY: Final = ("token_embd.weight", "output.weight")
_EXPERT_MARK: Final = "_exps."
_ALWAYS_FLOATS: Final = (".ffn_gate_inp.weight", ".attn_kv_b.weight")
"""Matrices that ranks hold as floats."""
_FLOAT_NAMES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufName(NamedTuple):
    """Where a tensor of Hugging Face's lies."""

    tensors: tuple[str, ...]
    """One, or those between which its rows alternate."""
    expert: int | None = None
    """Its entry of a stack of experts; None: it is no expert's, or the reader says which."""


def gguf_name(architecture: str, name: str) -> GgufName | None:
    """Return where a tensor that Hugging Face names so lies in a file of an architecture; None if it is unknown."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        stem, _, kind = name.rpartition(".")
        return GgufName((f"{_WHOLE[stem]}.{kind}",)) if stem in _WHOLE else None
    found = _lone_or_stack(layer[2]) or _module(GGUF_ARCHITECTURES[architecture], layer[2])
    if found is None:
        return None
    return found._replace(tensors=tuple(f"blk.{layer[1]}.{tensor}" for tensor in found.tensors))


def _lone_or_stack(name: str) -> GgufName | None:
    """Look up a tensor of a layer that is not named `<module>.<weight or bias>`."""
    if name in _LONE:
        return GgufName((_LONE[name],))
    stem, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    return GgufName(tuple(f"{stack}.{kind}" for stack in _STACKS[stem])) if stem in _STACKS else None


def _module(architecture: GgufArchitecture, name: str) -> GgufName | None:
    stem, _, kind = name.rpartition(".")
    if expert := _EXPERT.fullmatch(stem):
        return GgufName((f"ffn_{_EXPERT_PARTS[expert[2]]}_exps.{kind}",), int(expert[1]))
    stored = architecture.names.get(stem) or _OF_LAYER.get(stem)
    return GgufName((f"{stored}.{kind}",)) if stored else None


def gguf_files(directory: Path) -> tuple[Path, ...]:
    """Return the GGUF files that hold a directory's weights, in their order; none where safetensors files do.

    Raises ModelError for several that are not the parts of one model, and for missing parts.
    """
    found = sorted(path for path in directory.glob("*.gguf") if not path.name.startswith(_VISION_PREFIX))
    if not found or any(directory.glob("*.safetensors")):
        return ()
    split = _SPLIT_FILE.fullmatch(found[0].name)
    number = int(split[3]) if split else 1
    parts = [f"{split[1]}-{i:05}-of-{split[3]}.gguf" for i in range(1, number + 1)] if split else [found[0].name]
    others = [path.name for path in found if path.name not in set(parts)]
    if others:
        names = ", ".join(path.name for path in found[:3])
        raise ModelError(f"{directory}: holds several GGUF files ({names}); leave those of one model")
    missing = sorted(set(parts) - {path.name for path in found})
    if missing:
        raise ModelError(
            f"{directory}: {len(missing)} of the {number} parts of a split GGUF are missing, {missing[0]} for one; "
            "fetch them all"
        )
    return tuple(found)


def gguf_header(files: tuple[Path, ...], *, lists: Collection[str] = ()) -> GgufHeader:
    """Return what the files say together, of an architecture that is supported; metadata are those of the first.

    Raises ModelError.
    """
    headers = [GgufHeader.read(path, lists=lists if path == files[0] else ()) for path in files]
    first = headers[0]
    for number, header in enumerate(headers):
        count, place = header.metadata.get(_SPLIT_COUNT) or 1, header.metadata.get(_SPLIT_NUMBER) or 0
        if (count, place) != (len(files), number):
            problem = f"is part {place} of {count} by {_SPLIT_NUMBER} and {_SPLIT_COUNT}, and part {number} of"
            raise ModelError(f"{header.path}: {problem} {len(files)} by its name; fetch all parts, named as published")
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    stored, expected = sum(len(header.tensors) for header in headers), first.metadata.get(_SPLIT_TENSORS)
    if len(files) > 1 and not stored == len(tensors) == expected:
        raise ModelError(
            f"{first.path}: {_SPLIT_TENSORS} is {expected!r}, and its parts have {stored}; fetch them again"
        )
    architecture_of(first)
    return replace(first, tensors=tensors)


def architecture_of(header: GgufHeader) -> str:
    """Return GGUF's name of the architecture. Raises ModelError unless it is supported."""
    found = header.metadata.get(ARCHITECTURE)
    if found not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise ModelError(f"{header.path}: {ARCHITECTURE} {found!r} is not supported in GGUF; supported: {known}")
    return str(found)


def gguf_weights(header: GgufHeader) -> StoredWeights:
    """Return the formats of the matrices."""
    matrices = {
        name: tensor
        for name, tensor in header.tensors.items()
        if len(tensor.shape) >= 2 and name.endswith(".weight") and not name.endswith(_ALWAYS_FLOATS)
    }
    experts = _widest(tensor for name, tensor in matrices.items() if _EXPERT_MARK in name)
    vocabulary = _widest(tensor for name, tensor in matrices.items() if name in _VOCABULARY)
    layers = _widest(
        tensor
        for name, tensor in matrices.items()
        if name not in _VOCABULARY and _EXPERT_MARK not in name and len(tensor.shape) == 2
    )
    has_experts = any(_EXPERT_MARK in name for name in matrices)
    kinds = {tensor.kind.name for tensor in matrices.values()}
    return StoredWeights(
        layers=None if has_experts and experts is None else layers,
        vocabulary=vocabulary,
        experts=experts,
        floats=_floats(tensor.kind for tensor in matrices.values()),
        method=f"GGUF {', '.join(sorted(kinds))}",
    )


def _widest(tensors: Iterable[GgufTensor]) -> WeightFormat | None:
    """Return the narrowest that holds all, as matrices that are fused are held; None if one is floats."""
    formats = {tensor.kind.weights for tensor in tensors}
    known = [weights for weights in formats if weights is not None]
    return reduce(WeightFormat.joined, known) if known and len(known) == len(formats) else None


def _floats(kinds: Iterable[GgmlType]) -> str:
    """Return the widest of those that are floats."""
    names = {_FLOAT_NAMES[kind.name] for kind in kinds if kind.weights is None}
    return names.pop() if len(names) == 1 else "float32" if names else ""

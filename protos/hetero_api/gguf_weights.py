"""A model directory whose weights are a GGUF file: which file, whose names, and how wide its matrices are.

The directory holds config.json and the tokenizer as any other does; of the file only the weights are taken. It is taken
where there are no safetensors files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Final

from hetero_api.errors import ModelError
from hetero_api.gguf_file import SUFFIX, GgmlType, GgufHeader, GgufTensor
from hetero_api.weight_format import StoredWeights, WeightFormat

ARCHITECTURE: Final = "general.architecture"
ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""By the names that GGUF has for them."""
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
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER: Final = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_VOCABULARY: Final = ("token_embd.weight", "output.weight")
_FLOAT_NAMES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def gguf_of(directory: Path) -> Path | None:
    """Return the file that holds the weights; None where safetensors files do, or nothing. Raises ModelError for
    several.
    """
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if not files or any(directory.glob("*.safetensors")):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3])
        raise ModelError(f"{directory}: holds several GGUF files ({names}); leave one, and merge one that is split")
    return files[0]


def gguf_name(name: str) -> str | None:
    """Return the file's name of a tensor that Hugging Face names so; None if there is none."""
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    layer = _LAYER.match(stem)
    if layer is None or layer[2] not in _OF_LAYER:
        return None
    return f"blk.{layer[1]}.{_OF_LAYER[layer[2]]}.{kind}"


def gguf_header(path: Path) -> GgufHeader:
    """Return the file's, of an architecture that is supported. Raises ModelError."""
    header = GgufHeader.read(path)
    found = header.metadata.get(ARCHITECTURE)
    if found not in ARCHITECTURES:
        told = ", ".join(ARCHITECTURES)
        raise ModelError(f"{path}: {ARCHITECTURE} {found!r} is not supported in GGUF; supported: {told}")
    if header.metadata.get(f"{found}.expert_count"):
        raise ModelError(f"{path}: models with experts are not supported in GGUF; use safetensors")
    return header


def gguf_weights(path: Path) -> StoredWeights:
    """Return the formats of the file's matrices. Raises ModelError."""
    tensors = gguf_header(path).tensors
    matrices = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) == 2}
    vocabulary = [tensor for name, tensor in matrices.items() if name in _VOCABULARY]
    layers = [tensor for name, tensor in matrices.items() if name not in _VOCABULARY]
    kinds = {tensor.kind.name for tensor in matrices.values()}
    return StoredWeights(
        layers=_widest(layers),
        vocabulary=_widest(vocabulary),
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

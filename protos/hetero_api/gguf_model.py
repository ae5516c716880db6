"""A model in GGUF: which files of a directory hold it, what they say together, and how matrices are stored.

A model directory has such files where it has no safetensors files: one, or several that llama.cpp split, which are
named NAME-00001-of-0000N.gguf. In place of a directory with files of several models the file is named that is meant.
Metadata say what config.json and the tokenizer's files say elsewhere (`gguf_config`); where a directory has config.json
as well, that counts.

Tensors have names of their own (`gguf_names`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Final, NamedTuple

from hetero_api.errors import ModelError
from hetero_api.gguf_file import GgmlType, GgufHeader, GgufTensor
from hetero_api.gguf_names import GGUF_ARCHITECTURES
from hetero_api.weight_format import StoredWeights, WeightFormat

ARCHITECTURE: Final = "general.architecture"
_SPLIT_FILE: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_SUFFIX: Final = ".gguf"
_MOST_PARTS: Final = 10_000
_MOST_SHOWN: Final = 12
_SPLIT_NUMBER: Final = "split.no"
_SPLIT_COUNT: Final = "split.count"
_SPLIT_TENSORS: Final = "split.tensors.count"
_VISION_PREFIX: Final = "mmproj"
"""Begin of the name of a file with the vision part of a model, which is not read."""
_VOCABULARY: Final = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
_EXPERT_MARK: Final = "_exps."
_ALWAYS_FLOATS: Final = (
    ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight", ".attn_kv_b.weight", ".ssm_conv1d.weight", ".ssm_ba.weight",
    ".ssm_alpha.weight", ".ssm_beta.weight",
)  # fmt: skip
"""Matrices that ranks hold as floats."""
_MOST_IN_HEADS: Final = 1 << 24
_FLOAT_NAMES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufDelta(NamedTuple):
    """Heads of the gated delta rule."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """Value heads a key head."""
        return self.value_heads // self.key_heads


def gguf_delta(header: GgufHeader) -> GgufDelta:
    """Return the heads that metadata name. Raises ModelError."""
    architecture = architecture_of(header)
    found: list[int] = []
    for name in ("group_count", "time_step_rank", "state_size", "inner_size"):
        value = header.metadata.get(f"{architecture}.ssm.{name}")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MOST_IN_HEADS:
            raise ModelError(f"{header.path}: {architecture}.ssm.{name} must be a whole number above 0, not {value!r}")
        found.append(value)
    key_heads, value_heads, key_dim, inner = found
    if value_heads % key_heads or inner % value_heads:
        raise ModelError(
            f"{header.path}: {architecture}.ssm: inner_size {inner}, time_step_rank {value_heads} and group_count "
            f"{key_heads} must each be a multiple of the next"
        )
    return GgufDelta(key_heads, value_heads, key_dim, inner // value_heads)


def gguf_files(path: Path) -> tuple[Path, ...]:
    """Return the GGUF files that hold a model's weights, in their order; none where safetensors files do.

    `path`: the model's directory, or the first of the files. Raises ModelError for files of several models, and for
    missing parts.
    """
    if path.suffix == _SUFFIX and path.is_file():
        return _whole(path.parent, gguf_parts(path.name))
    found = gguf_models(file.name for file in path.glob(f"*{_SUFFIX}"))
    if not found or any(path.glob("*.safetensors")):
        return ()
    if len(found) > 1:
        raise ModelError(
            f"{path}: holds several models in GGUF ({listed_models(found)}); name one of these files behind the folder "
            "in spec.model.uri, or leave those of one model"
        )
    return _whole(path, found[0])


def gguf_models(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the files of each model among GGUF files, all parts of a split one, those of vision left out."""
    own = sorted(name for name in names if name.endswith(_SUFFIX) and not _file(name).startswith(_VISION_PREFIX))
    return sorted({gguf_parts(name) for name in own})


def gguf_parts(name: str) -> tuple[str, ...]:
    """Return the names of all parts of the model that a file holds, in their order."""
    split = _SPLIT_FILE.fullmatch(name)
    if split is None:
        return (name,)
    count = min(int(split[3]), _MOST_PARTS)
    return tuple(f"{split[1]}-{i:05}-of-{split[3]}{_SUFFIX}" for i in range(1, count + 1))


def listed_models(models: Iterable[tuple[str, ...]]) -> str:
    """Return the first file of each model, for a person."""
    firsts = [parts[0] for parts in models]
    more = f" and {len(firsts) - _MOST_SHOWN} more" if len(firsts) > _MOST_SHOWN else ""
    return ", ".join(firsts[:_MOST_SHOWN]) + more


def of_variant(models: Iterable[tuple[str, ...]], variant: str) -> list[tuple[str, ...]]:
    """Return the models whose files' names end with a variant, e.g. "Q4_K_M", in upper or lower case."""
    wanted = re.compile(rf"(.*[-._])?{re.escape(variant)}", re.IGNORECASE)
    return [parts for parts in models if wanted.fullmatch(_stem(parts[0]))]


def _file(name: str) -> str:
    return name.rpartition("/")[2]


def _stem(name: str) -> str:
    """Return a file's name without its folder, its part's number and its ending."""
    split = _SPLIT_FILE.fullmatch(_file(name))
    return split[1] if split else _file(name).removesuffix(_SUFFIX)


def _whole(directory: Path, parts: tuple[str, ...]) -> tuple[Path, ...]:
    missing = [name for name in parts if not (directory / name).exists()]
    if missing:
        raise ModelError(
            f"{directory}: {len(missing)} of the {len(parts)} parts of a split GGUF are missing, {missing[0]} for one; "
            "fetch them all"
        )
    return tuple(directory / name for name in parts)


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

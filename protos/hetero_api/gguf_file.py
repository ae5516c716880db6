"""GGUF files that hold a model's weights: their tensors, how each is stored, and where. Reads no weights.

The layout is ggml's (docs/gguf.md of that project, versions 2 and 3, little-endian). A file is not trusted: every
length is checked against what is left of the file, every tensor against its end; the header's size is bounded.

A model directory has such a file where it has no safetensors files. It holds config.json and the tokenizer like any
other; only weights are taken from the file.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Final

from hetero_api.errors import ModelError
from hetero_api.model_directory import MAX_HEADER_BYTES, MAX_TOKENIZER_BYTES, model_file
from hetero_api.weight_format import StoredWeights, WeightFormat

SUFFIX: Final = ".gguf"
Scalar = int | float | bool | str

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_ALIGNMENT: Final = "general.alignment"
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
_MAX_NESTING: Final = 4
_MAX_ENTRIES: Final = 1 << 17
"""Tensors of a file, and fields of its metadata."""
_MAX_LISTED: Final = 1 << 22
"""Elements of all lists that are gone over one by one, e.g. a vocabulary and its merges."""
_MAX_TEXT_BYTES: Final = 16 << 20
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_U32: Final = _SCALARS[4]
_U64: Final = _SCALARS[10]


@dataclass(frozen=True, slots=True)
class GgmlType:
    """How ggml stores a tensor: blocks of `block_values` values in `block_bytes` bytes, along its rows."""

    name: str
    block_values: int
    block_bytes: int
    weights: WeightFormat | None = None
    """The format as ours; None: floats."""

    def row_bytes(self, values: int) -> int:
        """Return the bytes of a row of so many values."""
        return values // self.block_values * self.block_bytes


GGML_TYPES: Final[Mapping[int, GgmlType]] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18, WeightFormat(4, 32)),
    3: GgmlType("Q4_1", 32, 20, WeightFormat(4, 32, has_minimum=True)),
    8: GgmlType("Q8_0", 32, 34, WeightFormat(8, 32)),
    12: GgmlType("Q4_K", 256, 144, WeightFormat(4, 32, has_minimum=True)),
    14: GgmlType("Q6_K", 256, 210, WeightFormat(8, 16)),
    30: GgmlType("BF16", 1, 2),
}
"""Those that can be read, by their numbers."""
_OTHER_TYPES: Final[Mapping[int, str]] = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 28: "F64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor; `shape` as Hugging Face writes it, rows first."""

    shape: tuple[int, ...]
    kind: GgmlType
    offset: int
    """Offset of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of it in the file."""
        return math.prod(self.shape[:-1]) * self.kind.row_bytes(self.shape[-1])


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors that a file's header lists."""

    metadata: Mapping[str, Scalar]
    """Without what is a list (vocabulary, merges)."""
    tensors: Mapping[str, GgufTensor]
    """By their names in the file."""

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        """Read a file's header. Raises ModelError, which names the file, if it is damaged or in an unsupported
        format.
        """
        try:
            with model_file(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
        except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
            raise ModelError(f"{path}: cannot be read: {error}") from error


class _Reader:
    """Goes through a file from its beginning."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._num_listed = 0
        # The header may hold the tokenizer.
        self._end = min(len(data), MAX_HEADER_BYTES + MAX_TOKENIZER_BYTES)

    def header(self) -> GgufHeader:
        magic = self._bytes(4)
        if magic != _MAGIC:
            raise self._error("is no GGUF file")
        version = self._number(_U32)
        if version not in _VERSIONS:
            raise self._error(
                f"is of GGUF version {version}; versions {_VERSIONS} in little-endian order are supported"
            )
        num_tensors, num_fields = self._count(), self._count()
        metadata: dict[str, Scalar] = {}
        for _ in range(num_fields):
            key, value = self._text(), self._value(self._number(_U32))
            if value is not None:
                metadata[key] = value
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._error(f"{_ALIGNMENT} must be a whole number above 0, not {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        return GgufHeader(metadata, {name: self._placed(name, begin, tensor) for name, tensor in entries})

    def _entry(self) -> tuple[str, GgufTensor]:
        """Its offset counts from the beginning of the tensors."""
        name, dimensions = self._text(), self._number(_U32)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"tensor {name} has {dimensions} dimensions; the file is damaged, fetch it again")
        shape = tuple(self._number(_U64) for _ in range(dimensions))[::-1]
        number, offset = self._number(_U32), self._number(_U64)
        kind = GGML_TYPES.get(number)
        if kind is None:
            stored_as = _OTHER_TYPES.get(number, f"type {number}")
            known = ", ".join(known.name for known in GGML_TYPES.values())
            raise self._error(f"tensor {name} is stored as {stored_as}, which is not supported; supported: {known}")
        if shape[-1] % kind.block_values:
            raise self._error(f"tensor {name}: rows of {shape[-1]} are no whole blocks of {kind.name}")
        return name, GgufTensor(shape, kind, offset)

    def _placed(self, name: str, begin: int, tensor: GgufTensor) -> GgufTensor:
        placed = GgufTensor(tensor.shape, tensor.kind, begin + tensor.offset)
        if placed.offset + placed.num_bytes > len(self._data):
            raise self._error(f"tensor {name} ends behind the file's end; it is cut short, fetch it again")
        return placed

    def _value(self, kind: int, nesting: int = 0) -> Scalar | None:
        """None for a list, which is gone over."""
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            self._skip_array(nesting)
            return None
        if kind not in _SCALARS:
            raise self._error(f"a metadata field is of type {kind}; the file is damaged, fetch it again")
        found: Scalar = _SCALARS[kind].unpack(self._bytes(_SCALARS[kind].size))[0]
        return found

    def _skip_array(self, nesting: int) -> None:
        kind, length = self._number(_U32), self._number(_U64)
        if kind in _SCALARS:
            self._skip(_SCALARS[kind].size * length)
            return
        self._num_listed += length
        if self._num_listed > _MAX_LISTED:
            raise self._error(f"its metadata lists more than {_MAX_LISTED} elements")
        if nesting == _MAX_NESTING:
            raise self._error("a metadata field is nested too deep; the file is damaged, fetch it again")
        for _ in range(length):
            if kind == _STRING:
                self._skip(self._number(_U64))
            else:
                self._value(kind, nesting + 1)

    def _text(self) -> str:
        length = self._number(_U64)
        if length > _MAX_TEXT_BYTES:
            raise self._error(f"has a text of {length} bytes in its header, more than {_MAX_TEXT_BYTES}")
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError as error:
            raise self._error("a name is no UTF-8; the file is damaged, fetch it again") from error

    def _number(self, kind: struct.Struct) -> int:
        return int(kind.unpack(self._bytes(kind.size))[0])

    def _count(self) -> int:
        number = self._number(_U64)
        if number > _MAX_ENTRIES:
            raise self._error(f"says that it has {number} tensors or fields, more than {_MAX_ENTRIES}")
        return number

    def _bytes(self, length: int) -> bytes:
        begin = self._at
        self._skip(length)
        return self._data[begin : self._at]

    def _skip(self, length: int) -> None:
        end = self._at + length
        if end > len(self._data):
            raise self._error("ends within its header; it is cut short, fetch it again")
        if end > self._end:
            raise self._error(f"has a header of more than {self._end} bytes")
        self._at = end

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self._path}: {problem}")


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
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{path}: {ARCHITECTURE} {found!r} is not supported in GGUF; supported: {known}")
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

"""GGUF files: their metadata, their tensors, how each is stored, and where. Reads no weights.

The layout is ggml's (docs/gguf.md of that project, versions 2 and 3, little-endian). A file is not trusted: every
length is checked against what is left of the file, every tensor against its end; the header's size is bounded.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hetero_api.errors import ModelError, unreadable_model
from hetero_api.model_directory import MAX_HEADER_BYTES, MAX_TOKENIZER_BYTES, model_file
from hetero_api.weight_format import WeightFormat

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
    6: GgmlType("Q5_0", 32, 22, WeightFormat(8, 32)),
    7: GgmlType("Q5_1", 32, 24, WeightFormat(8, 32, has_minimum=True)),
    8: GgmlType("Q8_0", 32, 34, WeightFormat(8, 32)),
    10: GgmlType("Q2_K", 256, 84, WeightFormat(4, 16, has_minimum=True)),
    11: GgmlType("Q3_K", 256, 110, WeightFormat(4, 16)),
    12: GgmlType("Q4_K", 256, 144, WeightFormat(4, 32, has_minimum=True)),
    13: GgmlType("Q5_K", 256, 176, WeightFormat(8, 32, has_minimum=True)),
    14: GgmlType("Q6_K", 256, 210, WeightFormat(8, 16)),
    20: GgmlType("IQ4_NL", 32, 18, WeightFormat(8, 32)),
    23: GgmlType("IQ4_XS", 256, 136, WeightFormat(8, 32)),
    30: GgmlType("BF16", 1, 2),
    39: GgmlType("MXFP4", 32, 17, WeightFormat(4, 32, is_float=True)),
}
"""Those that can be read, by their numbers. Formats hold their numbers exactly, up to the rounding of scales."""
_OTHER_TYPES: Final[Mapping[int, str]] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor; `shape` as Hugging Face writes it, rows first."""

    shape: tuple[int, ...]
    kind: GgmlType
    offset: int
    """Offset of its first byte in the file."""
    path: Path
    """The file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of it in the file."""
        return math.prod(self.shape[:-1]) * self.kind.row_bytes(self.shape[-1])


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors that a file's header lists."""

    path: Path
    metadata: Mapping[str, Scalar]
    """Fields that are no lists."""
    lists: Mapping[str, Sequence[Scalar]]
    """Lists that were asked for and are there."""
    tensors: Mapping[str, GgufTensor]
    """By their names in the file."""

    @classmethod
    def read(cls, path: Path, *, lists: Collection[str] = ()) -> GgufHeader:
        """Read a file's header; of the fields that are lists (vocabulary, merges), those named in `lists`.

        Raises ModelError, which names the file, if it is damaged or in an unsupported format.
        """
        try:
            with model_file(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, lists).header()
        except OSError as error:
            raise unreadable_model(path, error) from error
        except ValueError as error:  # mmap raises it for an empty file
            raise ModelError(f"{path}: cannot be read: {error}") from error


class _Reader:
    """Goes through a file from its beginning."""

    def __init__(self, path: Path, data: mmap.mmap, lists: Collection[str]) -> None:
        self._path = path
        self._data = data
        self._wanted = lists
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
        metadata, lists = self._fields(num_fields)
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._error(f"{_ALIGNMENT} must be a whole number above 0, not {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        tensors = {name: self._placed(name, begin, tensor) for name, tensor in entries}
        if len(tensors) < len(entries):
            raise self._error("has two tensors of one name; the file is damaged, fetch it again")
        return GgufHeader(self._path, metadata, lists, tensors)

    def _fields(self, number: int) -> tuple[dict[str, Scalar], dict[str, Sequence[Scalar]]]:
        """Return the fields that are no lists, and the lists that are wanted."""
        metadata: dict[str, Scalar] = {}
        lists: dict[str, Sequence[Scalar]] = {}
        for _ in range(number):
            key, kind = self._text(), self._number(_U32)
            if kind == _ARRAY and key in self._wanted:
                lists[key] = self._list(key)
            elif (value := self._value(kind)) is not None:
                metadata[key] = value
        return metadata, lists

    def _list(self, key: str) -> Sequence[Scalar]:
        kind, length = self._number(_U32), self._count_listed()
        if kind == _STRING:
            return tuple(self._text() for _ in range(length))
        if kind not in _SCALARS:
            raise self._error(f"{key} is a list of elements of type {kind}; the file is damaged, fetch it again")
        one = _SCALARS[kind]
        return struct.unpack(f"<{length}{one.format[1:]}", self._bytes(one.size * length))

    def _entry(self) -> tuple[str, GgufTensor]:
        """Its offset counts from the beginning of the tensors."""
        name, dimensions = self._text(), self._number(_U32)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"tensor {name} has {dimensions} dimensions; the file is damaged, fetch it again")
        shape = tuple(self._number(_U64) for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise self._error(f"tensor {name} is empty: {list(shape)}; the file is damaged, fetch it again")
        number, offset = self._number(_U32), self._number(_U64)
        kind = GGML_TYPES.get(number)
        if kind is None:
            stored_as = _OTHER_TYPES.get(number, f"type {number}")
            known = ", ".join(known.name for known in GGML_TYPES.values())
            raise self._error(f"tensor {name} is stored as {stored_as}, which is not supported; supported: {known}")
        if shape[-1] % kind.block_values:
            raise self._error(f"tensor {name}: rows of {shape[-1]} are no whole blocks of {kind.name}")
        return name, GgufTensor(shape, kind, offset, self._path)

    def _placed(self, name: str, begin: int, tensor: GgufTensor) -> GgufTensor:
        placed = replace(tensor, offset=begin + tensor.offset)
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
        kind = self._number(_U32)
        if kind in _SCALARS:
            self._skip(_SCALARS[kind].size * self._number(_U64))
            return
        length = self._count_listed()
        if nesting == _MAX_NESTING:
            raise self._error("a metadata field is nested too deep; the file is damaged, fetch it again")
        for _ in range(length):
            if kind == _STRING:
                self._skip(self._number(_U64))
            else:
                self._value(kind, nesting + 1)

    def _count_listed(self) -> int:
        """Read the length of a list that is gone over, and add it to those before."""
        length = self._number(_U64)
        self._num_listed += length
        if self._num_listed > _MAX_LISTED:
            raise self._error(f"its metadata lists more than {_MAX_LISTED} elements")
        return length

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

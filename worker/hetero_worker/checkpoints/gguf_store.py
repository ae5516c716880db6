"""Reads slices of a model's GGUF files, block by block, without unpacking more than the slice.

A row of a quantised tensor is a sequence of blocks of 32 or 256 values; `hetero_api.gguf_file` knows their sizes. A
rank's rows are thus a piece of the file, and its columns are blocks of each row. Experts of a layer lie one after
another in a stack, so an expert is a piece of the file, too.

Some tensors are stored in another order than Hugging Face's, which the store undoes (`gguf_order`). Of latent
attention's `kv_b_proj`, each head's part for values is a tensor of its own, and so is that for keys, transposed; these
are read as floats. The decays of the gated delta rule are stored, not their logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Final, NamedTuple

import torch

from hetero_api.errors import ModelError
from hetero_api.gguf_file import GgmlType, GgufTensor
from hetero_api.gguf_model import architecture_of, gguf_files, gguf_header
from hetero_api.gguf_names import GgufName, gguf_name
from hetero_api.model_directory import model_file
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.gguf_blocks import unpack_blocks
from hetero_worker.checkpoints.gguf_order import GgufOrder
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix, side_by_side, stacked
from hetero_worker.checkpoints.store import MappedFile, TensorSlice, WeightStore

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LOGARITHMS: Final = ".A_log"
"""End of the name of a tensor x of which -eˣ is stored."""
_WHOLE_BY_HEAD: Final = "attn_kv_b.weight"
_KEYS_BY_HEAD: Final = "attn_k_b.weight"
_VALUES_BY_HEAD: Final = "attn_v_b.weight"


class _Place(NamedTuple):
    """Rows of a stored matrix or vector, perhaps one of a stack."""

    tensor: GgufTensor
    rows: torch.Tensor
    """int64."""
    expert: int | None


class GgufStore(WeightStore):
    """GGUF files of one model."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        """Read the headers and map the files. Raises ModelError."""
        self._path = files[0]
        self._header = gguf_header(files)
        self._architecture = architecture_of(self._header)
        self._order = GgufOrder(self._header)
        self._mapped: dict[Path, MappedFile] = {}
        for path in files:
            try:
                self._mapped[path] = MappedFile(model_file(path))
            except (OSError, ValueError) as error:
                raise ModelError(f"{path}: cannot be mapped: {error}") from error

    def release_pages(self) -> None:
        """See `WeightStore.release_pages`."""
        for mapped in self._mapped.values():
            mapped.release_pages()

    def format_of(self, name: str) -> WeightFormat | None:
        """See `WeightStore.format_of`."""
        stored = self._stored(name)
        if self._is_by_head(stored):
            return None
        formats = [self._tensor(part.tensor, name).kind.weights for part in stored.parts]
        known = [weights for weights in formats if weights is not None]
        if len(known) < len(formats):
            return None
        joined = reduce(WeightFormat.joined, known)
        return replace(joined, group=math.gcd(joined.group, self._order.column_unit(name)))

    def dtype_of(self, name: str) -> torch.dtype:
        """See `WeightStore.dtype_of`."""
        kinds = self._kinds(name)
        return reduce(torch.promote_types, (_FLOATS.get(kind.name, torch.float32) for kind in kinds))

    def stored_as(self, name: str) -> str:
        """See `WeightStore.stored_as`."""
        kinds = self._kinds(name)
        is_quantized = any(kind.weights is not None for kind in kinds)
        return " and ".join(sorted({kind.name for kind in kinds})) if is_quantized else super().stored_as(name)

    def floats(self, part: TensorSlice) -> torch.Tensor:
        """See `WeightStore.floats`."""
        stored = self._stored(part.name)
        if self._is_by_head(stored):
            return self._joined_heads(part, self._by_head(stored, part.name))
        found = [self._floats_at(place, part) for place in self._places(part, stored)]
        floats = (found[0] if len(found) == 1 else torch.cat(found)).reshape(part.shape)
        return self._logarithms(floats, part.name) if part.name.endswith(_LOGARITHMS) else floats

    def quantized(self, part: TensorSlice) -> QuantizedMatrix:
        """See `WeightStore.quantized`."""
        weights = self.format_of(part.name)
        assert weights is not None
        return self._stored_matrix(part).in_format(weights.cut(*part.column_range, part.full_shape[1])).rounded()

    def exact(self, part: TensorSlice) -> torch.Tensor:
        """See `WeightStore.exact`."""
        return super().exact(part) if self.format_of(part.name) is None else self._stored_matrix(part).dequantized()

    def _stored_matrix(self, part: TensorSlice) -> QuantizedMatrix:
        return stacked([self._unpacked(place, part) for place in self._places(part, self._stored(part.name))])

    def _kinds(self, name: str) -> list[GgmlType]:
        """Return the types of the tensors that a tensor is stored as."""
        stored = self._stored(name)
        if self._is_by_head(stored):
            return [tensor.kind for tensor in self._by_head(stored, name)]
        return [self._tensor(part.tensor, name).kind for part in stored.parts]

    def _floats_at(self, place: _Place, part: TensorSlice) -> torch.Tensor:
        if place.tensor.kind.weights is not None:  # of two tensors that rows are divided between, the other is floats
            return self._unpacked(place, part).dequantized()
        stored = self._rows_at(place)
        if len(part.full_shape) == 2:
            columns = [stored[:, slice(*wanted)] for wanted in self._columns(part)]
            stored = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        return stored.flatten(-2).clone().view(_FLOATS[place.tensor.kind.name])

    def _unpacked(self, place: _Place, part: TensorSlice) -> QuantizedMatrix:
        size, stored = place.tensor.kind.block_values, self._rows_at(place)
        matrices = []
        for wanted in self._columns(part):
            first, last = wanted.begin // size, -(-wanted.end // size)
            matrix = _matrix(place.tensor, stored[:, first:last], part.name)
            matrices.append(matrix.columns(UnitRange(wanted.begin - first * size, wanted.end - first * size)))
        return side_by_side(matrices)

    def _columns(self, part: TensorSlice) -> list[UnitRange]:
        return self._order.columns(part.name, part.column_range, width=part.full_shape[1])

    def _rows_at(self, place: _Place) -> torch.Tensor:
        """Return uint8 [rows, blocks of a row, bytes of a block], or [values, bytes] of a vector."""
        stored, rows = self._blocks(place.tensor), place.rows
        if place.expert is not None:
            stored = stored[place.expert]
        begin, end = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
        in_order = torch.equal(rows, torch.arange(begin, end))
        return stored[begin:end] if in_order else stored[rows]

    def _logarithms(self, decays: torch.Tensor, name: str) -> torch.Tensor:
        if not bool((decays < 0).all()):
            raise ModelError(f"{self._path}: tensor {name}: must hold numbers of less than 0")
        return (-decays.float()).log()

    def _stored(self, name: str) -> GgufName:
        stored = gguf_name(self._architecture, name, self._header.tensors)
        if stored is None:
            raise self._missing(name, name)
        return stored

    def _tensor(self, stored: str, name: str) -> GgufTensor:
        if stored not in self._header.tensors:
            raise self._missing(stored, name)
        return self._header.tensors[stored]

    def _missing(self, stored: str, name: str) -> ModelError:
        return ModelError(f"{self._path}: no tensor {stored} ({name}); is config.json beside it of the same model?")

    def _places(self, part: TensorSlice, stored: GgufName) -> list[_Place]:
        """Return where a slice's rows lie, in their order. Raises ModelError."""
        entry, parts = part.entry, stored.parts
        if entry is not None and len(parts) > 1:  # gates and ups alternate, or the latter come behind the former
            parts = (parts[bool(entry.first)],)
        height, expert = part.full_shape[0], entry.number if entry else stored.expert
        runs = self._order.rows(part.name, part.row_range, height=height, parts=len(parts))
        places = []
        for number, rows in runs:
            tensor, half = self._tensor(parts[number].tensor, part.name), parts[number].half
            if len(parts) == 1:
                tensor = _checked(tensor, part, heights=1 if half is None else 2, expert=expert)
            elif tensor.shape[1:] != part.full_shape[1:] or int(rows.max()) >= tensor.shape[0]:
                raise _misfit(tensor, part, part.full_shape)
            places.append(_Place(tensor, rows + (half or 0) * height, expert))
        return places

    def _blocks(self, tensor: GgufTensor) -> torch.Tensor:
        """Return uint8 [..., blocks of a row, bytes of a block] in the file; a vector has no rows."""
        kind = tensor.kind
        stored = self._mapped[tensor.path].bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        return stored.view(*tensor.shape[:-1], tensor.shape[-1] // kind.block_values, kind.block_bytes)

    def _is_by_head(self, stored: GgufName) -> bool:
        """Return whether a tensor is latent attention's of all heads, and stored by its use."""
        whole = stored.parts[0].tensor
        return whole.endswith(_WHOLE_BY_HEAD) and whole not in self._header.tensors

    def _by_head(self, stored: GgufName, name: str) -> Sequence[GgufTensor]:
        """Return keys [heads, rank, nope_dim] and values [heads, value_dim, rank]."""
        layer = stored.parts[0].tensor.removesuffix(_WHOLE_BY_HEAD)
        return [self._tensor(f"{layer}{tensor}", name) for tensor in (_KEYS_BY_HEAD, _VALUES_BY_HEAD)]

    def _joined_heads(self, part: TensorSlice, tensors: Sequence[GgufTensor]) -> torch.Tensor:
        keys, values = tensors
        heads, rank, nope = (*keys.shape, 0, 0, 0)[:3]
        unit = nope + (values.shape[1] if len(values.shape) == 3 else 0)
        if part.full_shape != (heads * unit, rank) or values.shape != (heads, unit - nope, rank):
            raise ModelError(
                f"{keys.path}: {_KEYS_BY_HEAD} {list(keys.shape)} and {_VALUES_BY_HEAD} {list(values.shape)} are not "
                f"the halves of {part.name}, {list(part.full_shape)}"
            )
        begin, end = part.row_range.begin // unit, -(-part.row_range.end // unit)
        of_keys, of_values = (self._widened(tensor, begin, end, part.name) for tensor in tensors)
        joined = torch.cat([of_keys.transpose(1, 2), of_values], dim=1).flatten(0, 1)
        first = begin * unit
        rows = joined[part.row_range.begin - first : part.row_range.end - first]
        return rows[:, slice(*part.column_range)].contiguous()

    def _widened(self, tensor: GgufTensor, begin: int, end: int, name: str) -> torch.Tensor:
        """Return float32 entries [begin, end) of a stack of matrices."""
        blocks = self._blocks(tensor)[begin:end]
        if tensor.kind.weights is None:
            floats = blocks.flatten(-2).clone().view(_FLOATS[tensor.kind.name]).float()
        else:
            floats = _matrix(tensor, blocks.flatten(0, 1), name).dequantized()
        return floats.view(end - begin, *tensor.shape[1:])


def open_gguf(directory: Path) -> GgufStore | None:
    """Open the directory's GGUF files; None if it has none. Raises ModelError."""
    files = gguf_files(directory)
    return GgufStore(files) if files else None


def _checked(tensor: GgufTensor, part: TensorSlice, *, heights: int, expert: int | None) -> GgufTensor:
    """Return the stored tensor in the shape that the config asks for; `heights`: how many of them it has rows for.

    Dimensions of one element may be left out in the file. Raises ModelError.
    """
    expected = heights * part.full_shape[0], *part.full_shape[1:]
    if part.entry is not None:
        expected = part.entry.entries, *expected
    elif expert is not None:
        expected = max(expert + 1, tensor.shape[0]), *expected
    if tensor.shape != expected:
        if tensor.shape[-1] != expected[-1] or _longer(tensor.shape) != _longer(expected):
            raise _misfit(tensor, part, expected)
        tensor = replace(tensor, shape=expected)
    if len(part.full_shape) != 2 and tensor.kind.weights is not None:
        raise ModelError(f"{tensor.path}: tensor {part.name} is stored as {tensor.kind.name}, and must be floats")
    return tensor


def _longer(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size > 1)


def _misfit(tensor: GgufTensor, part: TensorSlice, expected: tuple[int, ...]) -> ModelError:
    return ModelError(
        f"{tensor.path}: tensor {part.name} has shape {list(tensor.shape)}, config.json says {list(expected)}; "
        "the two are not of the same model"
    )


def _matrix(tensor: GgufTensor, blocks: torch.Tensor, name: str) -> QuantizedMatrix:
    try:
        return unpack_blocks(tensor.kind, blocks)
    except ValueError as error:
        raise ModelError(f"{tensor.path}: tensor {name}: {error}") from error

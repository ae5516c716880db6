"""Reads slices of a model's GGUF files, block by block, without unpacking more than the slice.

A row of a quantised tensor is a sequence of blocks of 32 or 256 values; `hetero_api.gguf_file` knows their sizes. A
rank's rows are thus a piece of the file, and its columns are blocks of each row. Experts of a layer lie one after
another in a stack, so an expert is a piece of the file, too.

Some tensors are stored in another order than Hugging Face's, which the store undoes. For the Llama family, rows of q
and k have the two halves of a head interleaved. Of latent attention's `kv_b_proj`, each head's part for values is a
tensor of its own, and so is that for keys, transposed; these are read as floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Final

import torch

from hetero_api.errors import ModelError
from hetero_api.gguf_file import GgufTensor
from hetero_api.gguf_model import GGUF_ARCHITECTURES, GgufName, architecture_of, gguf_files, gguf_header, gguf_name
from hetero_api.model_directory import model_file
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.gguf_blocks import unpack_blocks
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.checkpoints.store import MappedFile, TensorSlice, WeightStore

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HEAD_COUNTS: Final = {"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"}
_WHOLE_BY_HEAD: Final = "attn_kv_b.weight"
_KEYS_BY_HEAD: Final = "attn_k_b.weight"
_VALUES_BY_HEAD: Final = "attn_v_b.weight"


class GgufStore(WeightStore):
    """GGUF files of one model."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        """Read the headers and map the files. Raises ModelError."""
        self._path = files[0]
        self._header = gguf_header(files)
        self._architecture = architecture_of(self._header)
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
        formats = [self._tensor(tensor, name).kind.weights for tensor in stored.tensors]
        known = [weights for weights in formats if weights is not None]
        return reduce(WeightFormat.joined, known) if len(known) == len(formats) else None

    def dtype_of(self, name: str) -> torch.dtype:
        """See `WeightStore.dtype_of`."""
        stored = self._stored(name)
        tensors = (
            self._by_head(stored, name)
            if self._is_by_head(stored)
            else [self._tensor(tensor, name) for tensor in stored.tensors]
        )
        return reduce(torch.promote_types, (_FLOATS.get(tensor.kind.name, torch.float32) for tensor in tensors))

    def floats(self, part: TensorSlice) -> torch.Tensor:
        """See `WeightStore.floats`."""
        stored = self._stored(part.name)
        if self._is_by_head(stored):
            return self._joined_heads(part, self._by_head(stored, part.name))
        tensor = self._checked(part, stored)
        if tensor.kind.weights is not None:  # of two tensors whose rows alternate, the other one is floats
            return self._unpacked(tensor, part).dequantized()
        found = self._of_rows(self._entry(tensor, part), part)
        if part.columns is not None:
            found = found[:, slice(*part.columns)]
        return found.flatten(-2).clone().view(_FLOATS[tensor.kind.name]).reshape(part.shape)

    def quantized(self, part: TensorSlice) -> QuantizedMatrix:
        """See `WeightStore.quantized`."""
        matrix = self._unpacked(self._checked(part, self._stored(part.name)), part)
        weights = self.format_of(part.name)
        assert weights is not None
        return matrix.in_format(weights.cut(*part.column_range, part.full_shape[1]))

    def _unpacked(self, tensor: GgufTensor, part: TensorSlice) -> QuantizedMatrix:
        size, wanted = tensor.kind.block_values, part.column_range
        first, last = wanted.begin // size, -(-wanted.end // size)
        matrix = _matrix(tensor, self._of_rows(self._entry(tensor, part)[:, first:last], part), part.name)
        return matrix.columns(UnitRange(wanted.begin - first * size, wanted.end - first * size))

    def _stored(self, name: str) -> GgufName:
        stored = gguf_name(self._architecture, name)
        if stored is None:
            raise self._missing(name, name)
        return stored

    def _tensor(self, stored: str, name: str) -> GgufTensor:
        if stored not in self._header.tensors:
            raise self._missing(stored, name)
        return self._header.tensors[stored]

    def _missing(self, stored: str, name: str) -> ModelError:
        return ModelError(f"{self._path}: no tensor {stored} ({name}); is config.json beside it of the same model?")

    def _checked(self, part: TensorSlice, stored: GgufName) -> GgufTensor:
        """Return the tensor that the slice, or the stack that its entry, lies in."""
        entry = part.entry
        tensor = self._tensor(stored.tensors[entry.first if entry else 0], part.name)
        found, expected = tensor.shape, part.full_shape
        if entry is not None:
            expected = entry.entries, *expected
        elif stored.expert is not None:
            expected = max(stored.expert + 1, found[0]), *expected
        if found != expected:
            raise ModelError(
                f"{tensor.path}: tensor {part.name} has shape {list(found)}, config.json says {list(expected)}; "
                "the two are not of the same model"
            )
        if len(part.full_shape) == 1 and tensor.kind.weights is not None:
            raise ModelError(f"{tensor.path}: tensor {part.name} is a vector of {tensor.kind.name}, not of floats")
        return tensor

    def _entry(self, tensor: GgufTensor, part: TensorSlice) -> torch.Tensor:
        """Return uint8 [rows, blocks of a row, bytes of a block] in the file, or [values, bytes] of a vector."""
        blocks = self._blocks(tensor)
        expert = part.entry.number if part.entry else self._stored(part.name).expert
        return blocks if expert is None else blocks[expert]

    def _blocks(self, tensor: GgufTensor) -> torch.Tensor:
        """Return uint8 [..., blocks of a row, bytes of a block] in the file; a vector has no rows."""
        kind = tensor.kind
        stored = self._mapped[tensor.path].bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        return stored.view(*tensor.shape[:-1], tensor.shape[-1] // kind.block_values, kind.block_bytes)

    def _of_rows(self, stored: torch.Tensor, part: TensorSlice) -> torch.Tensor:
        """Return the slice's rows, or values of a vector, in Hugging Face's order."""
        rows, heads = part.row_range, self._interleaved_heads(part.name)
        if not heads:
            return stored[slice(*rows)]
        dim = part.full_shape[0] // heads
        within = torch.arange(dim).view(-1, 2).T.flatten()
        numbers = torch.arange(*rows)
        return stored[numbers // dim * dim + within[numbers % dim]]

    def _interleaved_heads(self, name: str) -> int:
        """Return the number of heads that the tensor's rows interleave; 0: rows are in order."""
        module = name.split(".")[-2]
        if not GGUF_ARCHITECTURES[self._architecture].interleaved_heads or module not in _HEAD_COUNTS:
            return 0
        field = f"{self._architecture}.{_HEAD_COUNTS[module]}"
        count = self._header.metadata.get(field)
        if not isinstance(count, int) or count < 1:
            raise ModelError(f"{self._path}: {field} must be a whole number of heads, not {count!r}")
        return count

    def _is_by_head(self, stored: GgufName) -> bool:
        """Return whether a tensor is latent attention's of all heads, and stored by its use."""
        return stored.tensors[0].endswith(_WHOLE_BY_HEAD) and stored.tensors[0] not in self._header.tensors

    def _by_head(self, stored: GgufName, name: str) -> Sequence[GgufTensor]:
        """Return keys [heads, rank, nope_dim] and values [heads, value_dim, rank]."""
        layer = stored.tensors[0].removesuffix(_WHOLE_BY_HEAD)
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


def _matrix(tensor: GgufTensor, blocks: torch.Tensor, name: str) -> QuantizedMatrix:
    try:
        return unpack_blocks(tensor.kind, blocks)
    except ValueError as error:
        raise ModelError(f"{tensor.path}: tensor {name}: {error}") from error

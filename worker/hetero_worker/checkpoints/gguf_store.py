"""Reads slices of a GGUF file, block by block, without unpacking more than the slice.

A row of a quantised tensor is a sequence of blocks of 32 or 256 values; `hetero_api.gguf_file` knows their sizes and
`gguf_blocks` unpacks them. A rank's rows are thus a piece of the file, and its columns are blocks of each row.

For the Llama family, GGUF stores the rows of q and k in another order, with the two halves of a head interleaved. The
store undoes this, so that tensors equal Hugging Face's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from hetero_api.errors import ModelError
from hetero_api.gguf_file import GgufTensor
from hetero_api.gguf_weights import ARCHITECTURE, gguf_header, gguf_name, gguf_of
from hetero_api.model_directory import model_file
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.gguf_blocks import unpack_blocks
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.checkpoints.store import MappedFile, TensorSlice, WeightStore

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTERLEAVED: Final = ("llama",)
_HEAD_COUNTS: Final = {"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"}


class GgufStore(WeightStore):
    """One GGUF file."""

    def __init__(self, path: Path) -> None:
        """Read the header and map the file. Raises ModelError."""
        self._path = path
        self._header = gguf_header(path)
        self._architecture = str(self._header.metadata[ARCHITECTURE])
        try:
            self._file: MappedFile | None = MappedFile(model_file(path))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be mapped: {error}") from error

    def close(self) -> None:
        """See `WeightStore.close`."""
        self._file = None

    def release_pages(self) -> None:
        """See `WeightStore.release_pages`."""
        self._mapped.release_pages()

    def format_of(self, name: str) -> WeightFormat | None:
        """See `WeightStore.format_of`."""
        return self._tensor(name).kind.weights

    def dtype_of(self, name: str) -> torch.dtype:
        """See `WeightStore.dtype_of`."""
        return _FLOATS[self._tensor(name).kind.name]

    def floats(self, part: TensorSlice) -> torch.Tensor:
        """See `WeightStore.floats`."""
        tensor = self._checked(part)
        # A vector is stored as one row; its values are picked as rows of a matrix are.
        values = self._blocks(tensor)[0] if len(part.full_shape) == 1 else self._blocks(tensor)
        found = self._of_rows(values, part)
        if part.columns is not None:
            found = found[:, slice(*part.columns)]
        return found.flatten(-2).clone().view(_FLOATS[tensor.kind.name]).reshape(part.shape)

    def quantized(self, part: TensorSlice) -> QuantizedMatrix:
        """See `WeightStore.quantized`."""
        tensor = self._checked(part)
        size, wanted = tensor.kind.block_values, part.column_range
        first, last = wanted.begin // size, -(-wanted.end // size)
        blocks = self._of_rows(self._blocks(tensor)[:, first:last], part)
        try:
            matrix = unpack_blocks(tensor.kind, blocks)
        except ValueError as error:
            raise ModelError(f"{self._path}: tensor {part.name}: {error}") from error
        return matrix.columns(UnitRange(wanted.begin - first * size, wanted.end - first * size))

    def _tensor(self, name: str) -> GgufTensor:
        stored = gguf_name(name)
        if stored is None or stored not in self._header.tensors:
            raise ModelError(
                f"{self._path}: no tensor {stored or name} ({name}); is config.json beside it of the same model?"
            )
        return self._header.tensors[stored]

    def _checked(self, part: TensorSlice) -> GgufTensor:
        tensor = self._tensor(part.name)
        if tensor.shape != part.full_shape:
            raise ModelError(
                f"{self._path}: tensor {part.name} has shape {list(tensor.shape)}, config.json says "
                f"{list(part.full_shape)}; the two are not of the same model"
            )
        return tensor

    def _blocks(self, tensor: GgufTensor) -> torch.Tensor:
        """Return uint8 [rows, blocks of a row, bytes of a block] in the file; a vector has one row."""
        kind, width = tensor.kind, tensor.shape[-1]
        stored = self._mapped.bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        return stored.view(-1, width // kind.block_values, kind.block_bytes)

    @property
    def _mapped(self) -> MappedFile:
        if self._file is None:
            raise RuntimeError(f"{self._path} was read after it was closed")
        return self._file

    def _of_rows(self, stored: torch.Tensor, part: TensorSlice) -> torch.Tensor:
        """Return the slice's rows, in Hugging Face's order."""
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
        if self._architecture not in _INTERLEAVED or module not in _HEAD_COUNTS:
            return 0
        field = f"{self._architecture}.{_HEAD_COUNTS[module]}"
        count = self._header.metadata.get(field)
        if not isinstance(count, int) or count < 1:
            raise ModelError(f"{self._path}: {field} must be a whole number of heads, not {count!r}")
        return count


def open_gguf(directory: Path) -> GgufStore | None:
    """Open the directory's GGUF file; None if it has none. Raises ModelError."""
    path = gguf_of(directory)
    return None if path is None else GgufStore(path)

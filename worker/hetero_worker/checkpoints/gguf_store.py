"""Reads slices of a GGUF file, block by block, without unpacking more than the slice.

A row of a quantised tensor is a sequence of blocks of 32 or 256 values; `hetero_api.gguf_file` knows their sizes. A
rank's rows are thus a piece of the file, and its columns are blocks of each row.

Blocks follow ggml's layouts (ggml-common.h) and arithmetic (ggml-quants.c). Within a block of 4-bit values, the lower
halves of some bytes come first, then their upper halves. Scales of Q4_K and Q6_K are products of two numbers, which are
rounded to float16, the type of all scales; everything else is exact.

For the Llama family, GGUF stores the rows of q and k in another order, with the two halves of a head interleaved. The
store undoes this, so that tensors equal Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch

from hetero_api.errors import ModelError
from hetero_api.gguf_file import ARCHITECTURE, GgmlType, GgufTensor, gguf_header, gguf_name, gguf_of
from hetero_api.model_directory import model_file
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
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
            self._mapped = MappedFile(model_file(path))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be mapped: {error}") from error

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


class _Unpacked(NamedTuple):
    values: torch.Tensor
    """[rows, blocks, values]."""
    scales: torch.Tensor
    """float32 [rows, blocks, groups]."""
    minima: torch.Tensor | None = None


def unpack_blocks(kind: GgmlType, blocks: torch.Tensor) -> QuantizedMatrix:
    """Return a matrix of whole blocks of a quantised type. Raises ValueError for scales that float16 cannot hold."""
    assert kind.weights is not None
    found = _READERS[kind.name](blocks)
    scales, minima = _rounded(found.scales), None if found.minima is None else _rounded(found.minima)
    return QuantizedMatrix(kind.weights, found.values.flatten(1).contiguous(), scales, minima)


def _q8_0(blocks: torch.Tensor) -> _Unpacked:
    """Unpack a scale and 32 values."""
    return _Unpacked(blocks[..., 2:].contiguous().view(torch.int8), _halves(blocks[..., :2]))


def _q4_0(blocks: torch.Tensor) -> _Unpacked:
    """Unpack a scale and 16 bytes of values."""
    return _Unpacked(_nibbles(blocks[..., 2:]), _halves(blocks[..., :2]))


def _q4_1(blocks: torch.Tensor) -> _Unpacked:
    """Unpack a scale, a minimum and 16 bytes of values."""
    return _Unpacked(_nibbles(blocks[..., 4:]), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q4_k(blocks: torch.Tensor) -> _Unpacked:
    """Unpack two units, scales and minima of 8 groups as 6-bit multiples of them, and 4 times 32 bytes of values."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=-1)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=-1)
    values = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)).flatten(-2)
    return _Unpacked(values, _halves(blocks[..., :2]) * scales, -_halves(blocks[..., 2:4]) * minima)


def _q6_k(blocks: torch.Tensor) -> _Unpacked:
    """Unpack the lower 4 bits of 256 values, their upper 2 bits, 16 int8 scales, and the scales' unit."""
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))
    upper = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = (upper >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(1)) & 3
    values = (low | high.flatten(-2) << 4).flatten(-2).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return _Unpacked(values, _halves(blocks[..., 208:]) * scales)


_READERS: Final[Mapping[str, Callable[[torch.Tensor], _Unpacked]]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return [..., 2 · bytes] of [..., bytes]: all lower halves, then all upper ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., 1] of the two bytes of a float16."""
    return packed.contiguous().view(torch.float16).float()


def _rounded(numbers: torch.Tensor) -> torch.Tensor:
    """Return [rows, groups] of [rows, blocks, groups], rounded to float16."""
    rounded = numbers.flatten(1).half().float()
    if not torch.isfinite(rounded).all():
        raise ValueError("scales are not finite, or too large for float16; the file is damaged")
    return rounded

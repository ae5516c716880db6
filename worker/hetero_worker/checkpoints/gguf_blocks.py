"""Unpacks ggml's blocks of quantised values (layouts: ggml-common.h; numbers: ggml-quants.c).

Blocks are uint8 [rows, blocks, bytes]. Within a block of 4-bit values, the lower halves of some bytes come first, then
their upper halves. Scales of Q4_K and Q6_K are products of two numbers, which are rounded to float16, the type of all
scales; everything else is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch

from hetero_api.gguf_file import GgmlType
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix


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

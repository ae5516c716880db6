"""Unpacks ggml's blocks of quantised values (layouts: ggml-common.h; numbers: ggml-quants.c).

Blocks come as uint8 [rows, blocks, bytes]. Within a block, values of 4 bits lie such that the lower halves of some
bytes come first and then their upper halves. Q4_K and Q6_K have scales that are products of two numbers: these are
rounded to float16, for it is what scales are everywhere; all else is taken over as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch

from hetero_api.gguf_file import GgmlType
from hetero_worker.memory.quantized_matrix import QuantizedMatrix


class _Unpacked(NamedTuple):
    values: torch.Tensor
    """[rows, blocks, values]."""
    scales: torch.Tensor
    """float32 [rows, blocks, groups]."""
    minima: torch.Tensor | None = None


def unpack_blocks(kind: GgmlType, blocks: torch.Tensor) -> QuantizedMatrix:
    """Of whole blocks of a type that has a format. Raises ValueError for scales that no float16 holds."""
    assert kind.weights is not None
    found = _READERS[kind.name](blocks)
    scales, minima = _rounded(found.scales), None if found.minima is None else _rounded(found.minima)
    return QuantizedMatrix(kind.weights, found.values.flatten(1).contiguous(), scales, minima)


def _q8_0(blocks: torch.Tensor) -> _Unpacked:
    """Scale, 32 values."""
    return _Unpacked(blocks[..., 2:].contiguous().view(torch.int8), _halves(blocks[..., :2]))


def _q4_0(blocks: torch.Tensor) -> _Unpacked:
    """Scale, 16 bytes."""
    return _Unpacked(_nibbles(blocks[..., 2:]), _halves(blocks[..., :2]))


def _q4_1(blocks: torch.Tensor) -> _Unpacked:
    """Scale, minimum, 16 bytes."""
    return _Unpacked(_nibbles(blocks[..., 4:]), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q4_k(blocks: torch.Tensor) -> _Unpacked:
    """What scales and minima of 8 groups are multiples of, these in 12 bytes of 6 bits each, then 4 times 32 bytes."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=-1)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=-1)
    values = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)).flatten(-2)
    return _Unpacked(values, _halves(blocks[..., :2]) * scales, -_halves(blocks[..., 2:4]) * minima)


def _q6_k(blocks: torch.Tensor) -> _Unpacked:
    """Lower 4 bits of 256 values, their upper 2 bits, 16 scales of int8, and what these are multiples of."""
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
    """[..., bytes] → [..., 2 · bytes]: all lower halves, then all upper ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Two bytes of a float16 → float32 [..., 1]."""
    return packed.contiguous().view(torch.float16).float()


def _rounded(numbers: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, groups] → [rows, groups] of float16 numbers."""
    rounded = numbers.flatten(1).half().float()
    if not torch.isfinite(rounded).all():
        raise ValueError("scales are not finite, or too large for float16; the file is damaged")
    return rounded

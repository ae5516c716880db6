"""Blocks of ggml's quantised types, as whole numbers, scales and minima.

Blocks follow ggml's layouts (ggml-common.h) and arithmetic (ggml-quants.c). Within a block of 4-bit values, the lower
halves of some bytes come first, then their upper halves. Numbers are exact: scales of K-quants and IQ4_XS are products
of two numbers, which only `QuantizedMatrix.rounded` rounds to float16, as scales of MXFP4 below float16's, of weights
below 10^-6. Types of 5 bits, and those whose values are looked up in a table of their own, become 8 bits; those of 2
and 3 bits become 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch

from hetero_api.gguf_file import GgmlType
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix

_MXFP4_EXPONENT: Final = 128
"""What a stored exponent of half a scale is larger by."""
_IQ4: Final = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
"""Values of IQ4_NL and IQ4_XS, by their bits."""


class _Unpacked(NamedTuple):
    values: torch.Tensor
    """[rows, blocks, values]."""
    scales: torch.Tensor
    """float32 [rows, blocks, groups]."""
    minima: torch.Tensor | None = None


def unpack_blocks(kind: GgmlType, blocks: torch.Tensor) -> QuantizedMatrix:
    """Return a matrix of whole blocks, uint8 [rows, blocks, bytes], of a quantised type.

    Raises ValueError for scales that are too large for float16.
    """
    assert kind.weights is not None
    found = _READERS[kind.name](blocks)
    scales, minima = _checked(found.scales), None if found.minima is None else _checked(found.minima)
    values = found.values.flatten(1).to(torch.int8 if kind.weights.bits == 8 else torch.uint8)
    return QuantizedMatrix(kind.weights, values.contiguous(), scales, minima)


def _q8_0(blocks: torch.Tensor) -> _Unpacked:
    """Unpack a scale and 32 values."""
    return _Unpacked(blocks[..., 2:].contiguous().view(torch.int8), _halves(blocks[..., :2]))


def _q4_0(blocks: torch.Tensor) -> _Unpacked:
    """Unpack a scale and 16 bytes of values."""
    return _Unpacked(_nibbles(blocks[..., 2:]), _halves(blocks[..., :2]))


def _q4_1(blocks: torch.Tensor) -> _Unpacked:
    """Unpack a scale, a minimum and 16 bytes of values."""
    return _Unpacked(_nibbles(blocks[..., 4:]), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q5_0(blocks: torch.Tensor) -> _Unpacked:
    """Unpack a scale, the highest bits of 32 values, and 16 bytes of their lower bits."""
    values = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return _Unpacked(values.to(torch.int8) - 16, _halves(blocks[..., :2]))


def _q5_1(blocks: torch.Tensor) -> _Unpacked:
    """Unpack a scale, a minimum, the highest bits of 32 values, and 16 bytes of their lower bits."""
    values = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return _Unpacked(values, _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q2_k(blocks: torch.Tensor) -> _Unpacked:
    """Unpack scales and minima of 16 groups as 4-bit multiples of two units, 256 values of 2 bits, and the units."""
    factors = blocks[..., :16]
    scales = _halves(blocks[..., 80:82]) * (factors & 15)
    return _Unpacked(_pairs(blocks[..., 16:80]), scales, -_halves(blocks[..., 82:84]) * (factors >> 4))


def _q3_k(blocks: torch.Tensor) -> _Unpacked:
    """Unpack the highest bits of 256 values, their lower 2 bits, scales of 16 groups in 6 bits, and their unit.

    The value that stands for zero is 4; that of our 4 bits is 8.
    """
    high = _planes(blocks[..., :32], 8, 1)
    low, upper = _nibbles(blocks[..., 96:104]), blocks[..., 104:108].unsqueeze(-2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(1)
    factors = low | ((upper >> shifts) & 3).flatten(-2) << 4
    scales = _halves(blocks[..., 108:110]) * (factors.to(torch.int8) - 32)
    return _Unpacked((_pairs(blocks[..., 32:96]) | high << 2) + 4, scales)


def _q4_k(blocks: torch.Tensor) -> _Unpacked:
    """Unpack two units, scales and minima of 8 groups as 6-bit multiples of them, and 4 times 32 bytes of values."""
    return _Unpacked(_nibbles_of_pairs(blocks[..., 16:]), *_scales_and_minima(blocks))


def _q5_k(blocks: torch.Tensor) -> _Unpacked:
    """Unpack what Q4_K has, with the highest bits of 256 values before their lower bits."""
    high = _planes(blocks[..., 16:48], 8, 1)
    return _Unpacked(_nibbles_of_pairs(blocks[..., 48:]) | high << 4, *_scales_and_minima(blocks))


def _q6_k(blocks: torch.Tensor) -> _Unpacked:
    """Unpack the lower 4 bits of 256 values, their upper 2 bits, 16 int8 scales, and the scales' unit."""
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)).flatten(-2)
    values = (low | _pairs(blocks[..., 128:192]) << 4).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return _Unpacked(values, _halves(blocks[..., 208:]) * scales)


def _iq4_nl(blocks: torch.Tensor) -> _Unpacked:
    """Unpack a scale and 16 bytes of places in a table."""
    return _Unpacked(_IQ4[_nibbles(blocks[..., 2:]).int()], _halves(blocks[..., :2]))


def _iq4_xs(blocks: torch.Tensor) -> _Unpacked:
    """Unpack the scales' unit, scales of 8 groups in 6 bits, and 8 times 16 bytes of places in a table."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    upper = ((blocks[..., 2:4].unsqueeze(-1) >> shifts) & 3).flatten(-2)
    packed = blocks[..., 4:8]
    lower = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    scales = _halves(blocks[..., :2]) * ((lower | upper << 4).to(torch.int8) - 32)
    places = _nibbles(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16)).flatten(-2)
    return _Unpacked(_IQ4[places.int()], scales)


def _mxfp4(blocks: torch.Tensor) -> _Unpacked:
    """Unpack an exponent and 16 bytes of 4-bit floats."""
    return _Unpacked(_nibbles(blocks[..., 1:]), torch.exp2(blocks[..., :1].float() - _MXFP4_EXPONENT))


_READERS: Final[Mapping[str, Callable[[torch.Tensor], _Unpacked]]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return those of a block of Q4_K or Q5_K: two units, and 6-bit multiples of them in 12 bytes."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=-1)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=-1)
    return _halves(blocks[..., :2]) * scales, -_halves(blocks[..., 2:4]) * minima


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return [..., 2 · bytes] of [..., bytes]: all lower halves, then all upper ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _nibbles_of_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Return 256 values of 4 times 32 bytes."""
    return _nibbles(packed.reshape(*packed.shape[:2], 4, 32)).flatten(-2)


def _pairs(packed: torch.Tensor) -> torch.Tensor:
    """Return 256 values of 2 bits of 2 times 32 bytes: all lowest bits of 32 bytes first."""
    return _planes(packed.reshape(*packed.shape[:2], 2, 32), 4, 2).flatten(-2)


def _planes(packed: torch.Tensor, number: int, width: int) -> torch.Tensor:
    """Return [..., number · bytes] of [..., bytes]: the lowest `width` bits of all bytes, then the next ones."""
    shifts = torch.arange(0, number * width, width, dtype=torch.uint8).unsqueeze(1)
    return ((packed.unsqueeze(-2) >> shifts) & ((1 << width) - 1)).flatten(-2)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """Return [..., 8 · bytes]: the bits of each byte, from the lowest."""
    return ((packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., 1] of the two bytes of a float16."""
    return packed.contiguous().view(torch.float16).float()


def _checked(numbers: torch.Tensor) -> torch.Tensor:
    """Return [rows, groups] of [rows, blocks, groups]."""
    if not torch.isfinite(numbers.half()).all():
        raise ValueError("scales are not finite, or too large for float16; the file is damaged")
    return numbers.flatten(1)

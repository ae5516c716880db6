"""Quantises weights at load: floats to the nearest numbers of a format.

A group's numbers depend on that group alone, so a weight becomes the same number on every rank and in every slice.
Therefore only whole groups are quantised; for rows with one scale, the whole row.

Scales and minima are rounded outwards to float16, so that no value is clipped. Values are then rounded against the
rounded scales and minima.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from hetero_api.errors import ModelError
from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix

_MOST: Final = {8: 127, 4: 15}
"""Number of steps from the least value to the greatest; for 8 bits, from zero to the greatest."""
_FLOAT_ERROR: Final = 2**-20


def quantize(weight: torch.Tensor, weights: WeightFormat) -> QuantizedMatrix:
    """Quantise float32 [out, in] to 8 bits without minima, or to 4 bits with minima.

    Raises ModelError for numbers that are not finite or too large for float16, ValueError for another format.
    """
    if (weights.bits, weights.has_minimum) not in _METHODS:
        raise ValueError(f"weights are not quantised to {weights} here")
    method = _METHODS[weights.bits, weights.has_minimum]
    pieces = [method(groups) for groups in _grouped(weight, weights.group or max(1, weight.shape[1]))]
    values, scales, *minima = (_joined(parts) for parts in zip(*pieces, strict=True))
    return QuantizedMatrix(weights, values, scales, *minima)


def _symmetric(groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return 8-bit values and scales of [out, groups, group]."""
    least, greatest = _bounds(groups)
    scales = _checked(_rounded_up(torch.maximum(-least, greatest) / _MOST[8]))
    values = (groups / _divisor(scales)).round_().clamp_(-_MOST[8], _MOST[8])
    return values.to(torch.int8), scales


def _with_minima(groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return 4-bit values, scales and minima of [out, groups, group]."""
    least, greatest = _bounds(groups)
    minima = _checked(-_rounded_up(-least))
    scales = _checked(_rounded_up((greatest - minima) / _MOST[4]))
    values = (groups - minima).div_(_divisor(scales)).round_().clamp_(0, _MOST[4])
    return values.to(torch.uint8), scales, minima


def _bounds(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each group's least and greatest, [out, groups, 1]. torch's aminmax would take eight times as long."""
    return groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)


_METHODS: Final = {(8, False): _symmetric, (4, True): _with_minima}
"""Keys: bits, and whether there are minima."""


def _grouped(weight: torch.Tensor, group: int) -> Iterator[torch.Tensor]:
    """Yield [out, groups, group] of whole groups, then of the rest of the rows."""
    full = weight.shape[1] // group
    if full or not weight.shape[1]:
        yield weight[:, : full * group].reshape(len(weight), full, group)
    if weight.shape[1] % group:
        yield weight[:, full * group :].unsqueeze(1)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join pieces [out, groups, n] to [out, sum of groups · n]."""
    flat = [part.flatten(1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """Replace scales of zero, whose weights are all zero or all the minimum: any other scale gives the same values."""
    return scales.masked_fill(scales == 0, 1.0)


def _rounded_up(numbers: torch.Tensor) -> torch.Tensor:
    """Return the least float16 numbers that are not less, up to float32's own error, as float32."""
    nearest = numbers.half()
    is_less = nearest.float() < numbers - numbers.abs() * _FLOAT_ERROR
    return torch.where(is_less, torch.nextafter(nearest, torch.full_like(nearest, torch.inf)), nearest).float()


def _checked(numbers: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(numbers).all():
        raise ModelError("weights are not finite, or too large to be quantised; use spec.model.quantization: none")
    return numbers

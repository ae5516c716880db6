"""Quantises weights at load: floats to the nearest numbers of a format.

The same weight gets the same number on whatever rank it is, and in whatever slice it was read: a group's numbers depend
on that group alone. So whole groups are quantised, of a row with one scale the whole row.

Scales and minima are rounded to float16 outwards, so that no value is clipped, and values are then rounded against the
rounded ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from hetero_api.errors import ModelError
from hetero_api.weight_format import WeightFormat
from hetero_worker.memory.quantized_matrix import QuantizedMatrix

_MOST: Final = {8: 127, 4: 15}
"""Of the steps from the least value to the greatest: of 8 bits, from zero to the greatest."""
_FLOAT_ERROR: Final = 2**-20


def quantize(weight: torch.Tensor, weights: WeightFormat) -> QuantizedMatrix:
    """float32 [out, in] in 8 bits without minima, or in 4 bits with minima.

    Raises ModelError for numbers that are not finite, or too large for float16.
    """
    if (weights.bits, weights.has_minimum) not in _METHODS:
        raise ValueError(f"weights are not quantised to {weights} here")
    method = _METHODS[weights.bits, weights.has_minimum]
    pieces = [method(groups) for groups in _grouped(weight, weights.group or max(1, weight.shape[1]))]
    values, scales, *minima = (_joined(parts) for parts in zip(*pieces, strict=True))
    return QuantizedMatrix(weights, values, scales, *minima)


def _symmetric(groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[out, groups, group] → values and scales, of 8 bits."""
    least, greatest = _bounds(groups)
    scales = _checked(_rounded_up(torch.maximum(-least, greatest) / _MOST[8]))
    values = (groups / _divisor(scales)).round_().clamp_(-_MOST[8], _MOST[8])
    return values.to(torch.int8), scales


def _with_minima(groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[out, groups, group] → values, scales and minima, of 4 bits."""
    least, greatest = _bounds(groups)
    minima = _checked(-_rounded_up(-least))
    scales = _checked(_rounded_up((greatest - minima) / _MOST[4]))
    values = (groups - minima).div_(_divisor(scales)).round_().clamp_(0, _MOST[4])
    return values.to(torch.uint8), scales, minima


def _bounds(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest of each group, [out, groups, 1]. torch's aminmax would take eight times as long."""
    return groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)


_METHODS: Final = {(8, False): _symmetric, (4, True): _with_minima}
"""By bits, and whether there are minima."""


def _grouped(weight: torch.Tensor, group: int) -> Iterator[torch.Tensor]:
    """[out, groups, group] of whole groups, then of what is left of rows."""
    full = weight.shape[1] // group
    if full or not weight.shape[1]:
        yield weight[:, : full * group].reshape(len(weight), full, group)
    if weight.shape[1] % group:
        yield weight[:, full * group :].unsqueeze(1)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[out, groups, n] of pieces → [out, n of all]."""
    flat = [part.flatten(1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """A scale of zero is of weights that all are zero, or all the minimum: any other gives the same values."""
    return scales.masked_fill(scales == 0, 1.0)


def _rounded_up(numbers: torch.Tensor) -> torch.Tensor:
    """The least float16 numbers that are not less, but for float32's own error, as float32."""
    nearest = numbers.half()
    is_less = nearest.float() < numbers - numbers.abs() * _FLOAT_ERROR
    return torch.where(is_less, torch.nextafter(nearest, torch.full_like(nearest, torch.inf)), nearest).float()


def _checked(numbers: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(numbers).all():
        raise ModelError("weights are not finite, or too large to be quantised; use spec.model.quantization: none")
    return numbers

"""Conversion of stored weights to the formats that ranks keep them in, and how much it loses.

A loss is measured at load on some rows of a matrix, whichever way it takes to its kernel: the root mean square of the
errors of the kept weights, over that of the weights as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import sqrt
from typing import Final

import torch

from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix, quantize, stacked
from hetero_worker.checkpoints.store import TensorSlice

_QUANTIZED_AT_ONCE: Final = 1 << 20
"""Weights that are widened to floats at a time while they are quantised."""
SAMPLED_ROWS: Final = 4
"""Rows of a matrix that a loss is measured on."""
_SAMPLED_MATRICES: Final = 64
"""Matrices of each pair of formats that a loss is measured on: they take some milliseconds each."""


def quantize_slice(
    floats: Callable[[TensorSlice], torch.Tensor], part: TensorSlice, weights: WeightFormat
) -> QuantizedMatrix:
    """Quantise a slice whose `floats` are read some rows at a time; a piece is used before the next is read.

    Whole groups are quantised, so that values do not depend on where the columns begin and end.
    """
    wanted, inputs = part.column_range, part.full_shape[1]
    group = weights.group or inputs
    begin, end = wanted.begin // group * group, min(-(-wanted.end // group) * group, inputs)
    whole = replace(part, columns=UnitRange(begin, end))
    matrix = stacked([quantize(floats(rows), weights) for rows in _pieces(whole)])
    return matrix.columns(UnitRange(wanted.begin - begin, wanted.end - begin))


def _pieces(part: TensorSlice) -> Iterator[TensorSlice]:
    """Cut the slice into pieces of some rows."""
    step = max(1, _QUANTIZED_AT_ONCE // max(1, part.full_shape[1]))
    begin, end = part.row_range
    for first in range(begin, max(end, begin + 1), step):
        yield replace(part, rows=UnitRange(first, min(first + step, end)))


@dataclass(slots=True)
class _Sums:
    """Sums of squares over the matrices that were looked at."""

    errors: float = 0.0
    weights: float = 0.0
    matrices: int = 0


class Conversions:
    """Pairs of formats, stored and kept, with the losses between them."""

    def __init__(self) -> None:
        """Begin with none."""
        self._sums: dict[tuple[str, str], _Sums] = {}

    def wants(self, stored: str, kept: str) -> bool:
        """Return whether one more matrix would make the pair's loss more certain."""
        return self._sums.setdefault((stored, kept), _Sums()).matrices < _SAMPLED_MATRICES

    def add(self, stored: str, kept: str, *, exact: torch.Tensor, found: torch.Tensor) -> None:
        """Count a sample of a matrix: float32 weights as they are stored, and as they are kept."""
        sums = self._sums.setdefault((stored, kept), _Sums())
        sums.errors += (found - exact).double().square().sum().item()
        sums.weights += exact.double().square().sum().item()
        sums.matrices += 1

    @property
    def lines(self) -> tuple[str, ...]:
        """Return a line for each pair, for a person."""
        return tuple(
            f"{stored} -> {kept}, loss {100 * sqrt(sums.errors / sums.weights) if sums.weights else 0:.2g} %"
            for (stored, kept), sums in sorted(self._sums.items())
        )

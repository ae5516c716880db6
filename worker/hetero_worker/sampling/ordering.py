"""The one order of vocabulary rows in which candidates, nuclei and log-probabilities agree on every layout."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from hetero_worker.sampling.token_counts import FloatArray, IdArray

_COLUMNS_PER_VALUE: Final = 4
_MIN_COLUMNS: Final = 512
"""Folds of fewer are slow: their rows are too short for vector instructions."""


def best_first(values: FloatArray, count: int) -> IdArray:
    """Indices of the `count` largest values, in the order (value descending, index ascending).

    `count` is 1 to len(values); no value is NaN. O(n) for the choice, then a sort of little more than was asked for.
    """
    floor = _floor(values, count)
    chosen = np.concatenate([np.flatnonzero(values > floor), np.flatnonzero(values == floor)[:count]])
    # What is equal stands in ascending order, and a stable sort keeps that.
    order: IdArray = chosen[np.argsort(-values[chosen], kind="stable")[:count]]
    return order


def _floor(values: FloatArray, count: int) -> float:
    """A number that at least `count` values reach, and not many more unless they equal it."""
    fold = len(values) // max(_MIN_COLUMNS, _COLUMNS_PER_VALUE * count)
    if fold < 2:
        return float(np.partition(values, len(values) - count)[len(values) - count])
    # `count` of the columns of the folded values reach it, each with its largest; their partition is a short one.
    columns = len(values) // fold
    largest = values[: fold * columns].reshape(fold, columns).max(axis=0)
    return float(np.partition(largest, columns - count)[columns - count])


def merged_order(values: npt.NDArray[np.float64], ids: npt.NDArray[np.float64]) -> IdArray:
    """Where the values stand in the order (value descending, id ascending)."""
    order: IdArray = np.lexsort((ids, -values))
    return order

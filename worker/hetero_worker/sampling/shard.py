"""A rank's side of sampling on the host: the best of its own vocabulary rows, a pair (score, id) for each draw.

A draw with filters is of what these leave of the whole vocabulary, so only a shard that is all of it makes one.
Filters and log-probabilities agree on one order (logit descending, id ascending) on every layout. Numbers travel as
float64, which holds every id and every float32 exactly.

Logits are never changed: draws that edit theirs work on a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from hetero_worker.native.compute_library import choose_op
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.sampling.device_kernels import filter_logits
from hetero_worker.sampling.edits import FloatArray
from hetero_worker.sampling.noise import IdArray, gumbel_noise
from hetero_worker.sampling.request import SamplingRow

BEST_FIELDS: Final = 2
"""Score and id."""
MAX_IDS: Final = 1 << 24
"""Native draws tell ids as float32, which has all whole numbers up to this one."""
_CHUNK_ELEMENTS: Final = 1 << 19
"""Logits whose scores are computed at a time: enough for all threads, few enough for the cache."""
_COLUMNS_PER_VALUE: Final = 4
_MIN_COLUMNS: Final = 512
"""Folds of fewer columns are slow: their rows are too short for vector instructions."""

Float64Array = npt.NDArray[np.float64]


BestDraws = Callable[[torch.Tensor, Sequence[SamplingRow], int], Float64Array]
"""`noisy_best`, or `native_best`."""


def noisy_best(logits: torch.Tensor, rows: Sequence[SamplingRow], begin: int) -> Float64Array:
    """Return the best (score, id) of each row without edits: float64 [rows, 2].

    `logits` is float32 [rows, shard rows], the first column being vocabulary row `begin`. The score is the logit, or
    where there is a temperature the scaled logit plus noise, of what filters leave: with filters, the shard must be the
    whole vocabulary. Among equal scores the lowest id wins. A score is NaN if a logit is.
    """
    best = _best(logits, begin)
    for chunk in chunks_of([i for i, row in enumerate(rows) if not row.is_greedy], logits.shape[1]):
        scaled = take_rows(logits, chunk).div_(torch.tensor([[rows[i].temperature] for i in chunk]))
        if filtered := [place for place, i in enumerate(chunk) if rows[i].is_filtered]:
            left = take_rows(scaled, filtered)
            filter_logits(left, [rows[chunk[place]] for place in filtered])
            scaled.index_copy_(0, torch.tensor(filtered), left)
        scores = gumbel_noise([rows[i].noise_key for i in chunk], begin=begin, count=logits.shape[1]).add_(scaled)
        best[chunk] = _best(scores, begin)
    return best


class RowParameters:
    """Sampling parameters of up to so many rows, where native draws read them."""

    def __init__(self, most_rows: int) -> None:
        self._temperatures = np.zeros(most_rows, dtype=np.float32)
        self._seeds = np.zeros(most_rows, dtype=np.uint64)
        self._top_k = np.zeros(most_rows, dtype=np.uint32)
        self._top_p = np.ones(most_rows)
        self._min_logs = np.full(most_rows, -np.inf)

    def fill(self, rows: Sequence[SamplingRow]) -> None:
        """Take those of the next draws."""
        count = len(rows)
        self._temperatures[:count] = [row.noise_temperature for row in rows]
        self._seeds[:count] = [row.seed for row in rows]
        self._top_k[:count] = [row.top_k for row in rows]
        self._top_p[:count] = [row.top_p for row in rows]
        self._min_logs[:count] = [math.log(row.min_p) if row.min_p > 0.0 else -math.inf for row in rows]

    def set(self, op: Any, *, is_whole: bool, first_row: int = 0) -> None:
        """Let a choose_op read them from a row on; filters only where it has the whole vocabulary."""
        for name in ("temperatures", "seeds", *(("top_k", "top_p", "min_logs") if is_whole else ())):
            setattr(op, name, getattr(self, f"_{name}")[first_row:].ctypes.data)


def native_best(op_queue: OpQueue, logits: torch.Tensor, rows: Sequence[SamplingRow], begin: int) -> Float64Array:
    """Return `noisy_best` by the native kernel: without filters the same to the last bit, many times as fast."""
    draws, columns = logits.shape
    if begin + columns > MAX_IDS:
        return noisy_best(logits, rows, begin)
    x, parameters = logits.contiguous(), RowParameters(draws)
    parameters.fill(rows)
    before = np.array([row.position - 1 for row in rows], dtype=np.int64)
    best = np.empty((draws, BEST_FIELDS), dtype=np.float32)
    op = choose_op(draws, columns, x.data_ptr(), begin, 1, 0, best.ctypes.data)
    op.positions = before.ctypes.data
    parameters.set(op, is_whole=any(row.is_filtered for row in rows))
    op.scratch = op_queue.scratch(op)
    op_queue.submit(op)
    return best.astype(np.float64)


def best_of_shard(
    logits: torch.Tensor, rows: Sequence[SamplingRow], begin: int, *, is_whole: bool, best_of: BestDraws
) -> Float64Array:
    """Return the best (score, id) of each draw, edits applied: float64 [draws, 2].

    `logits` is float32 [draws, shard rows] on the host, the first column being vocabulary row `begin`. Draws with
    filters get no meaning unless `is_whole`.
    """
    left_out = [] if is_whole else [i for i, row in enumerate(rows) if row.is_filtered]
    edited = [i for i, row in enumerate(rows) if row.edits is not None and i not in left_out]
    later = {*left_out, *edited}
    plain = [row._replace(temperature=0.0) if i in later else row for i, row in enumerate(rows)]
    best = best_of(logits, plain, begin)
    for chunk in chunks_of(edited, logits.shape[1]):
        best[chunk] = best_of(edited_logits(logits, rows, chunk, begin), [rows[i] for i in chunk], begin)
    return best


def edited_logits(logits: torch.Tensor, rows: Sequence[SamplingRow], chosen: Sequence[int], begin: int) -> torch.Tensor:
    """Return a copy of the chosen draws' logits with their edits: float32 [chosen, shard rows]."""
    copies = take_rows(logits, chosen)
    for copy, i in zip(copies.numpy(), chosen, strict=True):
        edits = rows[i].edits
        if edits is not None:
            edits.apply(copy, begin)
    return copies


def take_rows(logits: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
    """Return a copy of some rows."""
    # Several times faster than indexing with a list.
    return logits.index_select(0, torch.tensor(chosen))


def log_sum_exp(values: torch.Tensor) -> torch.Tensor:
    """Reduce the last dimension of float32 values to float64, summed in float64; -inf if all values are -inf."""
    largest = values.amax(dim=-1, keepdim=True)
    base = torch.where(largest.isneginf(), 0.0, largest)
    return (values - base).exp_().sum(dim=-1, dtype=torch.float64).log_().add_(base.squeeze(-1))


def log_sum_exp_of(values: Float64Array) -> float:
    """Reduce numbers none of which is NaN or +inf; -inf if all are."""
    largest = float(values.max())
    return largest + math.log(np.exp(values - largest).sum()) if largest > -math.inf else largest


def _best(scores: torch.Tensor, begin: int) -> Float64Array:
    """Return the largest score of each row and its id: float64 [rows, 2]."""
    # numpy's argmax takes the first of equals, as torch's does, and is many times faster.
    values = scores.numpy()
    columns = values.argmax(axis=1)
    best = np.empty((len(values), BEST_FIELDS))
    best[:, 0] = values[np.arange(len(values)), columns]
    np.add(columns, begin, out=best[:, 1])
    return best


def chunks_of(chosen: Sequence[int], shard_rows: int, *, chunk_elements: int = _CHUNK_ELEMENTS) -> Iterator[list[int]]:
    """Yield draws in groups that are computed together."""
    size = max(1, chunk_elements // shard_rows)
    for first in range(0, len(chosen), size):
        yield list(chosen[first : first + size])


def best_first(values: FloatArray, count: int) -> IdArray:
    """Return the indices of the `count` largest values, in the order (value descending, index ascending).

    `count` is 1 to len(values); no value is NaN. The choice takes O(n); then few more than `count` values are sorted.
    """
    floor = _floor(values, count)
    chosen = np.concatenate([np.flatnonzero(values > floor), np.flatnonzero(values == floor)[:count]])
    # Equal values stand in ascending order of their indices, and a stable sort keeps that.
    order: IdArray = chosen[np.argsort(-values[chosen], kind="stable")[:count]]
    return order


def _floor(values: FloatArray, count: int) -> float:
    """Return a number that at least `count` values reach, and not many more unless they equal it."""
    fold = len(values) // max(_MIN_COLUMNS, _COLUMNS_PER_VALUE * count)
    if fold < 2:
        return float(np.partition(values, len(values) - count)[len(values) - count])
    # `count` of the columns of the folded values reach it, each with its largest; their partition is a short one.
    columns = len(values) // fold
    largest = values[: fold * columns].reshape(fold, columns).max(axis=0)
    return float(np.partition(largest, columns - count)[columns - count])


def merged_order(values: npt.NDArray[np.float64], ids: npt.NDArray[np.float64]) -> IdArray:
    """Return the indices that sort by (value descending, id ascending)."""
    order: IdArray = np.lexsort((ids, -values))
    return order

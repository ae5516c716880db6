"""A rank's side of sampling on the host: the message about its own vocabulary rows.

For a draw without filters that is one pair (score, id), the best of the shard; so it is for a draw with filters where
the shard is the whole vocabulary and the native kernel applies them. Elsewhere such a draw has the shard's top
candidates in the order (scaled logit descending, id ascending), each with its noise, and the sum that decides where a
nucleus ends. Candidates, nuclei and log-probabilities agree on this one order on every layout. Numbers travel as
float64, which holds every id and every float32 exactly.

Logits are never changed: draws that edit theirs work on a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from hetero_worker.native.compute_library import choose_op
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.sampling.edits import FloatArray
from hetero_worker.sampling.noise import IdArray, gumbel_noise, gumbel_noise_at
from hetero_worker.sampling.request import SamplingRow

BEST_FIELDS: Final = 2
"""Score and id."""
MAX_IDS: Final = 1 << 24
"""Native draws tell ids as float32, which has all whole numbers up to this one."""
_HEAD_FIELDS: Final = 2
_CANDIDATE_FIELDS: Final = 3
_CHUNK_ELEMENTS: Final = 1 << 19
"""Logits whose scores are computed at a time: enough for all threads, few enough for the cache."""
_COLUMNS_PER_VALUE: Final = 4
_MIN_COLUMNS: Final = 512
"""Folds of fewer columns are slow: their rows are too short for vector instructions."""

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ShardCandidates:
    """Top rows of one shard for one draw. Each array is float64 [candidates], best first."""

    largest: float
    """Largest scaled logit; NaN if any is NaN."""
    log_sum_exp: float
    """Log of the sum of exponentials of all scaled logits of the shard; 0 for a draw without a nucleus."""
    scaled: Float64Array
    noise: Float64Array
    ids: Float64Array
    complete: bool
    """True if every row of the shard that can be drawn at all is a candidate."""

    def pack(self) -> Float64Array:
        """Return the message: float64, 1-d."""
        return np.concatenate([[self.largest, self.log_sum_exp], self.scaled, self.noise, self.ids])

    @classmethod
    def make(
        cls,
        *,
        largest: float,
        log_sum_exp: float,
        scaled: Float64Array,
        noise: Float64Array,
        ids: Float64Array,
        shard_rows: int,
    ) -> ShardCandidates:
        """Create candidates of a shard with so many rows, and see whether they are complete."""
        complete = len(scaled) == shard_rows or bool(np.isneginf(scaled[-1]))
        return cls(largest, log_sum_exp, scaled, noise, ids, complete)

    @classmethod
    def unpack(cls, packed: Float64Array, *, shard_rows: int) -> ShardCandidates:
        """Read the message of a shard with so many rows."""
        scaled, noise, ids = packed[_HEAD_FIELDS:].reshape(_CANDIDATE_FIELDS, -1)
        largest, total = packed[:_HEAD_FIELDS].tolist()
        return cls.make(largest=largest, log_sum_exp=total, scaled=scaled, noise=noise, ids=ids, shard_rows=shard_rows)

    @staticmethod
    def packed_size(candidates: int) -> int:
        """Return the number of elements of `pack()`."""
        return _HEAD_FIELDS + _CANDIDATE_FIELDS * candidates


@dataclass(frozen=True, slots=True)
class ShardDraws:
    """One shard's part of a batch of draws."""

    best: Float64Array
    """[draws, 2]: the best (score, id) of each draw; no content for draws that have candidates."""
    candidates: dict[int, ShardCandidates]
    """Candidates by draw, for draws whose filters the shard could not apply by itself."""


BestDraws = Callable[[torch.Tensor, Sequence[SamplingRow], int], Float64Array]
"""`noisy_best`, or `native_best`."""


def noisy_best(logits: torch.Tensor, rows: Sequence[SamplingRow], begin: int) -> Float64Array:
    """Return the best (score, id) of each row without filters and edits: float64 [rows, 2].

    `logits` is float32 [rows, shard rows], the first column being vocabulary row `begin`. The score is the logit, or
    where there is a temperature the scaled logit plus noise. Among equal scores the lowest id wins. A score is NaN if a
    logit is.
    """
    best = _best(logits, begin)
    for chunk in chunks_of([i for i, row in enumerate(rows) if not row.is_greedy], logits.shape[1]):
        scaled = take_rows(logits, chunk).div_(torch.tensor([[rows[i].temperature] for i in chunk]))
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

    def set(self, op: Any, *, is_whole: bool) -> None:
        """Let a choose_op read them; filters only where it has the whole vocabulary."""
        op.temperatures, op.seeds = self._temperatures.ctypes.data, self._seeds.ctypes.data
        if is_whole:
            op.top_k, op.top_p = self._top_k.ctypes.data, self._top_p.ctypes.data
            op.min_logs = self._min_logs.ctypes.data


def native_best(op_queue: OpQueue, logits: torch.Tensor, rows: Sequence[SamplingRow], begin: int) -> Float64Array:
    """Return `noisy_best` by the native kernel: the same numbers to the last bit, many times as fast.

    Draws with filters are of what these leave; `logits` must then have the whole vocabulary.
    """
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


def draws_of_shard(
    logits: torch.Tensor, rows: Sequence[SamplingRow], begin: int, *, is_whole: bool, best_of: BestDraws
) -> ShardDraws:
    """Return a shard's part of each draw; draws that have filters have candidates, unless the shard is the whole.

    `logits` is float32 [draws, shard rows] on the host, the first column being vocabulary row `begin`. With `is_whole`
    it is `best_of` that applies filters.
    """
    filtered = [] if is_whole else [i for i, row in enumerate(rows) if row.is_filtered]
    edited = [i for i, row in enumerate(rows) if row.edits is not None and i not in filtered]
    later = {*filtered, *edited}
    plain = [row._replace(temperature=0.0) if i in later else row for i, row in enumerate(rows)]
    draws = ShardDraws(best_of(logits, plain, begin), {})
    for chunk in chunks_of(edited, logits.shape[1]):
        draws.best[chunk] = best_of(edited_logits(logits, rows, chunk, begin), [rows[i] for i in chunk], begin)
    for chunk in chunks_of(filtered, logits.shape[1]):
        scaled, its = scaled_logits(logits, rows, chunk, begin), [rows[i] for i in chunk]
        draws.candidates.update(zip(chunk, candidates_of_shard(scaled, its, begin), strict=True))
    return draws


def candidates_of_shard(
    scaled: torch.Tensor, rows: Sequence[SamplingRow], begin: int, *, wants_all: bool = False
) -> list[ShardCandidates]:
    """Return the top rows of a shard for each draw, or all of them; `scaled` is from `scaled_logits`."""
    values = scaled.numpy()
    counts = [values.shape[1] if wants_all else row.num_candidates(values.shape[1]) for row in rows]
    totals = _nucleus_totals(scaled, rows)
    # NaN is the largest of all. Rank 0 refuses its draw, so the other candidates do not matter.
    largest = values.max(axis=1).tolist()
    ids = [
        np.arange(count) if math.isnan(top) else best_first(row, count)
        for row, count, top in zip(values, counts, largest, strict=True)
    ]
    noise = gumbel_noise_at([row.noise_key for row in rows], ids, begin=begin, count=values.shape[1])
    return [
        ShardCandidates.make(
            largest=largest[i],
            log_sum_exp=totals[i],
            scaled=values[i, chosen].astype(np.float64),
            noise=noise[i].astype(np.float64),
            ids=(chosen + begin).astype(np.float64),
            shard_rows=values.shape[1],
        )
        for i, chosen in enumerate(ids)
    ]


def scaled_logits(logits: torch.Tensor, rows: Sequence[SamplingRow], chosen: Sequence[int], begin: int) -> torch.Tensor:
    """Return a copy of the chosen draws' logits, edited and divided by the temperature: float32 [chosen, columns]."""
    temperatures = torch.tensor([[rows[i].temperature] for i in chosen], dtype=torch.float32)
    return edited_logits(logits, rows, chosen, begin).div_(temperatures)


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


def _nucleus_totals(scaled: torch.Tensor, rows: Sequence[SamplingRow]) -> list[float]:
    """Return log_sum_exp of each draw that takes its nucleus from the whole vocabulary, and 0 for the others."""
    totals = [0.0] * len(rows)
    needed = [i for i, row in enumerate(rows) if row.has_nucleus and not row.top_k]
    if needed:
        for i, total in zip(needed, log_sum_exp(take_rows(scaled, needed)).tolist(), strict=True):
            totals[i] = total
    return totals


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

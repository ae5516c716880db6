"""Chooses the linear kernel of a rank by timing the candidates on shapes of its own shard.

Which kernel wins depends on the CPU, the torch build and the shapes, by factors of two to five and not in a way
that a CPU's name tells. One kernel serves all row counts, so that a weight is in memory once: the candidate with
the least geometric mean over the row counts of its time relative to the fastest.

A candidate is timed with weights as it would keep them (weight_storage.py), where these are stored narrower than the
arithmetic type. If they are quantised, candidates that would have to widen them are none as long as there is another:
who asks for narrow weights wants them to fit.

Other processes load on the same host meanwhile, and a team of threads of which one must wait for its core is
slower by orders of magnitude, whatever the kernel. So one thread measures (what differs between the kernels is
how they use a core), candidates take turns, and the least of each one's times counts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from hetero_api.weight_format import FLOAT_WEIGHTS, StoredWeights, WeightFormat
from hetero_worker.layers.linear_kernels import LinearKernel, PackedWeight, TeamKernel
from hetero_worker.layers.weight_storage import FLOAT_TYPES, QuantizedKernel, kept_dtype, kept_format
from hetero_worker.memory.quantized_matrix import QuantizedMatrix

logger = logging.getLogger(__name__)

ROW_COUNTS: Final = (1, 8, 32, 256)
_MAX_WEIGHT_ELEMENTS: Final = 1 << 19
"""Of one sample weight; wider ones are cropped, which keeps a 70B model's choice as quick as a small one's."""
_TIE: Final = 1.03
"""A later candidate must be this much better than an earlier one: noise must not decide."""
_BUDGET_S: Final = 0.3
_ROUNDS: Final = range(2, 12)
"""At least and at most so many turns; the budget decides between."""

Trial = Callable[[], None]
Measure = Callable[[Sequence[Trial]], Sequence[float]]
"""Seconds of each trial."""


def least_times(trials: Sequence[Trial]) -> list[float]:
    """The least time of each trial over some turns."""
    for trial in trials:
        trial()
    times = [math.inf] * len(trials)
    begin = time.perf_counter()
    for turn in range(_ROUNDS.stop):
        if turn >= _ROUNDS.start and time.perf_counter() - begin > _BUDGET_S:
            break
        for i, trial in enumerate(trials):
            start = time.perf_counter()
            trial()
            times[i] = min(times[i], time.perf_counter() - start)
    return times


def choose_kernel(
    candidates: Sequence[LinearKernel],
    shapes: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype,
    stored: StoredWeights = FLOAT_WEIGHTS,
    measure: Measure = least_times,
) -> LinearKernel:
    """The best candidate for weights of the given (out, in) shapes; the first when there is nothing to time."""
    candidates = [kernel for kernel in candidates if kept_format(stored.layers, kernel)] or candidates
    samples = sorted({_cropped(shape) for shape in shapes})
    if len(candidates) == 1 or not samples:
        return candidates[0]
    with torch.inference_mode(), _one_thread():
        trials = [trial for kernel in candidates for trial in _trials(kernel, samples, dtype, stored)]
        times = measure(trials)
    columns = len(ROW_COUNTS)
    table = [times[i * columns : (i + 1) * columns] for i in range(len(candidates))]
    scores = [_score(row, table) for row in table]
    best = 0
    for i, score in enumerate(scores):
        if score * _TIE < scores[best]:
            best = i
    logger.info(
        "linear kernel %s chosen for %s; ms at %s rows: %s",
        candidates[best].name,
        dtype,
        ROW_COUNTS,
        {kernel.name: [round(t * 1e3, 3) for t in row] for kernel, row in zip(candidates, table, strict=True)},
    )
    return candidates[best]


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _trials(
    kernel: LinearKernel, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, stored: StoredWeights
) -> list[Trial]:
    """One pass through all sample weights for each row count."""
    if isinstance(kernel, TeamKernel):
        kernel = kernel.single_threaded()
    weights = [_packed(kernel, shape, dtype, stored) for shape in shapes]

    def trial(rows: int) -> Trial:
        inputs = [torch.full((rows, in_features), 0.5, dtype=dtype) for _, in_features in shapes]
        return lambda: _pass(weights, inputs)

    return [trial(rows) for rows in ROW_COUNTS]


def _packed(kernel: LinearKernel, shape: tuple[int, int], dtype: torch.dtype, stored: StoredWeights) -> PackedWeight:
    weights = kept_format(stored.layers, kernel)
    if weights is not None and isinstance(kernel, QuantizedKernel):
        return kernel.pack_quantized(_quantized(shape, weights))
    kept = kept_dtype(FLOAT_TYPES.get(stored.floats, dtype), dtype, kernel)
    return kernel.pack(torch.full(shape, 0.01, dtype=kept))


def _quantized(shape: tuple[int, int], weights: WeightFormat) -> QuantizedMatrix:
    outputs, inputs = shape
    values = torch.ones(shape, dtype=torch.int8 if weights.bits == 8 else torch.uint8)
    scales = torch.full((outputs, weights.groups(inputs)), 0.01)
    return QuantizedMatrix(weights, values, scales, scales if weights.has_minimum else None)


def _pass(weights: Sequence[PackedWeight], inputs: Sequence[torch.Tensor]) -> None:
    for weight, x in zip(weights, inputs, strict=True):
        weight(x, None)


def _score(row: Sequence[float], table: Sequence[Sequence[float]]) -> float:
    """Geometric mean of a candidate's times relative to the fastest of each column."""
    ratios = [own / min(column) for own, column in zip(row, zip(*table, strict=True), strict=True)]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _cropped(shape: tuple[int, int]) -> tuple[int, int]:
    out_features, in_features = shape
    return min(out_features, max(64, _MAX_WEIGHT_ELEMENTS // in_features)), in_features

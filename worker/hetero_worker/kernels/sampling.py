"""Noise and the best of a row where the logits are: Philox4x64-10 and Gumbel noise in one pass over the logits.

Noise is made of integers, so its words are those of `sampling.noise` to the bit. The logarithm and the quotient that
follow are float32 and may differ from the host's in the last bits.

A program works on `block_size` counters of one draw, eight vocabulary rows each. Its result depends on its own logits
only, so a draw is the same to the bit in any batch.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hetero_worker.sampling.device_kernels import Best
from hetero_worker.sampling.noise import (
    COARSE,
    FRACTION_KEY,
    KEY_STEPS,
    MULTIPLIERS,
    ROUNDS,
    ROWS_PER_COUNTER,
    TO_UNIFORM,
)

_BLOCK: Final = 256

_ROUNDS: tl.constexpr = tl.constexpr(ROUNDS)
_MULTIPLIER_A: tl.constexpr = tl.constexpr(MULTIPLIERS[0])
_MULTIPLIER_C: tl.constexpr = tl.constexpr(MULTIPLIERS[1])
_STEP_A: tl.constexpr = tl.constexpr(KEY_STEPS[0])
_STEP_C: tl.constexpr = tl.constexpr(KEY_STEPS[1])
_ROWS: tl.constexpr = tl.constexpr(ROWS_PER_COUNTER)
_COARSE: tl.constexpr = tl.constexpr(COARSE)
_TO_UNIFORM: tl.constexpr = tl.constexpr(TO_UNIFORM)
_FRACTION_KEY: tl.constexpr = tl.constexpr(FRACTION_KEY)
_TO_FRACTION: tl.constexpr = tl.constexpr(2.0**-64)
_SMALL: tl.constexpr = tl.constexpr(0.0625)
"""Below this uniform number the logarithm of 1 minus it loses too many bits."""
_NOWHERE: tl.constexpr = tl.constexpr(2**62)


class TritonSamplingKernels:
    """Implements sampling.device_kernels.SamplingKernels."""

    name = "triton"

    def noisy_best(
        self, logits: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, begin: int
    ) -> Best:
        """As SamplingKernels.noisy_best."""
        count, draws = logits.shape[1], len(rows)
        counters = -(-(begin + count) // ROWS_PER_COUNTER) - begin // ROWS_PER_COUNTER
        num_blocks = triton.cdiv(counters, _BLOCK)
        best = torch.empty((draws, num_blocks), dtype=torch.float32, device=logits.device)
        ids = torch.empty_like(best, dtype=torch.int64)
        _best_kernel[(draws, num_blocks)](
            *(logits, logits.stride(0), rows, keys, temperatures, best, ids, begin, count),
            block_size=_BLOCK,
            enable_fp_fusion=False,  # 1 - u is that of the rounded u, however near to 1
        )
        scores, winner = best.max(dim=1)  # the first of equals, which has the lowest id
        return Best(scores, ids.gather(1, winner.unsqueeze(1)).squeeze(1))


@triton.jit
def _philox(counters, seed, position):  # type: ignore[no-untyped-def]
    """Return four uint64 words of each counter; seed and position are uint64 scalars."""
    a = (counters + 1).to(tl.uint64)
    b = a ^ a
    c = b
    d = b
    factor_a = b + _MULTIPLIER_A
    factor_c = b + _MULTIPLIER_C
    step_a = b + _STEP_A
    step_c = b + _STEP_C
    key_a = b + seed
    key_c = b + position
    for _ in tl.static_range(_ROUNDS):
        high_a = tl.umulhi(a, factor_a)
        low_a = a * factor_a
        high_c = tl.umulhi(c, factor_c)
        low_c = c * factor_c
        a = high_c ^ b ^ key_a
        b = low_c
        c = high_a ^ d ^ key_c
        d = low_a
        key_a = key_a + step_a
        key_c = key_c + step_c
    return a, b, c, d


@triton.jit
def gumbel_noise(words, ids, seed, position):  # type: ignore[no-untyped-def]
    """Return Gumbel noise of words that are below 2^32, of vocabulary rows `ids`; see `sampling.noise`."""
    numbers = words.to(tl.float32) + 0.5
    is_coarse = words < _COARSE
    if tl.max(is_coarse.to(tl.int32), axis=0) > 0:  # one block in thousands
        bits, _, _, _ = _philox(ids, seed, position | (position ^ position) + _FRACTION_KEY)
        fraction = (bits.to(tl.float64) + 0.5) * _TO_FRACTION
        numbers = tl.where(is_coarse, (words.to(tl.float64) + fraction).to(tl.float32), numbers)
    u = numbers * _TO_UNIFORM
    # -log(1 - u): by its series where u is small.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u / 7))))))
    surprise = tl.where(u < _SMALL, series, -tl.log(tl.where(u < _SMALL, 0.5, 1 - u)))
    return -tl.log(surprise)


@triton.jit
def _consider(words, columns, row, temperature, seed, position, begin, count, best, ids):  # type: ignore[no-untyped-def]
    """Return the best score of each lane and its row, after one more row."""
    inside = (columns >= 0) & (columns < count)
    logits = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    scores = logits / temperature + gumbel_noise(words, columns + begin, seed, position)
    # A maximum may drop NaN, so it becomes infinite, which is refused as well.
    scores = tl.where(scores == scores, scores, float("inf"))
    scores = tl.where(inside, scores, float("-inf"))
    ids = tl.where(scores > best, columns + begin, ids)
    best = tl.maximum(best, scores)
    return best, ids


@triton.jit
def _best_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, rows, keys, temperatures, out_best, out_ids, begin, count, block_size: tl.constexpr
):
    draw = tl.program_id(0)
    block = tl.program_id(1)
    row = logits + tl.load(rows + draw) * row_stride
    temperature = tl.load(temperatures + draw)
    seed = tl.load(keys + 2 * draw).to(tl.uint64, bitcast=True)
    position = tl.load(keys + 2 * draw + 1).to(tl.uint64, bitcast=True)
    counters = (begin // _ROWS + block * block_size + tl.arange(0, block_size)).to(tl.int64)
    a, b, c, d = _philox(counters, seed, position)
    first = counters * _ROWS - begin
    best = tl.full([block_size], float("-inf"), tl.float32)
    ids = tl.maximum(first, 0) + begin
    for lane in tl.static_range(_ROWS):
        pair = a if lane < 2 else (b if lane < 4 else (c if lane < 6 else d))
        words = pair & 0xFFFFFFFF if lane % 2 == 0 else pair >> 32
        best, ids = _consider(words, first + lane, row, temperature, seed, position, begin, count, best, ids)
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top, ids, _NOWHERE), axis=0)
    place = draw * tl.num_programs(1) + block
    tl.store(out_best + place, top)
    tl.store(out_ids + place, winner)

"""Draws where the logits are: Philox4x64-10, Gumbel noise and the best of a row, in one pass over the logits.

Noise is made of integers, so its words are those of `sampling.noise` to the bit. What is computed of them here in
float32 (a logarithm, a quotient) is not, and need not be: it only finds the row that can win and how near the next one
comes, and the host says of the few numbers whether that proves the draw (`sampling.device_draws`).

A program works on `block_size` counters of one draw, eight vocabulary rows each; what one program finds depends on its
own logits only, so that a draw is the same to the bit in any batch.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hetero_worker.sampling.device_scores import Contest
from hetero_worker.sampling.noise import COARSE, TO_UNIFORM
from hetero_worker.sampling.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, ROWS_PER_COUNTER

_BLOCK: Final = 256
_WORDS_BLOCK: Final = 128

_ROUNDS: tl.constexpr = tl.constexpr(ROUNDS)
_MULTIPLIER_A: tl.constexpr = tl.constexpr(MULTIPLIERS[0])
_MULTIPLIER_C: tl.constexpr = tl.constexpr(MULTIPLIERS[1])
_STEP_A: tl.constexpr = tl.constexpr(KEY_STEPS[0])
_STEP_C: tl.constexpr = tl.constexpr(KEY_STEPS[1])
_ROWS: tl.constexpr = tl.constexpr(ROWS_PER_COUNTER)
_COARSE: tl.constexpr = tl.constexpr(COARSE)
_TO_UNIFORM: tl.constexpr = tl.constexpr(TO_UNIFORM)
_SMALL: tl.constexpr = tl.constexpr(0.0625)
"""Uniform numbers below: 1 less one of them loses too many of its bits."""
_NOWHERE: tl.constexpr = tl.constexpr(2**62)


class TritonDrawKernels:
    """Implements sampling.device_scores.DrawKernels."""

    name = "triton"

    def contest(
        self, logits: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, begin: int
    ) -> Contest:
        count, draws = logits.shape[1], len(rows)
        counters = -(-(begin + count) // ROWS_PER_COUNTER) - begin // ROWS_PER_COUNTER
        num_blocks = triton.cdiv(counters, _BLOCK)
        best = torch.empty((draws, num_blocks), dtype=torch.float32, device=logits.device)
        ids, second = torch.empty_like(best, dtype=torch.int64), torch.empty_like(best)
        _contest_kernel[(draws, num_blocks)](
            *(logits, logits.stride(0), rows, keys, temperatures, best, ids, second, begin, count),
            block_size=_BLOCK,
            enable_fp_fusion=False,  # 1 - u is that of the rounded u, however near to 1
        )
        return _over_blocks(best, ids, second)

    def words_at(self, keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        words = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
        draws, n = ids.shape
        grid = (draws, triton.cdiv(n, _WORDS_BLOCK))
        _words_kernel[grid](keys, ids, ids.stride(0), words, n, block_size=_WORDS_BLOCK)
        return words


def _over_blocks(best: torch.Tensor, ids: torch.Tensor, second: torch.Tensor) -> Contest:
    """Of all blocks: the best, and what comes next to it in its own block or is another block's best."""
    winner = best.argmax(dim=1, keepdim=True)
    rivals = best.scatter(1, winner, second.gather(1, winner))
    return Contest(ids.gather(1, winner).squeeze(1), rivals.amax(dim=1))


@triton.jit
def _philox(counters, seed, position):  # type: ignore[no-untyped-def]
    """Four uint64 words of each counter; seed and position are uint64 scalars."""
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
def upper_noise(words):  # type: ignore[no-untyped-def]
    """Gumbel noise of words that are below 2^32; of coarse ones the largest that their fraction can make it."""
    numbers = words.to(tl.float32) + tl.where(words < _COARSE, 0.0, 0.5)
    u = numbers * _TO_UNIFORM
    # -log(1 - u): by its series where u is small.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u / 7))))))
    surprise = tl.where(u < _SMALL, series, -tl.log(tl.where(u < _SMALL, 0.5, 1 - u)))
    return tl.where(surprise > 0, -tl.log(tl.where(surprise > 0, surprise, 1.0)), float("inf"))


@triton.jit
def _consider(words, columns, row, temperature, begin, count, best, ids, second):  # type: ignore[no-untyped-def]
    """Best score, its row and the second best of each lane, with one more row considered."""
    inside = (columns >= 0) & (columns < count)
    logits = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    scores = logits / temperature + upper_noise(words)
    # What is no number must not go unseen by a maximum.
    scores = tl.where(scores == scores, scores, float("inf"))
    scores = tl.where(inside, scores, float("-inf"))
    second = tl.maximum(second, tl.minimum(scores, best))
    ids = tl.where(scores > best, columns + begin, ids)
    best = tl.maximum(best, scores)
    return best, ids, second


@triton.jit
def _contest_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, rows, keys, temperatures, out_best, out_ids, out_second, begin, count, block_size: tl.constexpr
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
    second = tl.full([block_size], float("-inf"), tl.float32)
    ids = first * 0 + begin
    best, ids, second = _consider(a & 0xFFFFFFFF, first, row, temperature, begin, count, best, ids, second)
    best, ids, second = _consider(a >> 32, first + 1, row, temperature, begin, count, best, ids, second)
    best, ids, second = _consider(b & 0xFFFFFFFF, first + 2, row, temperature, begin, count, best, ids, second)
    best, ids, second = _consider(b >> 32, first + 3, row, temperature, begin, count, best, ids, second)
    best, ids, second = _consider(c & 0xFFFFFFFF, first + 4, row, temperature, begin, count, best, ids, second)
    best, ids, second = _consider(c >> 32, first + 5, row, temperature, begin, count, best, ids, second)
    best, ids, second = _consider(d & 0xFFFFFFFF, first + 6, row, temperature, begin, count, best, ids, second)
    best, ids, second = _consider(d >> 32, first + 7, row, temperature, begin, count, best, ids, second)
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top, ids, _NOWHERE), axis=0)
    rival = tl.max(tl.where(ids == winner, second, best), axis=0)
    place = draw * tl.num_programs(1) + block
    tl.store(out_best + place, top)
    tl.store(out_ids + place, winner)
    tl.store(out_second + place, rival)


@triton.jit
def _words_kernel(keys, ids, ids_stride, out, n, block_size: tl.constexpr):  # type: ignore[no-untyped-def]
    draw = tl.program_id(0)
    places = tl.program_id(1) * block_size + tl.arange(0, block_size)
    inside = places < n
    seed = tl.load(keys + 2 * draw).to(tl.uint64, bitcast=True)
    position = tl.load(keys + 2 * draw + 1).to(tl.uint64, bitcast=True)
    own = tl.load(ids + draw * ids_stride + places, mask=inside, other=0)
    a, b, c, d = _philox(own // _ROWS, seed, position)
    lane = own % _ROWS
    word = tl.where(lane < 4, tl.where(lane < 2, a, b), tl.where(lane < 6, c, d))
    half = tl.where(lane % 2 == 0, word & 0xFFFFFFFF, word >> 32)
    tl.store(out + draw * n + places, half.to(tl.int64), mask=inside)

"""Counter-based noise: the same number for (seed, position, vocabulary row) on any rank, in any batch, at any time.

A sampled token is the argmax of scaled logit + Gumbel noise. This is the Gumbel-max trick: exactly a draw from the
softmax. The noise of a row comes from Philox4x64-10 keyed by the request's seed and the position of the drawn token.
The counter is the vocabulary row; one counter serves eight rows with 32 bits each. A rank therefore computes the noise
of its own rows only, and a token does not depend on the batch, on the layout of ranks, or on a restart.

Large noise, which decides, comes from uniform numbers near 0. There 32 bits are coarse: a token of probability 1e-10
would never be drawn. Words below COARSE get a fraction of 64 more bits; one draw in hundreds has such a word.

Two implementations give the same bits: numpy's generator on the host, and torch operators wherever a tensor lies. torch
has no unsigned 64-bit arithmetic, so its words are kept in int64. Sums and products wrap as unsigned ones do, and the
upper half of a product is put together from halves of 32 bits (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", 2011).

Logarithms are steps of float32 in a fixed order, products rounded before they are added, so that all host ranks draw
alike: `native/compute/noise.h` follows the same rule. On a GPU one kernel of `kernels.sampling` replaces these hundred
operators; its logarithms round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

IdArray = npt.NDArray[np.int64]

ROWS_PER_COUNTER: Final = 8
COARSE: Final = 256
"""Words below get a fraction."""
FRACTION_KEY: Final = 1 << 63
"""Set in the position, which no sequence reaches, it keys the stream of fractions."""
TO_UNIFORM: Final = 2.0**-32 * (1 - 2.0**-24)
"""Factor that brings words, the largest of which float32 rounds to 2^32, into (0, 1)."""
ROUNDS: Final = 10
MULTIPLIERS: Final = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS: Final = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOG_FACTORS: Final = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
"""Of the logarithm's polynomial, the highest power's first."""
_HALF: Final = 32
_HALF_MASK: Final = (1 << _HALF) - 1


class NoiseKey(NamedTuple):
    """Key of a draw's noise: unsigned 64-bit numbers, the position below 2^63."""

    seed: int
    position: int


# --- on the host, with numpy's generator -----------------------------------------------------------------


def gumbel_noise(keys: Sequence[NoiseKey], *, begin: int, count: int) -> torch.Tensor:
    """Return standard Gumbel noise of vocabulary rows [begin, begin + count): float32 [keys, count]."""
    numbers = np.empty((len(keys), count), dtype=np.float32)
    for row, key in zip(numbers, keys, strict=True):
        row[:] = _uniform(_draw_words(key, begin, count), key, begin)
    return _to_gumbel(torch.from_numpy(numbers))


def _draw_words(key: NoiseKey, begin: int, count: int) -> npt.NDArray[np.uint32]:
    counter, skip = divmod(begin, ROWS_PER_COUNTER)
    bits = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=counter).random_raw(-(-(skip + count) // 2))
    return bits.view(np.uint32)[skip : skip + count]


def _uniform(words: npt.NDArray[np.uint32], key: NoiseKey, begin: int) -> npt.NDArray[np.float32]:
    """Return numbers between 0 and 2^32, a word and a fraction each, of the rows from `begin` on."""
    numbers = words.astype(np.float32)
    numbers += np.float32(0.5)
    if len(words) and words.min() < COARSE:
        coarse = np.flatnonzero(words < COARSE)
        numbers[coarse] = words[coarse] + np.array([_fraction(key, row) for row in (begin + coarse).tolist()])
    return numbers


def _fraction(key: NoiseKey, row: int) -> float:
    """Return a uniform number in (0, 1), made of 64 bits of the row's own."""
    own = np.array([key.seed, key.position | FRACTION_KEY], dtype=np.uint64)
    return (int(np.random.Philox(key=own, counter=row).random_raw()) + 0.5) * 2.0**-64


# --- wherever a tensor lies, with torch's operators -------------------------------------------------------


def key_tensor(keys: Sequence[NoiseKey]) -> torch.Tensor:
    """Return the keys' bits: int64 [keys, 2], seed and position."""
    return torch.from_numpy(np.array(keys, dtype=np.uint64).reshape(-1, 2).view(np.int64))


def noise_of_range(keys: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    """Return `gumbel_noise` where the keys lie: float32 [keys, count], of `key_tensor`'s int64 [keys, 2]."""
    ids = torch.arange(begin, begin + count, device=keys.device).expand(len(keys), -1)
    return _noise_of_words(keys, ids, words_of_range(keys, begin, count))


def words_of_range(keys: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    """Return the words of vocabulary rows [begin, begin + count): int64 [keys, count]."""
    first, skip = divmod(begin, ROWS_PER_COUNTER)
    end = -(-(begin + count) // ROWS_PER_COUNTER)
    counters = torch.arange(first, end, device=keys.device).expand(len(keys), -1)
    blocks = _philox(keys, counters)
    halves = torch.stack([blocks & _HALF_MASK, (blocks >> _HALF) & _HALF_MASK], dim=-1)
    return halves.view(len(keys), -1)[:, skip : skip + count]


def _noise_of_words(keys: torch.Tensor, ids: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise. On a GPU this waits for the device, to learn which words are coarse."""
    numbers = words.float().add_(0.5)
    draws, places = (words < COARSE).nonzero(as_tuple=True)
    exact = words[draws, places].double() + _fractions(keys[draws], ids[draws, places])
    numbers[draws, places] = exact.float()
    return _to_gumbel(numbers)


def _fractions(keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `_fraction` of each pair of key and row: float64 [rows]."""
    own = torch.stack([keys[:, 0], keys[:, 1] | _signed(FRACTION_KEY)], dim=1)
    bits = _philox(own, rows.unsqueeze(1))[:, 0, 0]
    whole = (bits >> _HALF & _HALF_MASK).double() * 2.0**_HALF + (bits & _HALF_MASK).double()
    return (whole + 0.5) * 2.0**-64


def _philox(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Return four words of 64 bits a counter: int64 [keys, n, 4]. Like numpy, count on before the first draw."""
    first, second = keys[:, :1], keys[:, 1:]
    a, b = counters + 1, torch.zeros_like(counters)
    c, d = b, b
    for _ in range(ROUNDS):
        high_a, low_a = _product(a, MULTIPLIERS[0])
        high_c, low_c = _product(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = first + _signed(KEY_STEPS[0]), second + _signed(KEY_STEPS[1])
    return torch.stack([a, b, c, d], dim=-1)


def _product(values: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and lower 64 bits of unsigned products."""
    high, low = values >> _HALF & _HALF_MASK, values & _HALF_MASK
    factor_high, factor_low = factor >> _HALF, factor & _HALF_MASK
    middle = high * factor_low + (low * factor_low >> _HALF & _HALF_MASK)
    other = low * factor_high + (middle & _HALF_MASK)
    upper = high * factor_high + (middle >> _HALF & _HALF_MASK) + (other >> _HALF & _HALF_MASK)
    return upper, values * _signed(factor)


def _signed(bits: int) -> int:
    """Return the int64 that has an unsigned number's bits."""
    return bits - (1 << 64) if bits >> 63 else bits


def _to_gumbel(numbers: torch.Tensor) -> torch.Tensor:
    """Return -log(-log(1 - number / 2^32))."""
    minus_u = numbers * -TO_UNIFORM
    return _log(_log(minus_u + 1.0, near=minus_u).neg_()).neg_()


def _log(x: torch.Tensor, *, near: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logarithm of normal positive numbers; where it is small, of 1 + `near`, which is x before rounding.

    With x = 2^n (1 + f) and |f| < 0.42 it is f - f^2/2 + f^3 p(f) + n ln 2 (Cephes' logf).
    """
    bits = x.view(torch.int32)
    twos = (bits - 0x3F3504F3) >> 23  # the bits of 1 / √2
    f = (bits - (twos << 23)).view(torch.float32) - 1.0
    if near is not None:
        f = torch.where(twos == 0, near, f)
    p = f * _LOG_FACTORS[0]
    for factor in _LOG_FACTORS[1:-1]:
        p = p.add_(factor).mul_(f)
    n, square = twos.float(), f * f
    rest = p.add_(_LOG_FACTORS[-1]).mul_(f * square).sub_(n * 2.12194440e-4).sub_(square * 0.5)
    return rest.add_(f).add_(n * 0.693359375)  # and what that exceeds ln 2 by, above

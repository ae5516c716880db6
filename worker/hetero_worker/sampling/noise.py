"""Counter-based noise: the same number for (seed, position, vocabulary row), wherever and whenever it is drawn.

A sampled token is the argmax of scaled logit + Gumbel noise (the Gumbel-max trick: exactly a draw from the
softmax). The noise of a row comes from Philox4x64 keyed by the request's seed and the position of the token that
is drawn; the counter is the vocabulary row (eight rows of 32 bits a counter). So a rank draws the noise of its
own rows only, and the token does not depend on the batch, the layout of ranks, or on a restart.

Large noise, which decides, comes from uniform numbers near 0. There 32 bits are coarse (a token of probability
1e-10 would never be drawn), so words below COARSE get a fraction of 64 more bits; one draw in hundreds has any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

IdArray = npt.NDArray[np.int64]

_ROWS_PER_COUNTER: Final = 8
COARSE: Final = 256
_FRACTIONS: Final = 1 << 63
"""Set in the position, which no sequence reaches, it keys the stream of fractions."""
TO_UNIFORM: Final = 2.0**-32 * (1 - 2.0**-24)
"""Brings words, the largest of which float32 rounds to 2^32, into (0, 1)."""


class NoiseKey(NamedTuple):
    """What a draw's noise depends on, besides the vocabulary row; unsigned 64-bit numbers, position below 2^63."""

    seed: int
    position: int


def gumbel_noise(keys: Sequence[NoiseKey], *, begin: int, count: int) -> torch.Tensor:
    """Standard Gumbel noise of vocabulary rows [begin, begin + count) for each key: float32 [keys, count]."""
    numbers = np.empty((len(keys), count), dtype=np.float32)
    for row, key in zip(numbers, keys, strict=True):
        row[:] = _uniform(_draw_words(key, begin, count), key, begin)
    return to_gumbel(torch.from_numpy(numbers))


def gumbel_noise_at(
    keys: Sequence[NoiseKey], rows: Sequence[IdArray], *, begin: int, count: int
) -> list[npt.NDArray[np.float32]]:
    """The noise of rows chosen for each key, out of [begin, begin + count) and given relative to begin."""
    numbers = [
        _uniform(_draw_words(key, begin, count)[chosen], key, begin, chosen)
        for key, chosen in zip(keys, rows, strict=True)
    ]
    noise = to_gumbel(torch.from_numpy(np.concatenate(numbers))).numpy()
    return np.split(noise, np.cumsum([len(chosen) for chosen in rows[:-1]]))


def gumbel_of_words(keys: Sequence[NoiseKey], ids: IdArray, words: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The noise of vocabulary rows whose words are known: float32 [keys, n], of `ids` and `words` [keys, n]."""
    numbers = words.astype(np.float32)
    numbers += np.float32(0.5)
    for draw, place in np.argwhere(words < COARSE).tolist():
        numbers[draw, place] = int(words[draw, place]) + _fraction(keys[draw], int(ids[draw, place]))
    noise: npt.NDArray[np.float32] = to_gumbel(torch.from_numpy(numbers)).numpy()
    return noise


def _draw_words(key: NoiseKey, begin: int, count: int) -> npt.NDArray[np.uint32]:
    counter, skip = divmod(begin, _ROWS_PER_COUNTER)
    bits = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=counter).random_raw(-(-(skip + count) // 2))
    return bits.view(np.uint32)[skip : skip + count]


def _uniform(
    words: npt.NDArray[np.uint32], key: NoiseKey, begin: int, chosen: IdArray | None = None
) -> npt.NDArray[np.float32]:
    """Numbers between 0 and 2^32 of the rows begin + chosen, or of all from begin on: a word and a fraction."""
    numbers = words.astype(np.float32)
    numbers += np.float32(0.5)
    if len(words) and words.min() < COARSE:
        coarse = np.flatnonzero(words < COARSE)
        rows = begin + (coarse if chosen is None else chosen[coarse])
        numbers[coarse] = words[coarse] + np.array([_fraction(key, row) for row in rows.tolist()])
    return numbers


def _fraction(key: NoiseKey, row: int) -> float:
    """Uniform in (0, 1), of the row's own 64 bits."""
    own = np.array([key.seed, key.position | _FRACTIONS], dtype=np.uint64)
    return (int(np.random.Philox(key=own, counter=row).random_raw()) + 0.5) * 2.0**-64


def to_gumbel(numbers: torch.Tensor) -> torch.Tensor:
    """-log(-log(1 - number / 2^32)), in place."""
    return numbers.mul_(-TO_UNIFORM).log1p_().neg_().log_().neg_()

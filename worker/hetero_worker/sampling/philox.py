"""The words of `sampling.noise`, by torch operators: wherever a tensor lies, the same bits as numpy's Philox4x64-10.

torch has no unsigned 64-bit arithmetic, so words are kept in int64 by their bits: sums and products wrap as unsigned
ones do, and the upper half of a product is put together from halves of 32 bits (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011, for the rounds).

Some hundred elementwise operators whatever the size: on a GPU the kernel of `kernels.sampling` does all of it at once.
"""

from __future__ import annotations

from typing import Final

import torch

ROWS_PER_COUNTER: Final = 8
ROUNDS: Final = 10
MULTIPLIERS: Final = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS: Final = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_HALF: Final = 32
_HALF_MASK: Final = (1 << _HALF) - 1


def words_at(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The word of each vocabulary row, 0 to 2^32 - 1: int64 [draws, n], of `ids` int64 [draws, n].

    `keys` is int64 [draws, 2], seed and position by their bits.
    """
    blocks = _philox(keys, ids // ROWS_PER_COUNTER)
    lane = ids % ROWS_PER_COUNTER
    word = blocks.gather(-1, (lane // 2).unsqueeze(-1)).squeeze(-1)
    return torch.where(lane % 2 == 0, word, word >> _HALF) & _HALF_MASK


def words_of_range(keys: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    """The words of vocabulary rows [begin, begin + count): int64 [draws, count]."""
    first, skip = divmod(begin, ROWS_PER_COUNTER)
    end = -(-(begin + count) // ROWS_PER_COUNTER)
    counters = torch.arange(first, end, device=keys.device).expand(len(keys), -1)
    blocks = _philox(keys, counters)
    halves = torch.stack([blocks & _HALF_MASK, (blocks >> _HALF) & _HALF_MASK], dim=-1)
    return halves.view(len(keys), -1)[:, skip : skip + count]


def _philox(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Four words of 64 bits a counter: int64 [draws, n, 4]. numpy counts on before it draws, and so does this."""
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
    """Upper and lower 64 bits of unsigned products."""
    high, low = values >> _HALF & _HALF_MASK, values & _HALF_MASK
    factor_high, factor_low = factor >> _HALF, factor & _HALF_MASK
    middle = high * factor_low + (low * factor_low >> _HALF & _HALF_MASK)
    other = low * factor_high + (middle & _HALF_MASK)
    upper = high * factor_high + (middle >> _HALF & _HALF_MASK) + (other >> _HALF & _HALF_MASK)
    return upper, values * _signed(factor)


def _signed(bits: int) -> int:
    """The int64 of an unsigned number's bits."""
    return bits - (1 << 64) if bits >> 63 else bits

"""Whole units dealt by weight: largest remainder, and levels that even out what is owned already.

Exact arithmetic throughout: weights are floats, quotas are fractions, so the same weights give the same counts on
every machine. Ties go to the lower rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

Weight = int | float | Fraction


def largest_remainder(units: int, weights: Sequence[Weight]) -> list[int]:
    """Counts that add up to `units`, each its quota rounded down or up; a weight of 0 gets 0.

    Hamilton's method: quotas rounded down, then one more to those with the largest fractions. The sum of the weights
    must not be 0.
    """
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    quotas = [units * weight / total for weight in exact]
    counts = [int(quota) for quota in quotas]
    by_fraction = sorted(range(len(quotas)), key=lambda rank: (counts[rank] - quotas[rank], rank))
    for rank in by_fraction[: units - sum(counts)]:
        counts[rank] += 1
    return counts


def level_up(amount: int, *, owned: Sequence[int], weights: Sequence[Weight]) -> list[Fraction]:
    """Parts of `amount`, one a rank, that bring what each owns as near to its weight as adding can.

    Those that own more than their share get nothing; the others end at one level, i.e. the same ratio of owned plus
    given to weight. `amount` and `owned` are of one unit; weights must be more than 0.
    """
    exact = [Fraction(weight) for weight in weights]
    below = list(range(len(exact)))
    while True:
        level = Fraction(amount + sum(owned[rank] for rank in below)) / sum(exact[rank] for rank in below)
        still_below = [rank for rank in below if exact[rank] * level >= owned[rank]]
        if still_below == below:
            break
        below = still_below
    return [exact[rank] * level - owned[rank] if rank in below else Fraction(0) for rank in range(len(exact))]

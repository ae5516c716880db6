"""Noise is Gumbel, and a function of seed, position and vocabulary row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_worker.sampling import noise
from hetero_worker.sampling.noise import NoiseKey, gumbel_noise

pytestmark = pytest.mark.unit

KEYS = [NoiseKey(2**64 - 1, 3), NoiseKey(0, 0), NoiseKey(7, 2**31)]


@pytest.mark.parametrize(("begin", "count"), [(0, 1), (64, 64), (63, 5), (130, 70), (199, 1), (8, 0)])
def test_a_shard_draws_the_noise_of_its_own_rows(begin: int, count: int) -> None:
    whole = gumbel_noise(KEYS, begin=0, count=200)
    assert torch.equal(gumbel_noise(KEYS, begin=begin, count=count), whole[:, begin : begin + count])


def test_a_fraction_changes_coarse_words_by_less_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every word taken as coarse, noise differs from the usual only where words are small, and there little."""
    usual = gumbel_noise(KEYS, begin=0, count=50_000)
    monkeypatch.setattr(noise, "COARSE", 2**32)
    refined = gumbel_noise(KEYS, begin=0, count=50_000)
    assert not torch.equal(refined, usual)
    assert float((refined - usual).abs().max()) < 0.01


def test_the_smallest_and_largest_words_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], dtype=np.uint32)
    monkeypatch.setattr(noise, "_draw_words", lambda key, begin, count: extremes)
    drawn = gumbel_noise(KEYS[:1], begin=0, count=5)[0]
    assert bool(drawn.isfinite().all())
    assert drawn.tolist() == sorted(drawn.tolist(), reverse=True)


def test_noise_is_as_exact_as_float32_can_tell() -> None:
    """Of words of all sizes, with fractions, and of noise near 0."""
    random = np.random.default_rng(1)
    numbers = np.concatenate([
        np.exp2(random.uniform(-65, 32, 200_000)), 2.0**32 * random.uniform(0, 1, 200_000), [2.0**-65, 2.0**31, 2.0**32]
    ]).astype(np.float32)  # fmt: skip
    uniform = (numbers * np.float32(noise.TO_UNIFORM)).astype(np.longdouble)
    exact = -np.log(-np.log1p(-uniform))
    told = noise._to_gumbel(torch.from_numpy(numbers)).numpy()
    assert float(np.max(np.abs(told - exact) / np.maximum(np.abs(exact), 1))) < 3e-7


def test_noise_differs_by_seed_and_by_position_and_is_gumbel() -> None:
    keys = [NoiseKey(1, 1), NoiseKey(1, 2), NoiseKey(2, 1)]
    base, *others = gumbel_noise(keys, begin=0, count=100_000)
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 0.02
    assert float(base.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(base.var()) == pytest.approx(np.pi**2 / 6, abs=0.05)
    assert bool(base.isfinite().all())


def test_noise_of_neighbouring_rows_is_independent() -> None:
    """Both halves of a 64-bit word are used: neither tells of the other."""
    drawn = gumbel_noise([NoiseKey(5, 5)], begin=0, count=200_000)[0]
    for distance in (1, 2, 8):
        pairs = torch.stack([drawn[:-distance], drawn[distance:]])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.01

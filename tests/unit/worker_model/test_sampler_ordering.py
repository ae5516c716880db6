"""The top rows of a shard, in the one order that all shards share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_worker.sampling.shard import best_first
from tests.support.examples import examples

pytestmark = pytest.mark.unit


@settings(max_examples=examples(150))
@given(
    size=st.sampled_from([1, 2, 511, 1024, 1025, 5000, 20_001]),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.1, 0.5, 1.0]),
    levels=st.sampled_from([1, 2, 30, 10**6]),
    banned=st.sampled_from([0.0, 0.5, 0.999, 1.0]),
    seed=st.integers(0, 1000),
)
def test_the_best_come_first_and_of_equals_the_lowest(
    size: int, share: float, levels: int, banned: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    values = (random.integers(0, levels, size) - levels / 2).astype(np.float32)
    values[random.random(size) < banned] = -np.inf
    count = max(1, int(size * share))
    expected = np.lexsort((np.arange(size), -values))[:count]
    np.testing.assert_array_equal(best_first(values, count), expected)

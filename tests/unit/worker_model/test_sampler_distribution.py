"""Chi-square of sampled tokens against the analytic distribution, on 1, 2 and 3 ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sampling_checks import check_distribution
from tests.support.sampling_reference import Draw, mask_of, reference_distribution, sample_on, sampling_of

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("both_paths")]

LOGITS = np.random.default_rng(8).normal(0, 1.5, 40).astype(np.float32)
RANKS: dict[str, tuple[int, ...]] = {"1 rank": (), "2 ranks": (23, 17), "3 ranks": (8, 25, 7)}
HISTORY: dict[str, Any] = {"prompt": (3, 9, 9, 30), "output": (9, 5, 5, 5, 39, 12)}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_k, top_p": {"top_k": 12, "top_p": 0.85},
    "top_p, min_p": {"top_p": 0.95, "min_p": 0.05},
    "top_k, min_p, hot": {"top_k": 20, "min_p": 0.2, "temperature": 2.0},
    "all filters": {"temperature": 1.3, "top_k": 15, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.4},
    "bias, min_tokens, top_p": {
        "bias_token_ids": [2, 31],
        "biases": [3.0, -2.0],
        "min_tokens": 10,
        "end_token_ids": [0, 39],
        "top_p": 0.9,
    },
    "penalties, all filters": {"frequency_penalty": -0.4, "top_k": 15, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
}


@pytest.mark.parametrize("counts", RANKS.values(), ids=RANKS)
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_tokens_follow_the_analytic_distribution(fields: dict[str, Any], counts: tuple[int, ...]) -> None:
    check_distribution(Draw(LOGITS, sampling_of(seed=77, **fields), **HISTORY), counts, positions=3000)


@pytest.mark.parametrize("counts", RANKS.values(), ids=RANKS)
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.8}, {"min_p": 0.1, "presence_penalty": 1.0}], ids=str)
def test_tokens_under_a_mask_follow_what_it_leaves(fields: dict[str, Any], counts: tuple[int, ...]) -> None:
    draw = Draw(LOGITS, sampling_of(seed=78, **fields), mask=mask_of(range(1, 40, 3), 40), **HISTORY)
    check_distribution(draw, counts, positions=3000)


@pytest.mark.parametrize("counts", RANKS.values(), ids=RANKS)
def test_tokens_of_many_seeds_at_one_position_follow_the_distribution(counts: tuple[int, ...]) -> None:
    draws = [Draw(LOGITS, sampling_of(seed=seed)) for seed in range(4000)]
    tokens = sample_on(torch.from_numpy(LOGITS).expand(4000, -1), [draw.row for draw in draws], counts).tokens
    share = np.bincount(tokens, minlength=40) / 4000
    assert np.abs(share - reference_distribution(draws[0])).max() < 0.03

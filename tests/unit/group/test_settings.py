"""Places of ranks, and what can be wrong with shares before any rank was asked."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_api.errors import PlanError
from hetero_gateway.group.settings import check_shares, expected_places
from tests.unit.group.group_setup import model_config, spec_of

pytestmark = pytest.mark.unit


def test_ranks_are_numbered_by_pool_gpu_pools_first() -> None:
    spec = spec_of(
        {"name": "slow", "ranks": 2, "cpu": {"coresPerRank": 3}},
        {"name": "fast", "type": "GPU", "ranks": 4, "ranksPerPod": 2},
    )
    places = [(p.rank, p.pool, p.pool_index, p.ordinal, p.local_rank) for p in expected_places(spec)]
    assert places == [
        (0, "fast", 1, 0, 0), (1, "fast", 1, 0, 1), (2, "fast", 1, 1, 0), (3, "fast", 1, 1, 1),
        (4, "slow", 0, 0, 0), (5, "slow", 0, 1, 0),
    ]  # fmt: skip
    assert [place.cores for place in expected_places(spec)] == [2, 2, 2, 2, 3, 3]
    assert [place.is_gpu for place in expected_places(spec)] == [True] * 4 + [False] * 2


def test_a_rank_with_zeros_everywhere_is_an_error_that_names_the_shares() -> None:
    shares = {kind: [1.0, 0.0] for kind in ("attention", "mlp", "vocabulary")}
    with pytest.raises(PlanError, match=r"spec\.placement\.shares\.attention, .*rank 1 \(cpu-1\) would own nothing"):
        check_shares(spec_of(shares=shares), model_config())


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"vocabulary": [1.0, 1.0]}, r"spec\.placement\.shares\.vocabulary: does not apply in mode Layer"),
        ({"attention": [1.0, 2.0], "mlp": [1.0, 1.0]}, "attention and mlp differ"),
        ({"mlp": [1.0, 0.0]}, r"shares\.mlp: rank 1 \(cpu-1\) would own nothing of the model \(30 layers"),
    ],
)
def test_shares_that_do_not_fit_whole_layers_are_errors(shares: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_shares(spec_of(placement={"mode": "Layer", "shares": shares}), model_config())


@pytest.mark.parametrize("shares", [{}, {"attention": [1.0, 0.0]}, {"mlp": [0.0, 1.0]}])
def test_shares_that_leave_every_rank_something_are_fine(shares: dict[str, Any]) -> None:
    check_shares(spec_of(shares=shares), model_config())


def test_more_ranks_than_units_are_for_the_solver_to_judge_if_no_shares_are_given() -> None:
    config = model_config(num_attention_heads=2, num_key_value_heads=2, intermediate_size=128, vocab_size=128)
    check_shares(spec_of({"name": "cpu", "ranks": 5}), config)

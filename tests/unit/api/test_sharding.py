"""A shard plan owns every unit exactly once, or says what it does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_api.errors import PlanError
from hetero_api.sharding import LayerShard, RankShard, ShardPlan, UnitRange, ranges_of_counts

pytestmark = pytest.mark.unit


def plan_of(heads: list[int], columns: list[int], rows: list[int], layers: int = 2) -> ShardPlan:
    return ShardPlan(
        tuple(
            RankShard((LayerShard(h, c),) * layers, v)
            for h, c, v in zip(*map(ranges_of_counts, (heads, columns, rows)), strict=True)
        )
    )


counts = st.integers(1, 6).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 9), min_size=n, max_size=n) for _ in range(3)])
)


@given(counts)
def test_consecutive_ranges_cover_exactly_and_survive_the_wire(kinds: tuple[list[int], list[int], list[int]]) -> None:
    heads, columns, rows = kinds
    plan = plan_of(heads, columns, rows)
    plan.validate(num_layers=2, num_kv_heads=sum(heads), mlp_columns=sum(columns), vocab_rows=sum(rows))
    assert ShardPlan.from_proto(plan.to_proto()) == plan
    assert plan.attention_owners(0) == tuple(r for r, n in enumerate(heads) if n)


@pytest.mark.parametrize(
    ("heads", "layers", "message"),
    [
        ([2, 2], 2, "layer 0 KV heads: 4 of 3 are owned"),
        ([2, 0], 2, "layer 0 KV heads: 2 of 3 are owned"),
        ([2, 1], 1, "all 2 layers"),
    ],
)
def test_a_plan_that_does_not_cover_is_refused(heads: list[int], layers: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(heads, [4, 4], [8, 8], layers).validate(num_layers=2, num_kv_heads=3, mlp_columns=8, vocab_rows=16)


def test_overlap_is_refused() -> None:
    shard = RankShard((LayerShard(UnitRange(0, 1), UnitRange(0, 8)),), UnitRange(0, 16))
    with pytest.raises(PlanError, match="rank 1 owns"):
        ShardPlan((shard, shard)).validate(num_layers=1, num_kv_heads=1, mlp_columns=8, vocab_rows=16)

"""Deals of a model by cores and by shares, before anything was measured."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan, Stage
from hetero_api.spec import HeteroInferenceSpec, PlacementMode
from hetero_placement.shard_plans import UNIT, deal_layers, deal_within_layers
from tests.unit.group.group_setup import model_config, spec_of

pytestmark = pytest.mark.unit


def counts(plan: ShardPlan, *, layer: int = 0) -> tuple[list[int], list[int], list[int]]:
    """KV heads, MLP columns and vocabulary rows of each rank."""
    layers = [rank.layers[layer] for rank in plan.ranks]
    return (
        [shard.kv_heads.size for shard in layers],
        [shard.mlp_columns.size for shard in layers],
        [rank.head_rows.size for rank in plan.ranks],
    )


def make_shard_plan(spec: HeteroInferenceSpec, config: ModelConfig) -> ShardPlan:
    """Dealt by the spec's cores and shares."""
    cores = [pool.cpu_or_default.cores_per_rank for pool in spec.pools for _ in range(pool.ranks)]
    deal = deal_layers if spec.placement.mode == PlacementMode.LAYER else deal_within_layers
    plan = deal(config, cores=cores, shares=spec.placement.shares)
    plan.validate_for(config)
    return plan


def test_smollm2_on_two_equal_ranks_makes_up_for_uneven_heads_with_columns() -> None:
    assert counts(make_shard_plan(spec_of(), model_config())) == ([2, 1], [704, 832], [24576, 24576])


def test_smollm2_on_three_ranks_is_even() -> None:
    plan = make_shard_plan(spec_of({"name": "cpu", "ranks": 3}), model_config())
    assert counts(plan) == ([1, 1, 1], [512, 512, 512], [16384, 16384, 16384])
    assert counts(plan, layer=29) == counts(plan)


def test_more_cores_get_more() -> None:
    spec = spec_of(
        {"name": "a", "ranks": 1, "cpu": {"coresPerRank": 1}}, {"name": "b", "ranks": 1, "cpu": {"coresPerRank": 3}}
    )
    # Heads 1 and 2: a quarter of the weights is 0.75 + 1 - 1 heads' worth for a, and the rest for b.
    heads, columns, rows = counts(make_shard_plan(spec, model_config()))
    assert (heads, columns, rows) == ([1, 2], [320, 1216], [12288, 36864])


def test_explicit_shares_are_dealt_as_they_are() -> None:
    config = model_config(num_attention_heads=16, num_key_value_heads=8, head_dim=16, hidden_size=128)
    shares = {"attention": [5.0, 2.0, 1.0, 0.0], "mlp": [0.0, 0.0, 1.0, 3.0], "vocabulary": [1.0, 0.0, 0.0, 1.0]}
    plan = make_shard_plan(spec_of({"name": "cpu", "ranks": 4}, shares=shares), config)
    assert counts(plan) == ([5, 2, 1, 0], [0, 0, 384, 1152], [24576, 0, 0, 24576])
    assert plan.attention_owners(0) == (0, 1, 2)
    assert plan.mlp_owners(0) == (2, 3)


def test_columns_level_out_explicit_head_shares() -> None:
    plan = make_shard_plan(spec_of(shares={"attention": [1.0, 0.0]}), model_config())
    heads, columns, _ = counts(plan)
    # 3 heads weigh as much as 512 columns; (1536 - 512) / 2 columns more on each side level it.
    assert (heads, columns) == ([3, 0], [512, 1024])


def test_the_last_unit_is_smaller_where_64_does_not_divide() -> None:
    config = model_config(intermediate_size=1000, vocab_size=200)
    heads, columns, rows = counts(make_shard_plan(spec_of(), config))
    assert (heads, columns, rows) == ([2, 1], [448, 552], [128, 72])


@given(
    shape=st.fixed_dictionaries(
        {"intermediate_size": st.integers(1, 3000), "vocab_size": st.integers(1, 3000), "heads": st.integers(1, 12)}
    ),
    cores=st.lists(st.integers(1, 64), min_size=1, max_size=6),
    data=st.data(),
)
def test_every_plan_covers_the_model_exactly_in_whole_units(
    shape: dict[str, int], cores: list[int], data: st.DataObject
) -> None:
    weight = st.one_of(st.just(0.0), st.floats(1e-3, 100))
    weights = st.lists(weight, min_size=len(cores), max_size=len(cores))
    shares: dict[str, Any] = {
        kind: given_shares
        for kind in ("attention", "mlp", "vocabulary")
        if (given_shares := data.draw(st.one_of(st.none(), weights.filter(any)), label=kind))
    }
    pools = [{"name": f"p{i}", "ranks": 1, "cpu": {"coresPerRank": number}} for i, number in enumerate(cores)]
    heads = shape.pop("heads")
    config = model_config(num_attention_heads=2 * heads, num_key_value_heads=heads, head_dim=8, **shape)
    plan = make_shard_plan(spec_of(*pools, shares=shares), config)
    dealt, columns, rows = counts(plan)
    for sizes in (columns, rows):
        owners = [size for size in sizes if size]
        assert all(size % UNIT == 0 for size in owners[:-1])
    for kind, got in zip(("attention", "mlp", "vocabulary"), (dealt, columns, rows), strict=True):
        for weight, size in zip(shares.get(kind) or [1.0] * len(cores), got, strict=True):
            assert weight or not size


def test_a_rank_without_heads_is_fine_when_it_owns_something_else() -> None:
    plan = make_shard_plan(spec_of({"name": "cpu", "ranks": 4}), model_config())
    heads, columns, _ = counts(plan)
    assert heads == [1, 1, 1, 0]
    assert columns[3] > columns[0]


def layer_counts(plan: ShardPlan) -> list[int]:
    """Layers of each rank; none of them is shared."""
    for shards in zip(*(rank.layers for rank in plan.ranks), strict=True):
        assert sum(not shard.is_empty for shard in shards) == 1
    return [sum(not layer.is_empty for layer in rank.layers) for rank in plan.ranks]


def test_whole_layers_are_dealt_in_a_row_by_cores() -> None:
    spec = spec_of(
        {"name": "a", "ranks": 2, "cpu": {"coresPerRank": 1}},
        {"name": "b", "ranks": 1, "cpu": {"coresPerRank": 2}},
        placement={"mode": "Layer"},
    )
    plan = make_shard_plan(spec, model_config())
    # 30 layers over 1 + 1 + 2 cores: 7.5, 7.5 and 15; the one left over goes to the lower rank.
    assert layer_counts(plan) == [8, 7, 15]
    assert plan.stages() == (Stage((0,), (0,), 0, 8), Stage((1,), (1,), 8, 15), Stage((2,), (2,), 15, 30))
    assert [rank.embedding_rows.size for rank in plan.ranks] == [49152, 0, 0]
    assert [rank.head_rows.size for rank in plan.ranks] == [0, 0, 49152]
    assert plan.ranks[1].layers[8].kv_heads.size == 3
    assert plan.ranks[1].layers[8].mlp_columns.size == 1536
    assert ShardPlan.from_proto(plan.to_proto()) == plan


@pytest.mark.parametrize("shares", [{"attention": [1.0, 4.0]}, {"mlp": [1.0, 4.0]}])
def test_either_share_deals_whole_layers(shares: dict[str, Any]) -> None:
    spec = spec_of(placement={"mode": "Layer", "shares": shares})
    assert layer_counts(make_shard_plan(spec, model_config())) == [6, 24]


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"vocabulary": [1.0, 1.0]}, r"spec\.placement\.shares\.vocabulary: does not apply in mode Layer"),
        ({"attention": [1.0, 2.0], "mlp": [1.0, 1.0]}, "attention and mlp differ"),
    ],
)
def test_shares_that_do_not_fit_whole_layers_are_errors(shares: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_shard_plan(spec_of(placement={"mode": "Layer", "shares": shares}), model_config())


@given(cores=st.lists(st.integers(1, 64), min_size=1, max_size=6), num_layers=st.integers(1, 40))
def test_every_layered_plan_covers_the_model_and_has_a_stage_a_rank(cores: list[int], num_layers: int) -> None:
    pools = [{"name": f"p{i}", "ranks": 1, "cpu": {"coresPerRank": number}} for i, number in enumerate(cores)]
    config = model_config(num_hidden_layers=num_layers)
    plan = make_shard_plan(spec_of(*pools, placement={"mode": "Layer"}), config)
    assert [stage.ranks for stage in plan.stages()] == [(rank,) for rank, got in enumerate(layer_counts(plan)) if got]
    for rank, count in enumerate(layer_counts(plan)):
        assert abs(count - num_layers * cores[rank] / sum(cores)) < 1


EIGHT_EXPERTS: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
EVERY_THIRD_LAYER: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 96, "decoder_sparse_step": 3,
}  # fmt: skip


@pytest.mark.parametrize("mode", ["Tensor", "Layer"])
def test_experts_are_dealt_in_place_of_columns(mode: str) -> None:
    config = model_config(**EIGHT_EXPERTS)
    plan = make_shard_plan(spec_of(placement={"mode": mode}), config)
    assert not any(layer.mlp_columns.size for rank in plan.ranks for layer in rank.layers)
    first = [rank.layers[0].experts.size for rank in plan.ranks]
    # In Tensor mode heads 2 and 1 weigh little beside experts.
    assert first == ([4, 4] if mode == "Tensor" else [8, 0])
    assert plan.expert_owners(0) == ((0, 1) if mode == "Tensor" else (0,))


def test_experts_follow_their_shares() -> None:
    config = model_config(**EIGHT_EXPERTS)
    plan = make_shard_plan(spec_of(shares={"mlp": [3.0, 1.0]}), config)
    assert [rank.layers[0].experts.size for rank in plan.ranks] == [6, 2]


def test_small_experts_make_up_for_uneven_heads() -> None:
    """Heads 2 and 1 differ by 576 · 64 · 8 weights, an expert has 3 · 576 · 96: two experts' worth, rounded."""
    plan = make_shard_plan(spec_of(), model_config(**EVERY_THIRD_LAYER))
    assert [rank.layers[2].experts.size for rank in plan.ranks] == [7, 9]


@pytest.mark.parametrize("mode", ["Tensor", "Layer"])
def test_a_model_of_dense_layers_and_such_with_experts_is_dealt_by_the_kind_of_each(mode: str) -> None:
    plan = make_shard_plan(spec_of(placement={"mode": mode}), model_config(**EVERY_THIRD_LAYER))
    for layer in range(30):
        shards = [rank.layers[layer] for rank in plan.ranks]
        has_experts = layer % 3 == 2
        assert sum(shard.experts.size for shard in shards) == (16 if has_experts else 0)
        assert sum(shard.mlp_columns.size for shard in shards) == (0 if has_experts else 1536)
    if mode == "Tensor":
        assert counts(plan, layer=1) == counts(make_shard_plan(spec_of(), model_config()))


@pytest.mark.parametrize("mode", ["Tensor", "Layer"])
def test_experts_of_all_tokens_go_with_kv_heads(mode: str) -> None:
    """Of 8 heads 6 and 2, or all: of 1,000 columns 704 and the others, in units of 64."""
    config = model_config(
        architectures=["Glm4MoeForCausalLM"], num_attention_heads=16, num_key_value_heads=8, head_dim=64,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=500, n_shared_experts=2,
    )  # fmt: skip
    shares = {"attention": [3.0, 1.0]} if mode == "Tensor" else {"attention": [1.0, 0.0]}
    plan = make_shard_plan(spec_of(placement={"mode": mode, "shares": shares}), config)
    assert [rank.layers[0].experts.size for rank in plan.ranks] == [0, 0]
    assert [rank.layers[1].mlp_columns.size for rank in plan.ranks] == ([704, 296] if mode == "Tensor" else [1000, 0])

"""A shard plan owns every unit exactly once, or says what it does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import NO_UNITS as NO
from hetero_api.sharding import LayerShard, RankShard, ShardPlan, Stage, UnitRange, ranges_of_counts

pytestmark = pytest.mark.unit


def plan_of(heads: list[int], columns: list[int], rows: list[int], layers: int = 2) -> ShardPlan:
    return ShardPlan(
        tuple(
            RankShard((LayerShard(h, c),) * layers, embedding_rows=v, head_rows=v)
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
    plan.validate(num_layers=2, num_kv_heads=sum(heads), mlp_columns=sum(columns), vocab_size=sum(rows))
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
        plan_of(heads, [4, 4], [8, 8], layers).validate(num_layers=2, num_kv_heads=3, mlp_columns=8, vocab_size=16)


def test_overlap_is_refused() -> None:
    shard = RankShard((LayerShard(UnitRange(0, 1), UnitRange(0, 8)),), UnitRange(0, 16), UnitRange(0, 16))
    with pytest.raises(PlanError, match="rank 1 owns"):
        ShardPlan((shard, shard)).validate(num_layers=1, num_kv_heads=1, mlp_columns=8, vocab_size=16)


def test_layers_of_the_same_owners_in_the_same_roles_are_a_stage() -> None:
    column, head = LayerShard(UnitRange(1, 1), UnitRange(0, 8)), LayerShard(UnitRange(0, 1), NO)
    whole = LayerShard(UnitRange(0, 1), UnitRange(0, 8))
    rest = LayerShard(UnitRange(1, 1), UnitRange(8, 8))
    plan = ShardPlan(
        (
            RankShard((whole, whole, head, rest), UnitRange(0, 16), UnitRange(0, 0)),
            RankShard((rest, rest, column, whole), UnitRange(16, 16), UnitRange(0, 16)),
        )
    )
    assert plan.stages() == (Stage((0,), (0,), 0, 2), Stage((0, 1), (0,), 2, 3), Stage((1,), (1,), 3, 4))
    assert [(stage.leader, stage.helpers) for stage in plan.stages()] == [(0, ()), (0, (1,)), (1, ())]
    assert (plan.embedding_owners(), plan.head_owners()) == ((0,), (1,))
    assert plan.layer_owners(2) == (0, 1)


def test_ranks_that_change_roles_begin_a_stage() -> None:
    whole, columns, none = (LayerShard(UnitRange(0, h), UnitRange(0, c)) for h, c in ((1, 4), (0, 4), (0, 0)))
    rows = UnitRange(0, 4)
    plan = ShardPlan((RankShard((columns, whole), NO, NO), RankShard((whole, columns), rows, rows)))
    assert plan.stages() == (Stage((0, 1), (1,), 0, 1), Stage((0, 1), (0,), 1, 2))
    idle = ShardPlan((*plan.ranks, RankShard((none, none), NO, NO)))
    assert idle.stages() == plan.stages()


def test_a_layer_without_owner_has_no_stage() -> None:
    shard = RankShard((LayerShard(NO, NO),), NO, NO)
    with pytest.raises(PlanError, match="the KV heads of layer 0 are owned by no rank"):
        ShardPlan((shard,)).stages()
    helper = RankShard((LayerShard(NO, UnitRange(0, 8)),), NO, NO)
    with pytest.raises(PlanError, match="the KV heads of layer 0 are owned by no rank"):
        ShardPlan((helper,)).stages()
    with pytest.raises(PlanError, match="at least one rank"):
        ShardPlan(()).stages()


def test_a_layer_is_dense_or_has_experts() -> None:
    dense = LayerShard(UnitRange(0, 1), UnitRange(0, 8))
    sparse = LayerShard(UnitRange(0, 1), NO, UnitRange(0, 4))
    both = LayerShard(UnitRange(0, 1), UnitRange(0, 8), UnitRange(0, 4))
    rows = UnitRange(0, 16)

    def validate(*layers: LayerShard, num_experts: int, expert_layers: tuple[int, ...]) -> ShardPlan:
        plan = ShardPlan((RankShard(layers, rows, rows),))
        plan.validate(
            num_layers=len(layers),
            num_kv_heads=1,
            mlp_columns=8,
            vocab_size=16,
            num_experts=num_experts,
            expert_layers=expert_layers,
        )
        return plan

    plan = validate(dense, sparse, num_experts=4, expert_layers=(1,))
    assert [plan.expert_owners(0), plan.expert_owners(1), plan.mlp_owners(1)] == [(), (0,), ()]
    assert ShardPlan.from_proto(plan.to_proto()) == plan
    with pytest.raises(PlanError, match="layer 0 MLP columns: 8 of 0 are owned"):
        validate(both, num_experts=4, expert_layers=(0,))
    with pytest.raises(PlanError, match="layer 1 experts: 4 of 6 are owned"):
        validate(dense, sparse, num_experts=6, expert_layers=(1,))
    with pytest.raises(PlanError, match="layer 0 MLP columns: 0 of 8 are owned"):
        validate(sparse, num_experts=4, expert_layers=())
    with pytest.raises(PlanError, match="layer 0 MLP columns: 8 of 0 are owned"):
        validate(dense, num_experts=4, expert_layers=(0,))


def test_layers_that_read_others_keys_and_values_are_with_them() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = ModelConfig.from_hf(
        {
            "architectures": ["Gemma4ForCausalLM"], "hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 16, "max_position_embeddings": 64, "num_hidden_layers": 6,
            "layer_types": ["full_attention", "sliding_attention", *kinds], "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 0, "use_double_wide_mlp": True,
        }
    )  # fmt: skip
    assert config.kv_layers == (0, 1, 2, 3, 2, 3)

    def plan(*heads_of_first: int) -> ShardPlan:
        """Rank 0 has so many KV heads of each layer, and all else of the layers of which it has heads."""
        ranks: list[list[LayerShard]] = [[], []]
        for layer, heads in enumerate(heads_of_first):
            columns = config.mlp_columns(layer) if heads else 0
            ranks[0].append(LayerShard(UnitRange(0, heads), UnitRange(0, columns)))
            ranks[1].append(LayerShard(UnitRange(heads, 2), UnitRange(columns, config.mlp_columns(layer))))
        rows = UnitRange(0, 16), UnitRange(16, 16)
        return ShardPlan(tuple(RankShard(tuple(own), part, part) for own, part in zip(ranks, rows, strict=True)))

    assert [config.mlp_columns(layer) for layer in (3, 4)] == [8, 16]
    for allowed in ((1,) * 6, (2, 2, 0, 0, 0, 0), (2, 0, 0, 0, 0, 0), (2, 2, 1, 0, 1, 0)):
        plan(*allowed).validate_for(config)
    for refused, layer, source in (((2, 2, 2, 0, 0, 0), 4, 2), ((1, 1, 1, 1, 1, 0), 5, 3)):
        message = f"layer {layer} KV heads: it reads the keys and values of layer {source}, .*keep layers 2 to 5"
        with pytest.raises(PlanError, match=message):
            plan(*refused).validate_for(config)


@pytest.mark.parametrize(("embedding", "head", "what"), [(15, 16, "embedding rows"), (16, 15, "output head rows")])
def test_embedding_and_head_are_covered_each(embedding: int, head: int, what: str) -> None:
    layer = LayerShard(UnitRange(0, 1), UnitRange(0, 8))
    plan = ShardPlan((RankShard((layer,), UnitRange(0, embedding), UnitRange(0, head)),))
    with pytest.raises(PlanError, match=f"{what}: 15 of 16 are owned"):
        plan.validate(num_layers=1, num_kv_heads=1, mlp_columns=8, vocab_size=16)


def sparse_plan(*orders: tuple[int, ...]) -> ShardPlan:
    """Three experts in each of two layers: two positions on rank 0, one on rank 1."""
    rows = UnitRange(0, 4)
    zero, one = LayerShard(UnitRange(0, 1), NO, UnitRange(0, 2)), LayerShard(UnitRange(1, 1), NO, UnitRange(2, 3))
    return ShardPlan(
        (RankShard((zero, zero), rows, rows), RankShard((one, one), UnitRange(4, 4), UnitRange(4, 4))), orders
    )


def test_any_expert_can_be_any_ranks() -> None:
    plan = sparse_plan((2, 0, 1), ())
    assert [plan.experts_of(rank, 0) for rank in (0, 1)] == [(2, 0), (1,)]
    assert [plan.experts_of(rank, 1) for rank in (0, 1)] == [(0, 1), (2,)]
    assert sparse_plan().experts_of(1, 0) == (2,)
    assert ShardPlan.from_proto(plan.to_proto()) == plan


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (((0, 1, 2),), "there are 1 for 2 layers"),
        (((0, 1, 1), ()), "layer 0's is no permutation of its 3 experts"),
        (((), (0, 1)), "layer 1's is no permutation of its 3 experts"),
    ],
)
def test_an_order_holds_every_expert_of_its_layer_once(orders: tuple[tuple[int, ...], ...], message: str) -> None:
    def validate(plan: ShardPlan) -> None:
        plan.validate(num_layers=2, num_kv_heads=1, mlp_columns=0, vocab_size=4, num_experts=3, expert_layers=(0, 1))

    validate(sparse_plan((2, 1, 0), (0, 2, 1)))
    with pytest.raises(PlanError, match=message):
        validate(sparse_plan(*orders))


def sliced_plan(*positions: UnitRange, columns: tuple[int, ...], order: tuple[int, ...] = ()) -> ShardPlan:
    """Five experts of 12 columns in one layer; a rank with columns has slices."""
    parts = zip(positions, ranges_of_counts(columns), strict=True)
    rows = UnitRange(0, 4), UnitRange(4, 4)
    layers = [
        LayerShard(UnitRange(min(r, 1), 1), NO, own, cut if cut.size else NO) for r, (own, cut) in enumerate(parts)
    ]
    ranks = tuple(RankShard((layer,), *[rows[min(r, 1)]] * 2) for r, layer in enumerate(layers))
    return ShardPlan(ranks, (order,) if order else ())


def validate_sliced(plan: ShardPlan) -> None:
    plan.validate(
        num_layers=1, num_kv_heads=1, mlp_columns=0, vocab_size=4, num_experts=5, expert_columns=12, expert_layers=(0,)
    )


FIRST, REST, ALL = UnitRange(0, 2), UnitRange(2, 5), UnitRange(0, 5)


def test_the_last_experts_of_an_order_may_be_dealt_in_slices() -> None:
    plan = sliced_plan(FIRST, REST, UnitRange(2, 2), REST, columns=(0, 5, 0, 7), order=(4, 0, 1, 3, 2))
    validate_sliced(plan)
    assert [plan.experts_of(rank, 0) for rank in range(4)] == [(4, 0), (1, 3, 2), (), (1, 3, 2)]
    assert plan.sliced_experts(0) == (1, 3, 2)
    assert plan.expert_owners(0) == (0, 1, 3)
    assert ShardPlan.from_proto(plan.to_proto()) == plan
    every = sliced_plan(ALL, ALL, columns=(5, 7))
    validate_sliced(every)
    assert every.sliced_experts(0) == (0, 1, 2, 3, 4)
    assert sparse_plan().sliced_experts(0) == ()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (sliced_plan(ALL, ALL, columns=(5, 6)), "layer 0 expert columns: 11 of 12 are owned"),
        (sliced_plan(ALL, ALL, columns=(0, 12)), r"layer 0 experts: 5 of 0 are owned"),
        (sliced_plan(FIRST, REST, columns=(0, 5)), "layer 0 expert columns: 5 of 12 are owned"),
        (sliced_plan(UnitRange(0, 1), REST, REST, columns=(0, 5, 7)), "layer 0 experts: 1 of 2 are owned"),
        (sliced_plan(FIRST, REST, UnitRange(3, 5), columns=(0, 5, 7)), "expected one range up to 5"),
        (sliced_plan(FIRST, UnitRange(2, 4), UnitRange(2, 4), columns=(0, 5, 7)), "expected one range up to 5"),
        (sliced_plan(ALL, UnitRange(5, 5), UnitRange(5, 5), columns=(0, 5, 7)), "expected one range up to 5"),
    ],
    ids=["columns", "both", "one slice", "a gap", "other experts", "too few", "none"],
)  # fmt: skip
def test_slices_make_their_experts_whole(plan: ShardPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate_sliced(plan)

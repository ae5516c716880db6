"""Experts go to where they shorten the step, few of them, and stay there."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import NO_UNITS, LayerShard, RankShard, ShardPlan, UnitRange, ranges_of_counts
from hetero_api.spec_pools import PoolType
from hetero_placement.cost_model import CostModel
from hetero_placement.expert_placement import (
    FADING_TOKENS,
    ExpertCosts,
    ExpertMoves,
    counted_tokens,
    expected_step_s,
    faded_counts,
    place_experts,
)
from hetero_placement.hardware import CostPoint, ExchangeSpeeds, Hardware, Part, RankHardware, Speeds

pytestmark = pytest.mark.unit

FAST, SLOW = 1e-6, 1e-5


def shard_plan(capacities: Sequence[int], *, num_layers: int = 1, orders: Sequence[Sequence[int]] = ()) -> ShardPlan:
    """Every layer has experts, dealt by capacities; what else there is lies on rank 0."""
    ranks = []
    for rank, experts in enumerate(ranges_of_counts(capacities)):
        rest = UnitRange(min(rank, 1), 1)
        ranks.append(RankShard((LayerShard(rest, NO_UNITS, experts),) * num_layers, rest, rest))
    plan = ShardPlan(tuple(ranks), tuple(map(tuple, orders)))
    plan.validate(
        num_layers=num_layers,
        num_kv_heads=1,
        mlp_columns=0,
        vocab_size=1,
        num_experts=sum(capacities),
        expert_layers=range(num_layers),
    )
    return plan


def costs(active_s: Sequence[float], *, rest_s: float = 0.0, rows: int = 1, experts_per_token: int = 2) -> ExpertCosts:
    return ExpertCosts(active_s=tuple(active_s), rest_s=rest_s, rows=rows, experts_per_token=experts_per_token)


def applied(plan: ShardPlan, moves: ExpertMoves) -> ShardPlan:
    for move in moves.moves:
        plan = move.applied_to(plan)
    return plan


def held(plan: ShardPlan, layer: int = 0) -> list[set[int]]:
    return [set(plan.experts_of(rank, layer)) for rank in range(plan.world_size)]


def test_experts_that_are_chosen_often_go_to_the_fast_rank() -> None:
    counts = {0: [10, 10, 900, 10, 800, 10, 10, 250]}
    plan = shard_plan((3, 5))
    moves = place_experts(plan, counts, costs((FAST, SLOW)))
    assert held(applied(plan, moves)) == [{2, 4, 7}, {0, 1, 3, 5, 6}]
    assert moves.num_moved == 4
    assert moves.step_s_after < moves.step_s_before / 5


def test_equal_ranks_get_equal_work_by_few_exchanges() -> None:
    """Everything is asked of rank 0: one of its two busy experts has to go, and only that."""
    counts = {0: [500, 500, 0, 0]}
    plan = shard_plan((2, 2))
    moves = place_experts(plan, counts, costs((FAST, FAST)))
    assert moves.num_moved == 2
    assert moves.step_s_after == pytest.approx(moves.step_s_before / 2)


def test_pairs_change_places_one_by_one_and_the_best_of_each_layer_comes_first() -> None:
    counts = {0: [10, 10, 900, 10, 800, 10, 10, 250], 1: [0, 0, 0, 0, 0, 0, 400, 600]}
    plan, known = shard_plan((3, 5), num_layers=2), costs((FAST, SLOW))
    moves = place_experts(plan, counts, known)
    plans = [plan, *moves.plans_from(plan)]
    assert len(plans) == 1 + 4
    for before, after in itertools.pairwise(plans):
        changed = [layer for layer in (0, 1) if held(after, layer) != held(before, layer)]
        assert [len(held(after, layer)[0] - held(before, layer)[0]) for layer in changed] == [1]
        assert expected_step_s(after, counts, known) < expected_step_s(before, counts, known)
    assert held(plans[2]) != held(plan)
    assert held(plans[2], 1) != held(plan, 1)
    assert plans[-1] == applied(plan, moves)


def looks(*counts: Sequence[float], tokens: int) -> list[bool]:
    """Whether experts move at each look, of two experts a token, after so many tokens each."""
    plan, known, before = shard_plan((2, 2)), costs((FAST, SLOW)), dict[int, Sequence[float]]()
    moved = []
    for shares in counts:
        new = {0: [2 * tokens * share for share in shares]}
        before = dict(faded_counts(before, new, experts_per_token=2))
        moves = place_experts(plan, before, known)
        plan = applied(plan, moves)
        moved.append(bool(moves.moves))
    return moved


def test_texts_that_alternate_do_not_move_experts_back_and_forth() -> None:
    one, other = (0.0, 0.0, 0.5, 0.5), (0.5, 0.5, 0.0, 0.0)
    assert looks(*[one, other] * 20, tokens=10_000) == [True, *[False] * 39]


def test_what_lasts_moves_experts_once_it_outweighs_what_fades() -> None:
    one, other = (0.0, 0.0, 0.5, 0.5), (0.5, 0.5, 0.0, 0.0)
    moved = looks(*[one] * 100, *[other] * 100, tokens=10_000)
    first = moved.index(True, 1)
    assert moved.count(True) == 2
    assert 100 + FADING_TOKENS / 20_000 < first < 100 + FADING_TOKENS / 10_000


def test_the_pair_that_levels_two_ranks_best_is_exchanged() -> None:
    plan = shard_plan((3, 3))
    moves = place_experts(plan, {0: [300, 500, 400, 290, 100, 0]}, costs((FAST, FAST)))
    assert held(applied(plan, moves)) == [{0, 1, 5}, {2, 3, 4}]


def test_a_step_of_many_rows_wants_every_expert_anyway() -> None:
    """Where all experts are active in every step, none is hot."""
    counts = {0: [900, 800, 200, 100]}
    plan = shard_plan((2, 2))
    assert place_experts(plan, counts, costs((FAST, SLOW), rows=1)).num_moved == 0, "the fast rank has the hot ones"
    other = shard_plan((2, 2), orders=[[2, 3, 0, 1]])
    assert place_experts(other, counts, costs((FAST, SLOW), rows=1)).num_moved == 4
    assert place_experts(other, counts, costs((FAST, SLOW), rows=64)).num_moved == 0


def test_what_saves_too_little_of_the_step_moves_nothing() -> None:
    counts = {0: [100, 100, 200, 200]}
    plan = shard_plan((2, 2))
    saved_s = 100 / 300 * 2 * SLOW
    alone = place_experts(plan, counts, costs((FAST, SLOW)))
    assert alone.step_s_before - alone.step_s_after == pytest.approx(saved_s)
    assert place_experts(plan, counts, costs((FAST, SLOW), rest_s=40 * saved_s)).num_moved == 4
    too_little = place_experts(plan, counts, costs((FAST, SLOW), rest_s=60 * saved_s))
    assert too_little.moves == ()
    assert too_little.step_s_after == too_little.step_s_before == pytest.approx(60 * saved_s + 400 / 300 * SLOW)


def test_a_layer_that_gains_little_is_left_alone_and_the_others_come_by_their_gain() -> None:
    even, skewed, more_skewed = [100, 100, 102, 100], [10, 10, 300, 80], [0, 0, 200, 200]
    plan = shard_plan((2, 2), num_layers=3)
    moves = place_experts(plan, {0: even, 1: skewed, 2: more_skewed}, costs((FAST, SLOW)))
    assert [move.layer for move in moves.moves] == [2, 1]
    after = applied(plan, moves)
    assert after.expert_orders[0] == ()
    assert expected_step_s(after, {0: even, 1: skewed, 2: more_skewed}, costs((FAST, SLOW))) == pytest.approx(
        moves.step_s_after
    )


@pytest.mark.parametrize("counts", [{}, {0: [0, 0, 0, 0]}])
def test_without_counts_nothing_moves(counts: dict[int, list[int]]) -> None:
    moves = place_experts(shard_plan((2, 2)), counts, costs((FAST, SLOW), rest_s=1.0))
    assert moves == ExpertMoves((), 1.0, 1.0)


def test_a_rank_without_experts_and_one_without_cost_take_part_as_they_are() -> None:
    plan = shard_plan((0, 2, 2))
    moves = place_experts(plan, {0: [5, 5, 1, 1]}, costs((FAST, 0.0, 0.0)))
    assert moves.num_moved == 0
    moves = place_experts(plan, {0: [1, 1, 5, 5]}, costs((FAST, 0.0, SLOW)))
    assert held(applied(plan, moves)) == [set(), {2, 3}, {0, 1}]


def test_counted_tokens_are_those_of_the_busiest_layer() -> None:
    assert counted_tokens({0: [4, 4], 1: [4, 6]}, experts_per_token=2) == 5
    assert counted_tokens({}, experts_per_token=2) == 0


def random_case(seed: int) -> tuple[ShardPlan, dict[int, list[int]], ExpertCosts]:
    random_ = random.Random(seed)
    capacities = [random_.randint(0, 3) for _ in range(random_.randint(1, 3))]
    capacities[0] = max(1, capacities[0])
    number = sum(capacities)
    layers = range(random_.randint(1, 2))
    orders = [random_.sample(range(number), number) for _ in layers]
    plan = shard_plan(capacities, num_layers=len(layers), orders=random_.choice([orders, []]))
    skew = random_.choice([0.0, 1.0, 3.0])
    counts = {layer: [int(1000 * random_.random() ** skew) for _ in range(number)] for layer in layers}
    per_token = random_.randint(1, number)
    return plan, counts, costs(
        [random_.choice([1, 1, 2, 5, 20]) * FAST for _ in capacities],
        rest_s=random_.choice([0.0, 0.0, 1e-5]),
        rows=random_.choice([1, 4, 32]),
        experts_per_token=per_token,
    )  # fmt: skip


def best_s(plan: ShardPlan, counts: dict[int, list[int]], known: ExpertCosts) -> float:
    """By trying every deal of each layer."""
    total = known.rest_s
    for layer, chosen in counts.items():
        tokens = max(sum(chosen) / known.experts_per_token, 1e-9)
        activity = [1 - (1 - min(1.0, count / tokens)) ** known.rows for count in chosen]
        positions = [shard.layers[layer].experts for shard in plan.ranks]
        total += min(
            max(
                cost * sum(activity[i] for i in order[part.begin : part.end])
                for cost, part in zip(known.active_s, positions, strict=True)
            )
            for order in itertools.permutations(range(len(chosen)))
        )
    return total


@pytest.mark.parametrize("seed", range(60))
def test_random_cases_come_near_the_best_there_is_and_stay(seed: int) -> None:
    plan, counts, known = random_case(seed)
    moves = place_experts(plan, counts, known)
    after = applied(plan, moves)
    assert moves.step_s_before == pytest.approx(expected_step_s(plan, counts, known))
    assert moves.step_s_after == pytest.approx(expected_step_s(after, counts, known))
    assert moves.step_s_after <= moves.step_s_before
    for layer in range(plan.num_layers):
        before_held, after_held = held(plan, layer), held(after, layer)
        assert [len(experts) for experts in after_held] == [len(experts) for experts in before_held]
        assert set().union(*after_held) == set().union(*before_held)
    assert moves.step_s_after <= best_s(plan, counts, known) * 1.1 + 1e-12
    assert place_experts(after, counts, known).moves == ()


# --- costs of a model on a machine ------------------------------------------------------------------------

MOE = ModelConfig.from_hf(
    {
        "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2, "hidden_size": 1024,
        "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024,
        "max_position_embeddings": 512, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 2048,
    }
)  # fmt: skip
GPU_SPEED, CPU_SPEED, EXCHANGE_S = 1e12, 5e10, 2e-5


def gpu_and_helper(*, costs: tuple[CostPoint, ...] = ()) -> tuple[CostModel, ShardPlan]:
    """A GPU with everything but half of the experts, and a CPU rank with these."""
    speeds = Speeds(memory_bandwidth=GPU_SPEED), Speeds(CPU_SPEED, costs=costs, costs_dtype="bfloat16")
    ranks = (
        RankHardware(PoolType.GPU, "host", 1 << 36, speeds[0]),
        RankHardware(PoolType.CPU, "host", 1 << 36, speeds[1]),
    )
    hardware = Hardware(ranks, host_exchange=ExchangeSpeeds(((4096, EXCHANGE_S),)))
    everything, nothing = UnitRange(0, 8), UnitRange(8, 8)
    rows, no_rows = UnitRange(0, 1024), UnitRange(1024, 1024)
    plan = ShardPlan(
        (
            RankShard((LayerShard(everything, NO_UNITS, UnitRange(0, 8)),) * 2, rows, rows),
            RankShard((LayerShard(nothing, NO_UNITS, UnitRange(8, 16)),) * 2, no_rows, no_rows),
        )
    )
    return CostModel(MOE, hardware, dtype="bfloat16"), plan


def test_hot_experts_go_to_the_gpu_and_a_step_takes_what_the_cost_model_says() -> None:
    model, plan = gpu_and_helper()
    known = ExpertCosts.of(model, plan, rows=1, context=64)
    expert_bytes = 2 * MOE.params_per_expert
    assert known.active_s == pytest.approx((expert_bytes / GPU_SPEED, expert_bytes / CPU_SPEED))
    assert known.fixed_s[1] > EXCHANGE_S, "the helper's time has its ways to the GPU and back in it"
    evenly = dict.fromkeys(range(2), [10] * 16)
    assert expected_step_s(plan, evenly, known) == pytest.approx(model.decode_step_s(plan, batch=1, context=64))
    hot = {layer: [0] * 12 + [10] * 4 for layer in range(2)}
    moves = place_experts(plan, hot, known)
    assert held(applied(plan, moves))[0] >= {12, 13, 14, 15}
    assert moves.num_moved == 16
    assert moves.step_s_before - moves.step_s_after > 2 * 3.5 * expert_bytes / CPU_SPEED


def test_what_an_expert_takes_is_taken_from_what_was_measured() -> None:
    """Of 16 experts a row chooses 4: an expert that is chosen takes four times what one of them takes on average."""
    model, plan = gpu_and_helper(costs=(CostPoint(Part.EXPERTS, 1, 0, fixed_s=1e-5, unit_s=1e-4),))
    known = ExpertCosts.of(model, plan, rows=1, context=64)
    assert known.active_s[1] == pytest.approx(4e-4)
    assert known.fixed_s[1] > 1e-5 + EXCHANGE_S

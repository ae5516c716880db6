"""Experts that move from rank to rank: by all ranks or by none, and what is computed stays what it was."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.tiny_checkpoints import NUM_EXPERTS, TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

ONE_RANK = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),))
TWO_RANKS = Shares(kv_heads=((5, 3),), mlp_columns=((20, 30),), vocab_rows=(64, 136), experts=((2, 4),))
FOUR_RANKS = Shares(
    kv_heads=((2, 1, 3, 2),), mlp_columns=((0, 20, 30, 0),), vocab_rows=(64, 136, 0, 0),
    experts=((1, 3, 0, 2), (0, 4, 1, 1), (3, 1, 2, 0)),
)  # fmt: skip
HELPERS = Shares(
    kv_heads=((5, 0, 3, 0),), mlp_columns=((0, 20, 30, 0),), vocab_rows=(64, 136, 0, 0),
    experts=((1, 3, 0, 2), (0, 4, 1, 1), (3, 1, 2, 0)),
)  # fmt: skip
PROMPT = [7, 150, 3, 88, 199, 0, 42, 42, 64, 63, 127]
TOLERANCE = 1e-4

Command = ranks_pb2.GroupCommand


def save(variant: str, directory: Path) -> TinyCheckpoint:
    """With weights that are small enough for the tolerance."""
    return save_tiny(variant, directory, initializer_range=0.2)


@pytest.fixture
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return save("qwen3-moe-some-dense", tmp_path_factory.mktemp("moe"))


def reordered(plan: ShardPlan, expert_layers: Sequence[int], *, seed: int = 0) -> ShardPlan:
    """The plan with random orders of experts."""
    random_ = random.Random(seed)
    orders = [
        tuple(random_.sample(range(NUM_EXPERTS), NUM_EXPERTS)) if layer in expert_layers else ()
        for layer in range(plan.num_layers)
    ]
    return replace(plan, expert_orders=tuple(orders))


def another(group: RankGroup, *, seed: int = 0) -> ShardPlan:
    return reordered(group.plan, group.requests[0].config.expert_layers, seed=seed)


def load(group: RankGroup, plan: ShardPlan) -> None:
    """A new epoch under this plan."""
    group.requests = [replace(request, shard_plan=plan) for request in group.requests]
    group.start()


def place(plan: ShardPlan) -> Command:
    return Command(place_experts=ranks_pb2.PlaceExperts(shard_plan=plan.to_proto()))


def order(builder: PlanBuilder, command: Command) -> list[ranks_pb2.CommandReport]:
    """Have the group do it; every rank's report."""
    outputs = builder.command(command).outputs
    return [output.report or ranks_pb2.CommandReport() for output in outputs]


def complete(builder: PlanBuilder, *, num_tokens: int = 4, slot: int = 2) -> list[torch.Tensor]:
    """Logits of a greedy completion of PROMPT; its slot is free again when the next plan runs."""
    builder.start(slot, PROMPT)
    logits = []
    for _ in range(num_tokens):
        builder.schedule(slot)
        logits.append(builder.run().logits)
    builder.release(slot)
    return logits


def assert_near(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    assert all((a - b).abs().max() <= TOLERANCE for a, b in zip(first, second, strict=True))


def held(group: RankGroup) -> list[dict[int, tuple[int, ...]]]:
    """Experts of each rank, by layer, as its decoder has them."""
    runners: list[Any] = list(group.runners)
    shards = [runner._model_state.shard for runner in runners]
    return [
        {} if shard is None else {layer: mlp.numbers for layer, mlp in shard.decoder.expert_mlps.items()}
        for shard in shards
    ]


def planned(plan: ShardPlan) -> list[dict[int, tuple[int, ...]]]:
    """As a plan has them."""
    return [
        {
            layer: tuple(sorted(plan.experts_of(rank, layer)))
            for layer in range(plan.num_layers)
            if plan.ranks[rank].layers[layer].experts.size
        }
        for rank in range(plan.world_size)
    ]


@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("shares", [TWO_RANKS, HELPERS], ids=["two ranks", "helpers"])
def test_any_order_of_experts_equals_the_reference(tmp_path: Path, variant: str, shares: Shares) -> None:
    checkpoint = save(variant, tmp_path)
    group = RankGroup(checkpoint.directory, shares)
    load(group, plan := another(group))
    assert held(group) == planned(plan)
    builder = PlanBuilder(group)
    builder.start(0, PROMPT)
    tokens = list(PROMPT)
    for _ in range(3):
        builder.schedule(0)
        outcome = builder.run()
        assert_near([outcome.logits[0]], [checkpoint.logits(tokens)[-1]])
        tokens.append(outcome.sampled[0].token)


@pytest.mark.parametrize(
    ("shares", "num_gpu_ranks"),
    [(ONE_RANK, 0), (FOUR_RANKS, 0), (HELPERS, 0), (HELPERS, 1)],
    ids=["one rank", "four ranks", "helpers", "helpers of a pseudo GPU"],
)
def test_what_was_cached_before_experts_moved_stays_right(
    checkpoint: TinyCheckpoint, shares: Shares, num_gpu_ranks: int
) -> None:
    """Sequences go on from blocks that were computed under another plan, and equal the reference."""
    group = RankGroup(checkpoint.directory, shares, num_gpu_ranks=num_gpu_ranks)
    builder = PlanBuilder(group)
    tokens, blocks = list(PROMPT), list[int]()
    for seed in range(4):
        builder.start(0, tokens, shared_blocks=blocks)
        builder.schedule(0)
        outcome = builder.run()
        assert_near([outcome.logits[0]], [checkpoint.logits(tokens)[-1]])
        tokens.append(outcome.sampled[0].token)
        blocks = builder.sequences[0].blocks[: builder.sequences[0].computed // group.block_size]
        builder.release(0)
        reports = order(builder, place(plan := another(group, seed=seed)))
        assert [(report.done, report.problem) for report in reports] == [(True, "")] * len(reports)
        assert held(group) == planned(plan)
        assert [report.weight_bytes for report in reports] == [report.weight_bytes for report in group.reports]
        assert [bool(report.kv_bytes) for report in reports] == [bool(r.kv_bytes_per_token) for r in group.reports]


def test_moved_experts_compute_the_same_bits_as_loaded_ones(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, FOUR_RANKS)
    builder = PlanBuilder(group)
    complete(builder)
    order(builder, place(plan := another(group)))
    moved = complete(builder)
    fresh = RankGroup(checkpoint.directory, FOUR_RANKS)
    load(fresh, plan)
    assert all(map(torch.equal, moved, complete(PlanBuilder(fresh))))


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("num_gpu_ranks", [0, 1])
def test_experts_that_moved_come_back_from_sleep(checkpoint: TinyCheckpoint, level: int, num_gpu_ranks: int) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS, num_gpu_ranks=num_gpu_ranks)
    builder = PlanBuilder(group)
    order(builder, place(plan := another(group)))
    before = complete(builder)
    order(builder, Command(sleep=ranks_pb2.SleepCommand(level=level)))
    cache = ranks_pb2.AllocateCache(num_blocks=group.num_blocks, block_size=group.block_size)
    reports = order(builder, Command(wake=ranks_pb2.WakeCommand(weights=True, cache=cache)))
    assert [report.problem for report in reports] == ["", ""]
    assert held(group) == planned(plan)
    assert all(map(torch.equal, before, complete(builder)))


def test_the_next_epoch_keeps_experts_that_moved(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS)
    builder = PlanBuilder(group)
    order(builder, place(plan := another(group)))
    before = complete(builder)
    load(group, plan)
    assert [report.load_s for report in group.reports] == [0, 0]
    assert all(map(torch.equal, before, complete(PlanBuilder(group))))
    load(group, group.plan)
    assert all(report.load_s > 0 for report in group.reports), "under the first plan they are read again"
    assert held(group) == planned(group.plan)


def chosen_by_reference(checkpoint: TinyCheckpoint, tokens: list[int]) -> dict[int, list[int]]:
    """Tokens that chose each expert, by layer, as transformers routes them."""
    config = checkpoint.reference.config
    layers = [i for i, layer in enumerate(checkpoint.reference.model.layers) if hasattr(layer.mlp, "gate")]
    with torch.inference_mode():
        routers = checkpoint.reference(torch.tensor([tokens]), output_router_logits=True).router_logits
    best = [logits.topk(config.num_experts_per_tok).indices.flatten() for logits in routers]
    counts = [torch.bincount(experts, minlength=NUM_EXPERTS).tolist() for experts in best]
    return dict(zip(layers, counts, strict=True))


def counted(builder: PlanBuilder) -> list[dict[int, list[int]]]:
    reports = order(builder, Command(count_experts=ranks_pb2.CountExperts()))
    assert all(report.done for report in reports)
    return [{counts.layer: list(counts.tokens) for counts in report.expert_counts} for report in reports]


@pytest.mark.parametrize("chunk", [None, 3])
def test_counts_are_the_reference_s(checkpoint: TinyCheckpoint, chunk: int | None) -> None:
    group = RankGroup(checkpoint.directory, FOUR_RANKS)
    builder = PlanBuilder(group)
    counted(builder)
    builder.start(0, PROMPT)
    while builder.sequences[0].computed < len(PROMPT):
        builder.schedule(0, chunk)
        builder.run()
    builder.release(0)
    counts = counted(builder)
    total = {
        layer: [sum(column) for column in zip(*(own[layer] for own in counts if layer in own), strict=True)]
        for layer in group.requests[0].config.expert_layers
    }
    assert total == chosen_by_reference(checkpoint, PROMPT)
    assert [list(own) for own in counts] == [list(layers) for layers in held(group)]
    assert not any(any(tokens) for own in counted(builder) for tokens in own.values()), "counted anew"


def test_a_rank_counts_only_experts_that_it_holds(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS)
    builder = PlanBuilder(group)
    order(builder, place(plan := another(group)))
    complete(builder)
    for own, numbers in zip(counted(builder), planned(plan), strict=True):
        assert all(number in numbers[layer] for layer in own for number, n in enumerate(own[layer]) if n)


def test_a_dense_model_has_nothing_to_count(tmp_path: Path) -> None:
    builder = PlanBuilder(RankGroup(save_tiny("llama", tmp_path).directory, TWO_RANKS))
    assert counted(builder) == [{}, {}]


def test_a_rank_that_holds_nothing_takes_part(checkpoint: TinyCheckpoint) -> None:
    idle = Shares(kv_heads=((5, 0, 3),), mlp_columns=((50, 0, 0),), vocab_rows=(200, 0, 0), experts=((2, 0, 4),))
    group = RankGroup(checkpoint.directory, idle)
    builder = PlanBuilder(group)
    plan = another(group)
    assert all(report.done for report in order(builder, place(plan)))
    assert held(group) == planned(plan)
    complete(builder)
    assert [bool(own) for own in counted(builder)] == [True, False, True]


def assert_unchanged(builder: PlanBuilder, group: RankGroup, before: Sequence[torch.Tensor]) -> None:
    assert held(group) == planned(group.plan)
    assert all(map(torch.equal, before, complete(builder)))


def test_want_of_room_on_one_rank_leaves_all_as_they_were(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS)
    builder = PlanBuilder(group)
    before = complete(builder)
    runner: Any = group.runners[1]
    state = runner._model_state
    assert state._request is not None
    room = 384 * 1024**2 + state.weight_bytes + state.kv_bytes
    state._request = replace(state._request, memory_bytes=room)
    reports = order(builder, place(another(group)))
    assert [report.done for report in reports] == [False, False]
    assert reports[0].problem == ""
    assert "beside those that they replace" in reports[1].problem
    assert "- 384 MiB runtime -" in reports[1].problem
    assert_unchanged(builder, group, before)
    state._request = replace(state._request, memory_bytes=2 * room)
    assert all(report.done for report in order(builder, place(another(group))))


def test_files_that_are_gone_leave_all_as_they_were(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS)
    builder = PlanBuilder(group)
    before = complete(builder)
    weights = checkpoint.directory / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:4000])
    reports = order(builder, place(another(group)))
    assert not any(report.done for report in reports)
    assert all("damaged or truncated" in report.problem for report in reports)
    assert_unchanged(builder, group, before)
    weights.write_bytes(content)
    assert all(report.done for report in order(builder, place(another(group))))


def test_a_plan_that_moves_nothing_reads_nothing(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS)
    builder = PlanBuilder(group)
    (checkpoint.directory / "model.safetensors").rename(checkpoint.directory / "away.safetensors")
    (checkpoint.directory / "model.safetensors").write_bytes(b"")
    orders = [(1, 0, 5, 4, 3, 2) if i in group.requests[0].config.expert_layers else () for i in range(3)]
    same = replace(group.plan, expert_orders=tuple(orders))
    assert [report.problem for report in order(builder, place(same))] == ["", ""]
    assert held(group) == planned(group.plan)


def refused_plans(group: RankGroup) -> dict[str, tuple[ShardPlan, str]]:
    plan = another(group)
    other_units = TWO_RANKS.plan(3, expert_layers=group.requests[0].config.expert_layers)
    moved = replace(TWO_RANKS, experts=((3, 3),)).plan(3, expert_layers=group.requests[0].config.expert_layers)
    return {
        "other units": (moved, "in more than expert_orders"),
        "no permutation": (replace(other_units, expert_orders=((0,) * 6, (), ())), "no permutation"),
        "a dense layer": (replace(plan, expert_orders=((), (0, 1, 2, 3, 4, 5), ())), "no permutation"),
    }


@pytest.mark.parametrize("case", ["other units", "no permutation", "a dense layer"])
def test_a_plan_that_cannot_be_is_refused(checkpoint: TinyCheckpoint, case: str) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS)
    builder = PlanBuilder(group)
    before = complete(builder)
    plan, words = refused_plans(group)[case]
    for report in order(builder, place(plan)):
        assert not report.done
        assert words in report.problem
    assert_unchanged(builder, group, before)


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_experts_do_not_move(checkpoint: TinyCheckpoint, level: int) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS)
    builder = PlanBuilder(group)
    order(builder, Command(sleep=ranks_pb2.SleepCommand(level=level)))
    for report in order(builder, place(another(group))):
        assert not report.done
        assert "asleep (weights, KV cache)" in report.problem

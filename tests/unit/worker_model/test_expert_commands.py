"""Experts that move from rank to rank: by all ranks or by none, and what is computed stays what it was."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_api.errors import ModelError
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.checkpoints.checkpoint import Checkpoint
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


def place(plan: ShardPlan, *, ahead: bool = False) -> Command:
    return Command(place_experts=ranks_pb2.PlaceExperts(shard_plan=plan.to_proto(), ahead=ahead))


def order(builder: PlanBuilder, command: Command) -> list[ranks_pb2.CommandReport]:
    """Have the group do it; every rank's report."""
    outputs = builder.command(command).outputs
    return [output.report or ranks_pb2.CommandReport() for output in outputs]


def move(group: RankGroup, builder: PlanBuilder, wanted: ShardPlan) -> list[ranks_pb2.CommandReport]:
    """Have the group go over to a plan, two experts at a time; every rank's last report."""
    now = group.runners[0].held
    assert now is not None
    plan, reports = now.shard_plan, list[ranks_pb2.CommandReport]()
    for layer, numbers in enumerate(wanted.expert_orders):
        for at, number in enumerate(numbers):
            own = list(plan.expert_orders[layer] if plan.expert_orders else ()) or list(range(NUM_EXPERTS))
            if own[at] != number:
                plan = with_a_pair_swapped(plan, layer, at, own.index(number))
                until_read(builder, plan)
                reports = order(builder, place(plan))
                assert [(report.done, report.problem) for report in reports] == [(True, "")] * len(reports)
    return reports


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
        reports = move(group, builder, plan := another(group, seed=seed))
        assert held(group) == planned(plan)
        assert [report.weight_bytes for report in reports] == [report.weight_bytes for report in group.reports]
        assert [bool(report.kv_bytes) for report in reports] == [bool(r.kv_bytes_per_token) for r in group.reports]


def test_moved_experts_compute_the_same_bits_as_loaded_ones(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, FOUR_RANKS)
    builder = PlanBuilder(group)
    complete(builder)
    move(group, builder, plan := another(group))
    moved = complete(builder)
    fresh = RankGroup(checkpoint.directory, FOUR_RANKS)
    load(fresh, plan)
    assert all(map(torch.equal, moved, complete(PlanBuilder(fresh))))


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("num_gpu_ranks", [0, 1])
def test_experts_that_moved_come_back_from_sleep(checkpoint: TinyCheckpoint, level: int, num_gpu_ranks: int) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS, num_gpu_ranks=num_gpu_ranks)
    builder = PlanBuilder(group)
    move(group, builder, plan := another(group))
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
    move(group, builder, plan := another(group))
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
    move(group, builder, plan := another(group))
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
    move(group, builder, plan)
    assert held(group) == planned(plan)
    complete(builder)
    assert [bool(own) for own in counted(builder)] == [True, False, True]


def assert_unchanged(builder: PlanBuilder, group: RankGroup, before: Sequence[torch.Tensor]) -> None:
    assert held(group) == planned(group.plan)
    assert all(map(torch.equal, before, complete(builder)))


def replace_file(path: Path, content: bytes) -> None:
    """Put another file in its place: a rank may still have the old one mapped, and would die if it were cut short."""
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").replace(path)


def test_files_that_are_gone_leave_all_as_they_were(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS)
    builder = PlanBuilder(group)
    before = complete(builder)
    weights = checkpoint.directory / "model.safetensors"
    content = weights.read_bytes()
    replace_file(weights, content[:4000])
    plan = with_a_pair_swapped(group.plan, group.requests[0].config.expert_layers[0], 0, 4)
    reports = until_refused(builder, plan)
    assert any("damaged or truncated" in report.problem for report in reports)
    assert_unchanged(builder, group, before)
    replace_file(weights, content)
    move(group, builder, plan)


def test_a_plan_that_moves_nothing_reads_nothing(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS)
    builder = PlanBuilder(group)
    (checkpoint.directory / "model.safetensors").rename(checkpoint.directory / "away.safetensors")
    (checkpoint.directory / "model.safetensors").write_bytes(b"")
    orders = [(1, 0, 5, 4, 3, 2) if i in group.requests[0].config.expert_layers else () for i in range(3)]
    same = replace(group.plan, expert_orders=tuple(orders))
    assert until_read(builder, same) == 1
    assert [report.read_bytes for report in order(builder, place(same))] == [0, 0]
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
    for report in order(builder, place(plan, ahead=True)):
        assert not report.done
        assert words in report.problem
    assert_unchanged(builder, group, before)


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_experts_do_not_move(checkpoint: TinyCheckpoint, level: int) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS)
    builder = PlanBuilder(group)
    order(builder, Command(sleep=ranks_pb2.SleepCommand(level=level)))
    for report in order(builder, place(another(group), ahead=True)):
        assert not report.done
        assert "asleep (weights, KV cache)" in report.problem


# --- while requests run -------------------------------------------------------------------------------------

MIXED = Shares(kv_heads=((8, 0),), mlp_columns=((50, 0),), vocab_rows=(200, 0), experts=((2, 4),))


class GatedFiles:
    """Opens a model's files once `may_read` is set."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.may_read.set()

    def open(self, directory: Path) -> Checkpoint:
        assert self.may_read.wait(timeout=60)
        return Checkpoint(directory)


def gated(checkpoint: TinyCheckpoint, shares: Shares, *, num_gpu_ranks: int) -> tuple[RankGroup, GatedFiles]:
    group, files = RankGroup(checkpoint.directory, shares, num_gpu_ranks=num_gpu_ranks), GatedFiles()
    group.requests = [replace(request, open_weights=files.open) for request in group.requests]
    group.start()
    return group, files


def with_a_pair_swapped(plan: ShardPlan, layer: int, first: int, second: int) -> ShardPlan:
    """The plan with the experts at two places of a layer's order in each other's."""
    order = list(plan.expert_orders[layer] if plan.expert_orders else ()) or list(range(NUM_EXPERTS))
    order[first], order[second] = order[second], order[first]
    orders = list(plan.expert_orders or ((),) * plan.num_layers)
    orders[layer] = tuple(order)
    return replace(plan, expert_orders=tuple(orders))


def until_read(builder: PlanBuilder, plan: ShardPlan) -> int:
    """Ask until all ranks have read; how often they were asked."""
    deadline_s = time.monotonic() + 60
    for asked in itertools.count(1):
        if not any(report.is_reading for report in order(builder, place(plan, ahead=True))):
            return asked
        assert time.monotonic() < deadline_s
    raise AssertionError


def until_refused(builder: PlanBuilder, plan: ShardPlan) -> list[ranks_pb2.CommandReport]:
    """Ask until not all ranks can read; their reports."""
    deadline_s = time.monotonic() + 60
    reports = order(builder, place(plan, ahead=True))
    while all(report.done for report in reports):  # a rank may have failed since it looked, and tells it next time
        assert time.monotonic() < deadline_s
        reports = order(builder, place(plan, ahead=True))
    assert not any(report.done for report in reports)
    return reports


def test_what_was_not_read_is_not_gone_over_to(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS)
    for report in order(PlanBuilder(group), place(another(group))):
        assert not report.done
        assert "its experts were not read; order it with ahead first" in report.problem
    assert held(group) == planned(group.plan)


@pytest.mark.parametrize("num_gpu_ranks", [0, 1])
def test_steps_go_on_while_experts_are_read(checkpoint: TinyCheckpoint, num_gpu_ranks: int) -> None:
    group, files = gated(checkpoint, MIXED, num_gpu_ranks=num_gpu_ranks)
    builder = PlanBuilder(group)
    layer = group.requests[0].config.expert_layers[0]
    plan = with_a_pair_swapped(group.plan, layer, 0, 4)
    complete(builder)
    files.may_read.clear()
    reports = order(builder, place(plan, ahead=True))
    assert [(report.done, report.is_reading, report.problem) for report in reports] == [(True, True, "")] * 2
    assert all(report.is_reading for report in order(builder, place(plan, ahead=True)))
    complete(builder)
    reports = order(builder, place(plan))
    assert {report.problem for report in reports} == {"experts are still being read"}
    assert held(group) == planned(group.plan)
    files.may_read.set()
    until_read(builder, plan)
    files.may_read.clear()
    reports = order(builder, place(plan))
    assert [report.done for report in reports] == [True, True], "nothing is read any more"
    assert all(report.read_bytes > 0 for report in reports)
    assert held(group) == planned(plan)
    files.may_read.set()
    moved, loaded = complete(builder), RankGroup(checkpoint.directory, MIXED, num_gpu_ranks=num_gpu_ranks)
    load(loaded, plan)
    assert all(map(torch.equal, moved, complete(PlanBuilder(loaded))))


def test_one_expert_of_a_layer_at_a_time_is_read_beside_steps(checkpoint: TinyCheckpoint) -> None:
    """There is memory for one."""
    group = RankGroup(checkpoint.directory, MIXED)
    layer = group.requests[0].config.expert_layers[0]
    plan = with_a_pair_swapped(with_a_pair_swapped(group.plan, layer, 0, 4), layer, 1, 5)
    reports = order(PlanBuilder(group), place(plan, ahead=True))
    assert [report.done for report in reports] == [False, False]
    assert "2 experts cannot be read beside steps, for which one has room" in reports[0].problem


def test_experts_that_cannot_be_read_stay_where_they_are(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, MIXED)

    def fail(directory: Path) -> Checkpoint:
        raise ModelError(f"{directory} is gone")

    group.requests = [replace(request, open_weights=fail) for request in group.requests]
    group.start()  # with the weights that are there
    builder = PlanBuilder(group)
    plan = with_a_pair_swapped(group.plan, group.requests[0].config.expert_layers[0], 0, 4)
    reports = until_refused(builder, plan)
    assert all("is gone" in report.problem or not report.problem for report in reports)
    assert held(group) == planned(group.plan)
    complete(builder)


def test_eight_streams_go_on_through_swaps(checkpoint: TinyCheckpoint) -> None:
    """GPU rank and CPU rank exchange experts back and forth; tokens differ only where two are as good."""
    swapping, still = (RankGroup(checkpoint.directory, MIXED, num_gpu_ranks=1, num_blocks=100) for _ in range(2))
    builders = [PlanBuilder(swapping), PlanBuilder(still)]
    for slot, builder in itertools.product(range(8), builders):
        builder.start(slot, [(slot * 37 + i * 11 + 5) % 200 for i in range(5)])
    plan, pauses_s, parted = swapping.plan, list[float](), set[int]()
    layers = swapping.requests[0].config.expert_layers
    for step in range(24):
        for slot, builder in itertools.product(range(8), builders):
            builder.schedule(slot)
        mine, theirs = (builder.run() for builder in builders)
        for slot in set(range(8)) - parted:
            assert (mine.logits[slot] - theirs.logits[slot]).abs().max() <= TOLERANCE
            if mine.sampled[slot] != theirs.sampled[slot]:
                parted.add(slot)
                best = theirs.logits[slot].topk(2).values
                assert best[0] - best[1] <= TOLERANCE
        if step % 4 == 3:
            plan = with_a_pair_swapped(plan, layers[step // 4 % len(layers)], step // 4 % 2, 2 + step // 8)
            until_read(builders[0], plan)
            began_s = time.perf_counter()
            assert all(report.done for report in order(builders[0], place(plan)))
            pauses_s.append(time.perf_counter() - began_s)
    assert held(swapping) == planned(plan) != planned(still.plan)
    assert len(parted) <= 1
    assert statistics.median(pauses_s) <= 0.005

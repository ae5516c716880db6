"""Adapters come and go between steps of running requests, on all ranks or on none; recorded steps stay right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_api.model_directory import ADAPTER_CONFIG
from hetero_api.v1 import ranks_pb2
from hetero_worker.errors import ProtocolError
from hetero_worker.runners.recorded.forward import NativeForward
from tests.support.lora_adapters import SavedAdapter, save_adapter, split_experts
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.tiny_checkpoints import NUM_EXPERTS, TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

TOLERANCE = 1e-4
ONE_RANK = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,))
TWO_RANKS = Shares(kv_heads=((5, 3),), mlp_columns=((20, 30),), vocab_rows=(64, 136))
THREE_RANKS = Shares(kv_heads=((5, 0, 3),), mlp_columns=((0, 20, 30),), vocab_rows=(64, 136, 0))
LAYOUTS = {"one": (ONE_RANK, 0), "two": (TWO_RANKS, 0), "a GPU and two more": (THREE_RANKS, 1)}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = [7, 150, 3, 88, 199, 0, 42]

Command = ranks_pb2.GroupCommand


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return save_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def adapters(checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> list[SavedAdapter]:
    """All lie in one folder."""
    root = tmp_path_factory.mktemp("adapters")
    save = partial(save_adapter, checkpoint.directory)
    return [
        save(root / "all", modules=ALL, rank=8, seed=1),
        save(root / "some", modules=("q_proj", "down_proj"), rank=5, seed=2),
    ]


def load(number: int, directory: Path, root: Path | None = None) -> Command:
    asked = ranks_pb2.LoadAdapter(number=number, directory=str(directory), root=str(root or directory.parent))
    return Command(load_adapter=asked)


def unload(number: int) -> Command:
    return Command(unload_adapter=ranks_pb2.UnloadAdapter(number=number))


def outcome(builder: PlanBuilder, command: Command) -> tuple[bool, str]:
    """Whether all ranks did it, and the problem that the first of them names."""
    reports = [output.report for output in builder.command(command).outputs if output.report is not None]
    assert len({report.done for report in reports}) == 1
    return reports[0].done, next((report.problem for report in reports if report.problem), "")


def steps(builder: PlanBuilder, slots: Sequence[int], count: int) -> dict[int, list[torch.Tensor]]:
    """Logits of each slot, step by step."""
    logits: dict[int, list[torch.Tensor]] = {slot: [] for slot in slots}
    for _ in range(count):
        for slot in slots:
            builder.schedule(slot)
        done = builder.run()
        for (slot, _token), row in zip(done.sampled, done.logits, strict=True):
            logits[slot].append(row)
    return logits


def assert_like(builder: PlanBuilder, slot: int, got: Sequence[torch.Tensor], wanted: torch.Tensor) -> None:
    begin = len(builder.sequences[slot].tokens) - len(got) - 1
    for position, row in enumerate(got, start=begin):
        assert (row - wanted[position]).abs().max() <= TOLERANCE, (slot, position)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_of_several_adapters_and_of_none_run_together(
    checkpoint: TinyCheckpoint, adapters: list[SavedAdapter], layout: str
) -> None:
    """Steps with adapters are made, recorded and replayed, while one adapter goes and another takes its number."""
    shares, num_gpu_ranks = LAYOUTS[layout]
    group = RankGroup(checkpoint.directory, shares, num_gpu_ranks=num_gpu_ranks, max_adapters=2)
    builder = PlanBuilder(group)
    builder.start(0, PROMPT)
    base = steps(builder, [0], 3)[0]
    assert outcome(builder, load(1, adapters[0].directory)) == (True, "")
    builder.start(1, PROMPT, adapter=1)
    both = steps(builder, [0, 1], 4)
    assert outcome(builder, load(2, adapters[1].directory)) == (True, "")
    builder.start(2, PROMPT[::-1], adapter=2)
    three = steps(builder, [0, 1, 2], 4)
    tokens = {slot: builder.sequences[slot].tokens for slot in range(3)}
    assert_like(builder, 0, [*base, *both[0], *three[0]], checkpoint.logits(tokens[0]))
    assert_like(builder, 1, [*both[1], *three[1]], adapters[0].logits(tokens[1]))
    assert_like(builder, 2, three[2], adapters[1].logits(tokens[2]))
    builder.release(1)
    assert outcome(builder, unload(1)) == (True, "")
    assert outcome(builder, load(1, adapters[1].directory)) == (True, "")
    builder.start(3, PROMPT, adapter=1)
    again = steps(builder, [0, 2, 3], 3)
    assert_like(builder, 3, again[3], adapters[1].logits(builder.sequences[3].tokens))
    assert_like(builder, 0, again[0], checkpoint.logits(builder.sequences[0].tokens))


def test_steps_with_adapters_are_recorded_beside_those_without(
    checkpoint: TinyCheckpoint, adapters: list[SavedAdapter]
) -> None:
    """They draw by themselves too; a step without adapters has no operation of theirs."""
    group = RankGroup(checkpoint.directory, ONE_RANK, max_adapters=1, keeps_logits=False)
    builder = PlanBuilder(group)
    builder.start(0, PROMPT)
    builder.start(1, PROMPT)
    for _ in range(6):
        builder.schedule(0)
        builder.schedule(1)
        builder.run()
    assert outcome(builder, load(1, adapters[0].directory))[0]
    builder.release(1)
    builder.start(2, PROMPT, adapter=1)
    for _ in range(8):
        builder.schedule(0)
        builder.schedule(2)
        builder.run()
    cache = group.runners[0]._model_state.cache
    assert cache is not None
    assert isinstance(cache.forward, NativeForward)
    assert cache.forward._bound is not None
    numbers: dict[bool, int] = {}
    for step, recorded in cache.forward._bound.passes.values():
        segments: Any = () if recorded is None else recorded.parts
        numbers[step.adapters is not None] = sum(len(part.recorded.ops) for part in segments)
    linears, gates = 4 * 3, 3  # of three layers; without adapters a layer's gates are one operation with their product
    assert numbers[True] == numbers[False] + linears + gates
    expected = adapters[0].logits(builder.sequences[2].tokens)
    greedy = expected.argmax(1).tolist()[len(PROMPT) - 1 : -1]
    assert builder.sequences[2].tokens[len(PROMPT) :] == greedy


@pytest.mark.parametrize("layout", ["one", "two"])
def test_what_cannot_be_done_is_refused_and_changes_nothing(
    checkpoint: TinyCheckpoint, adapters: list[SavedAdapter], tmp_path: Path, layout: str
) -> None:
    group = RankGroup(checkpoint.directory, LAYOUTS[layout][0], max_adapters=1)
    builder, directory = PlanBuilder(group), adapters[0].directory
    bad = tmp_path / "bad"
    save_adapter(checkpoint.directory, bad, modules=("q_proj",))
    config = json.loads((bad / ADAPTER_CONFIG).read_text())
    (bad / ADAPTER_CONFIG).write_text(json.dumps(config | {"use_dora": True}))
    (tmp_path / "link").symlink_to(directory)
    for command, problem in (
        (load(2, directory), "1 may be loaded"),
        (load(0, directory), "1 may be loaded"),
        (load(1, bad), "use_dora: True is not served"),
        (load(1, tmp_path / "none"), "cannot be read"),
        (load(1, tmp_path / "link"), "outside"),
    ):
        done, told = outcome(builder, command)
        assert not done
        assert problem in told
    assert outcome(builder, load(1, directory))[0]
    builder.start(0, PROMPT, adapter=1)
    steps(builder, [0], 2)
    assert "a slot uses it" in outcome(builder, load(1, directory))[1]
    assert "a slot uses it" in outcome(builder, unload(1))[1]
    builder.release(0)
    assert outcome(builder, unload(1))[0]
    builder.start(1, PROMPT, adapter=1)
    builder.schedule(1)
    with pytest.raises(ProtocolError, match="slot 1 wants adapter 1, which is not loaded"):
        builder.run()


def test_a_new_epoch_has_no_adapters(checkpoint: TinyCheckpoint, adapters: list[SavedAdapter]) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS, max_adapters=1)
    assert outcome(PlanBuilder(group), load(1, adapters[0].directory))[0]
    group.start()
    assert outcome(PlanBuilder(group), load(1, adapters[0].directory)) == (True, "")


def test_memory_is_kept_for_adapters(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, ONE_RANK, max_adapters=3)
    shard = group.runners[0]._model_state.shard
    assert shard is not None
    budget = shard._budget(group.requests[0], 0)
    qkv, others = 3 * 32 + (16 + 8 + 8) * 8, (128 + 32) + 2 * (32 + 50) + (50 + 32)
    assert budget.adapter_bytes == 3 * (3 * 16 * (qkv + others) * 4), "adapters, layers, rank, widths, float32"
    assert replace(budget, adapter_bytes=0).left_bytes - budget.left_bytes == budget.adapter_bytes


EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
WHOLE = replace(TWO_RANKS, experts=((2, 4),))
SLICED = replace(TWO_RANKS, expert_slices=(3, 7))


@pytest.mark.parametrize("shares", [WHOLE, SLICED], ids=["whole", "sliced"])
@pytest.mark.parametrize("variant", ["qwen3-moe", "glm4-moe-grouped", "qwen3-next"])
def test_adapters_of_experts_come_in_place_of_others_whose_steps_were_recorded(
    tmp_path: Path, variant: str, shares: Shares
) -> None:
    """Rows without an adapter keep their bits beside them."""
    checkpoint = save_tiny(variant, tmp_path / "model")
    save = partial(save_adapter, checkpoint.directory, modules=("o_proj",), rank=3)
    plain, experts = save(tmp_path / "plain"), save(tmp_path / "experts", target_parameters=EXPERTS, seed=1)
    group = RankGroup(checkpoint.directory, shares, max_adapters=2, adapts_experts=True)
    builder = PlanBuilder(group)
    assert outcome(builder, load(1, plain.directory)) == (True, "")
    builder.start(0, PROMPT)
    builder.start(1, PROMPT, adapter=1)
    before = steps(builder, [0, 1], 5)
    tokens = {slot: builder.sequences[slot].tokens for slot in range(2)}
    assert_like(builder, 0, before[0], checkpoint.logits(tokens[0]))
    assert_like(builder, 1, before[1], plain.logits(tokens[1]))
    for slot in range(2):
        builder.release(slot)
    assert outcome(builder, load(1, experts.directory)) == (True, "")
    builder.start(0, PROMPT)
    builder.start(1, PROMPT, adapter=1)
    behind = steps(builder, [0, 1], 5)
    assert all(map(torch.equal, before[0], behind[0]))
    assert_like(builder, 1, behind[1], experts.logits(builder.sequences[1].tokens))
    assert (before[1][0] - behind[1][0]).abs().max() > 100 * TOLERANCE
    builder.release(1)
    assert outcome(builder, load(1, plain.directory)) == (True, "")
    builder.start(1, PROMPT, adapter=1)
    again = steps(builder, [0, 1], 5)
    assert all(map(torch.equal, before[1], again[1]))
    assert_like(builder, 0, again[0], checkpoint.logits(builder.sequences[0].tokens))


def test_steps_with_adapters_of_experts_are_recorded_with_no_more_operations(tmp_path: Path) -> None:
    """An adapter that came after the recording is part of it, too."""
    checkpoint = save_tiny("qwen3-moe", tmp_path / "model")
    save = partial(save_adapter, checkpoint.directory, modules=("o_proj",), rank=3)
    plain, experts = save(tmp_path / "plain"), save(tmp_path / "experts", target_parameters=EXPERTS, seed=1)
    alone = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),))
    operations = []
    for takes in (False, True):
        group = RankGroup(checkpoint.directory, alone, max_adapters=2, adapts_experts=takes, keeps_logits=False)
        builder = PlanBuilder(group)
        assert outcome(builder, load(1, plain.directory))[0]
        builder.start(0, PROMPT, adapter=1)
        for _ in range(4):
            builder.schedule(0)
            builder.run()
        cache = group.runners[0]._model_state.cache
        assert cache is not None
        assert isinstance(cache.forward, NativeForward)
        assert cache.forward._bound is not None
        passes = cache.forward._bound.passes
        ((_, recorded),) = passes.values()
        segments: Any = () if recorded is None else recorded.parts
        operations.append(sum(len(part.recorded.ops) for part in segments))
    assert operations[0] == operations[1] > 0
    builder.release(0)
    assert outcome(builder, load(2, experts.directory))[0]
    builder.start(1, PROMPT, adapter=2)
    for _ in range(5):
        builder.schedule(1)
        builder.run()
    assert len(passes) == 1
    tokens = builder.sequences[1].tokens
    assert tokens[len(PROMPT) :] == experts.logits(tokens).argmax(1).tolist()[len(PROMPT) - 1 : -1]


def test_adapters_of_experts_are_refused_where_nothing_is_kept_for_them(tmp_path: Path) -> None:
    checkpoint = save_tiny("qwen3-moe", tmp_path / "model")
    save = partial(save_adapter, checkpoint.directory, modules=("o_proj",), rank=3)
    stacked = save(tmp_path / "stacked", target_parameters=EXPERTS).directory
    split = split_experts(stacked, tmp_path / "split", num_experts=NUM_EXPERTS)
    builder = PlanBuilder(RankGroup(checkpoint.directory, WHOLE, max_adapters=1))
    for directory in (stacked, split):
        done, problem = outcome(builder, load(1, directory))
        assert (done, "takes no adapter in this model" in problem) == (False, True), problem
        assert "engine.adapters.experts" in problem


def test_adapters_change_experts_of_gpu_ranks_beside_those_of_cpu_ranks(tmp_path: Path) -> None:
    checkpoint = save_tiny("qwen3-moe", tmp_path / "model")
    experts = save_adapter(
        checkpoint.directory, tmp_path / "experts", modules=("o_proj",), rank=3, target_parameters=EXPERTS
    )
    builder = PlanBuilder(RankGroup(checkpoint.directory, WHOLE, max_adapters=1, adapts_experts=True, num_gpu_ranks=1))
    assert outcome(builder, load(1, experts.directory)) == (True, "")
    builder.start(0, PROMPT)
    builder.start(1, PROMPT, adapter=1)
    got = steps(builder, [0, 1], 4)
    assert_like(builder, 0, got[0], checkpoint.logits(builder.sequences[0].tokens))
    assert_like(builder, 1, got[1], experts.logits(builder.sequences[1].tokens))

"""Reset, sleep, wake and profiles: done by all ranks or by none, and computing goes on with the very same bits."""

from __future__ import annotations

import gzip
import json
import re
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_api.errors import ModelError
from hetero_api.v1 import ranks_pb2
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.checkpoints.sampled_digests import sampled_digests
from hetero_worker.errors import CacheLostError, ProtocolError, WeightsChangedError, WeightsDamagedError
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.model_state import ServingCache, make_cache
from hetero_worker.runners.plan_runner import PlanRunner
from hetero_worker.runners.step_times import StepRecorder
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.tiny_checkpoints import TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

BLOCKS, BLOCK_SIZE = 24, 4
ONE_RANK = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,))
THREE_RANKS = Shares(kv_heads=((5, 0, 3),), mlp_columns=((0, 20, 30),), vocab_rows=(64, 136, 0))
PROMPT = [7, 150, 3, 88, 199, 0, 42, 42, 64, 63, 127]

Command = ranks_pb2.GroupCommand


def cache(num_blocks: int = BLOCKS, block_size: int = BLOCK_SIZE) -> ranks_pb2.AllocateCache:
    return ranks_pb2.AllocateCache(num_blocks=num_blocks, block_size=block_size)


def reset(num_blocks: int, block_size: int) -> Command:
    return Command(reset_cache=cache(num_blocks, block_size))


def sleep(level: int) -> Command:
    return Command(sleep=ranks_pb2.SleepCommand(level=level))


def wake(*, weights: bool = True, with_cache: bool = True) -> Command:
    return Command(wake=ranks_pb2.WakeCommand(weights=weights, cache=cache() if with_cache else None))


@pytest.fixture
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return save_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


LAYOUTS = {"one rank": (ONE_RANK, 0), "three ranks": (THREE_RANKS, 0), "a GPU and two more": (THREE_RANKS, 1)}


@pytest.fixture(params=LAYOUTS.values(), ids=list(LAYOUTS))
def group(checkpoint: TinyCheckpoint, request: pytest.FixtureRequest) -> RankGroup:
    shares, num_gpu_ranks = request.param
    return RankGroup(
        checkpoint.directory, shares, num_blocks=BLOCKS, block_size=BLOCK_SIZE, num_gpu_ranks=num_gpu_ranks
    )


UPDATE = Command(update_weights=ranks_pb2.UpdateWeights())


def layers_of(runner: PlanRunner) -> list[LayerCache]:
    cache = runner._model_state.cache
    assert cache is not None
    return [layer for layer in cache.layers if layer is not None]


def decoder_of(runner: PlanRunner) -> Decoder:
    shard = runner._model_state.shard
    assert shard is not None
    return shard.decoder


def order(builder: PlanBuilder, command: Command) -> list[ranks_pb2.CommandReport]:
    """Have the group do it; every rank's report."""
    outputs = builder.command(command).outputs
    return [output.report or ranks_pb2.CommandReport() for output in outputs]


def complete(builder: PlanBuilder, *, num_tokens: int = 4) -> list[torch.Tensor]:
    """Logits of a greedy completion of PROMPT; its slot is free again when the next plan runs."""
    builder.start(2, PROMPT)
    logits = []
    for _ in range(num_tokens):
        builder.schedule(2)
        logits.append(builder.run().logits)
    builder.release(2)
    return logits


def assert_same_bits(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "waking",
    [[wake()], [wake(with_cache=False), wake(weights=False)], [wake(weights=False), wake(with_cache=False)]],
    ids=["at once", "weights first", "cache first"],
)
def test_logits_are_the_same_bits_after_sleep(group: RankGroup, level: int, waking: list[Command]) -> None:
    builder = PlanBuilder(group)
    before = complete(builder)
    asleep = order(builder, sleep(level))
    for command in waking:
        awake = order(builder, command)
        assert all(report.done and not report.problem for report in awake)
    assert_same_bits(before, complete(builder))
    weights = [report.weight_bytes for report in group.reports]
    assert [report.weight_bytes for report in asleep] == (weights if level == 1 else [0] * len(weights))
    assert all(report.done and report.kv_bytes == 0 for report in asleep)
    assert [report.weight_bytes for report in awake] == weights
    tokens = BLOCKS * BLOCK_SIZE
    assert [report.kv_bytes for report in awake] == [tokens * report.kv_bytes_per_token for report in group.reports]


@pytest.mark.parametrize(("num_blocks", "block_size"), [(9, 128), (40, 3), (200, 1), (3, 16)])
def test_logits_are_the_same_in_a_cache_of_another_shape(group: RankGroup, num_blocks: int, block_size: int) -> None:
    """Among them contiguous: one block a sequence, as long as the longest."""
    builder = PlanBuilder(group)
    before = complete(builder)
    reports = order(builder, reset(num_blocks, block_size))
    tokens = num_blocks * block_size
    assert [report.kv_bytes for report in reports] == [tokens * r.kv_bytes_per_token for r in group.reports]
    builder.use_blocks(num_blocks, block_size)
    other = complete(builder)
    order(builder, reset(BLOCKS, BLOCK_SIZE))
    builder.use_blocks(BLOCKS, BLOCK_SIZE)
    assert_same_bits(before, complete(builder))
    assert all((a - b).abs().max() <= 1e-4 for a, b in zip(before, other, strict=True))


def test_a_reset_that_one_rank_cannot_do_is_done_by_none(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, THREE_RANKS, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    smallest = min(r.kv_budget_bytes // r.kv_bytes_per_token for r in group.reports if r.kv_bytes_per_token)
    builder = PlanBuilder(group)
    builder.start(0, PROMPT)
    builder.schedule(0)
    builder.run()
    builder.release(0)
    reports = order(builder, reset(smallest // 100 + 1, 100))
    assert not any(report.done for report in reports)
    assert [bool(report.problem) for report in reports] == [
        bool(r.kv_bytes_per_token) and r.kv_budget_bytes // r.kv_bytes_per_token == smallest for r in group.reports
    ]
    assert "ask for fewer blocks" in "".join(report.problem for report in reports)
    complete(builder)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=str)
def test_want_of_memory_on_one_rank_leaves_all_as_they_were(
    group: RankGroup, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = PlanBuilder(group)
    before = complete(builder)
    calls = []

    def fail_once(*args: Any, **more: Any) -> ServingCache:
        calls.append(1)
        if len(calls) == 1:
            raise error
        return make_cache(*args, **more)

    monkeypatch.setattr("hetero_worker.runners.commands.make_cache", fail_once)
    reports = order(builder, reset(8, 8))
    assert not any(report.done for report in reports)
    assert sum(bool(report.problem) for report in reports) == 1
    assert_same_bits(before, complete(builder))


def test_the_old_cache_is_gone_before_another_is_allocated(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache usually fills the memory: beside it there is no room for a second one."""
    builder = PlanBuilder(group)
    before = complete(builder)
    old: dict[Decoder, list[weakref.ref[torch.Tensor]]] = {}
    for runner in group.runners:
        shard, held = runner._model_state.shard, runner._model_state.cache
        assert shard is not None
        assert held is not None
        old[shard.decoder] = [weakref.ref(layer.keys) for layer in held.layers if layer is not None]
    del shard, held, runner

    def make_alone(*args: Any, decoder: Decoder, **more: Any) -> ServingCache:
        assert not any(keys() is not None for keys in old[decoder]), "the old cache is still there"
        return make_cache(*args, decoder=decoder, **more)

    monkeypatch.setattr("hetero_worker.runners.commands.make_cache", make_alone)
    assert all(report.done for report in order(builder, reset(BLOCKS, BLOCK_SIZE)))
    assert_same_bits(before, complete(builder))


def test_a_cache_that_cannot_be_allocated_again_ends_the_epoch(
    checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = RankGroup(checkpoint.directory, ONE_RANK, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    builder = PlanBuilder(group)

    def fail(*args: Any, **more: Any) -> ServingCache:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("hetero_worker.runners.commands.make_cache", fail)
    with pytest.raises(CacheLostError, match=f"{BLOCKS} blocks of {BLOCK_SIZE} tokens cannot be allocated again"):
        order(builder, reset(8, 8))


ASLEEP: dict[str, tuple[list[Command], str]] = {
    "all": ([sleep(2)], "asleep (weights, KV cache)"),
    "weights": ([sleep(1), wake(weights=False)], "asleep (weights)"),
    "cache": ([sleep(1), wake(with_cache=False)], "asleep (KV cache)"),
}


@pytest.mark.parametrize("what", ASLEEP)
def test_a_rank_that_is_asleep_computes_nothing(checkpoint: TinyCheckpoint, what: str) -> None:
    builder = PlanBuilder(RankGroup(checkpoint.directory, ONE_RANK, num_blocks=BLOCKS, block_size=BLOCK_SIZE))
    falling_asleep, words = ASLEEP[what]
    for command in falling_asleep:
        assert all(report.done for report in order(builder, command))
    assert builder.run().sampled == []
    builder.start(0, PROMPT)
    builder.schedule(0)
    with pytest.raises(ProtocolError, match=re.escape(words)):
        builder.run()


REFUSED: dict[str, tuple[list[Command], Command, str]] = {
    "sleep twice": ([sleep(1)], sleep(2), "asleep already"),
    "level 3": ([], sleep(3), "there are 1 and 2"),
    "wake while awake": ([], wake(with_cache=False), "weights are awake"),
    "a cache that is awake": ([sleep(1), wake(weights=False)], wake(weights=False), "cache is awake"),
    "weights that are awake": ([sleep(2), wake(with_cache=False)], wake(with_cache=False), "weights are awake"),
    "wake of nothing": ([sleep(1)], wake(weights=False, with_cache=False), "neither weights nor cache"),
    "update while asleep": ([sleep(1)], UPDATE, "cannot be updated while the rank is asleep"),
    "reset while asleep": ([sleep(1)], reset(8, 8), "cannot be reset while the rank is asleep"),
    "a cache of no tokens": ([], reset(1, 8), "holds nothing beside the null block"),
    "stop of no profile": ([], Command(stop_profile=ranks_pb2.StopProfile()), "start one first"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_command_in_the_wrong_state_is_told_and_changes_nothing(checkpoint: TinyCheckpoint, case: str) -> None:
    builder = PlanBuilder(RankGroup(checkpoint.directory, ONE_RANK, num_blocks=BLOCKS, block_size=BLOCK_SIZE))
    before, command, words = REFUSED[case]
    state = [order(builder, done)[0] for done in before][-1:]
    (report,) = order(builder, command)
    assert not report.done
    assert words in report.problem
    assert all((report.weight_bytes, report.kv_bytes) == (s.weight_bytes, s.kv_bytes) for s in state)


def test_weights_that_changed_in_memory_are_found_on_waking(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, ONE_RANK, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    builder = PlanBuilder(group)
    order(builder, sleep(1))
    shard = group.runners[0]._model_state.shard
    assert shard is not None
    norm = shard.decoder._layers[1].parts[0]._norm._weight
    norm[3] += 0.01
    with pytest.raises(WeightsDamagedError):
        order(builder, wake())
    group.start()
    assert all(report.load_s > 0 for report in group.reports), "the next epoch reads them anew"


def test_other_weights_in_the_files_are_found_on_waking(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, THREE_RANKS, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    builder = PlanBuilder(group)
    order(builder, sleep(2))
    save_tiny("qwen3", checkpoint.directory, seed=1)
    with pytest.raises(WeightsChangedError, match="not those that went to sleep"):
        order(builder, wake())


def test_weights_that_differ_among_ranks_replace_none(checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    group = RankGroup(checkpoint.directory, THREE_RANKS, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    builder = PlanBuilder(group)
    before = complete(builder)
    state = group.runners[1]._model_state
    assert state.shard is not None
    other = save_tiny("qwen3", tmp_path, seed=1).directory
    state.shard = replace(state.shard, request=replace(state.shard.request, directory=other))
    reports = order(builder, UPDATE)
    assert not any(report.done for report in reports)
    assert all("weights of ranks 1 are not those of rank 0" in report.problem for report in reports)
    assert "model.safetensors" in reports[0].problem
    assert_same_bits(before, complete(builder))


def test_files_that_changed_since_the_rank_joined_are_not_loaded(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, ONE_RANK, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    (runner,) = group.runners
    request = runner.held
    assert request is not None
    named = replace(request, files=sampled_digests(checkpoint.directory), dtype="bfloat16")
    assert runner.load(named).load_s > 0
    save_tiny("qwen3", checkpoint.directory, seed=1)
    with pytest.raises(WeightsChangedError, match=r"model\.safetensors changed since this rank joined"):
        runner.load(replace(named, dtype="float32"))


def test_weights_are_replaced_while_the_cache_stays(group: RankGroup, checkpoint: TinyCheckpoint) -> None:
    builder = PlanBuilder(group)
    before = complete(builder)
    kept = [[layer.keys.data_ptr() for layer in layers_of(runner)] for runner in group.runners]
    held = [weakref.ref(decoder_of(runner)) for runner in group.runners]
    save_tiny("qwen3", checkpoint.directory, seed=1)
    assert all(report.done and not report.problem for report in order(builder, UPDATE))
    assert not any(decoder() for decoder in held), "the old weights are still there"
    after = complete(builder)
    assert [[layer.keys.data_ptr() for layer in layers_of(runner)] for runner in group.runners] == kept
    assert not torch.equal(before[0], after[0])
    group.start()
    assert all(report.load_s == 0 for report in group.reports), "an epoch goes on with the weights that serve"
    for runner in group.runners:
        runner._model_state.drop_shard()
    group.start()
    assert_same_bits(after, complete(PlanBuilder(group)))


def test_a_rank_that_slept_wakes_with_the_weights_that_were_updated(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, ONE_RANK, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    builder = PlanBuilder(group)
    save_tiny("qwen3", checkpoint.directory, seed=1)
    order(builder, UPDATE)
    after = complete(builder)
    order(builder, sleep(2))
    assert all(report.done for report in order(builder, wake()))
    assert_same_bits(after, complete(builder))


def test_weights_of_another_shape_end_the_epoch(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, ONE_RANK, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    builder = PlanBuilder(group)
    save_tiny("qwen3", checkpoint.directory, hidden_size=128)
    with pytest.raises(ModelError, match="shape"):
        order(builder, UPDATE)


def test_files_that_are_gone_leave_the_weights_that_serve(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, ONE_RANK, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    builder = PlanBuilder(group)
    before = complete(builder)
    (checkpoint.directory / "model.safetensors").unlink()
    (report,) = order(builder, UPDATE)
    assert not report.done
    assert "no weights" in report.problem
    assert_same_bits(before, complete(builder))


def test_files_that_are_gone_leave_the_group_asleep_until_they_are_back(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, ONE_RANK, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    builder = PlanBuilder(group)
    before = complete(builder)
    order(builder, sleep(2))
    weights = checkpoint.directory / "model.safetensors"
    weights.rename(checkpoint.directory / "elsewhere")
    (report,) = order(builder, wake())
    assert not report.done
    assert "no weights" in report.problem
    (checkpoint.directory / "elsewhere").rename(weights)
    assert all(report.done for report in order(builder, wake()))
    assert_same_bits(before, complete(builder))


def test_a_new_epoch_is_awake(group: RankGroup) -> None:
    builder = PlanBuilder(group)
    before = complete(builder)
    order(builder, sleep(2))
    group.start()
    assert all(report.load_s > 0 for report in group.reports)
    assert_same_bits(before, complete(PlanBuilder(group)))


def test_what_sleep_gives_back_is_measured(tmp_path: Path) -> None:
    checkpoint = save_tiny("llama", tmp_path, vocab_size=60_000, hidden_size=256)
    group = RankGroup(
        checkpoint.directory, Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(60_000,)), num_blocks=BLOCKS
    )
    (report,) = order(PlanBuilder(group), sleep(2))
    assert 0.8 * group.reports[0].weight_bytes < report.freed_bytes < 3 * group.reports[0].weight_bytes


def alone(checkpoint: TinyCheckpoint) -> PlanBuilder:
    """One rank on this thread: a profiler belongs to the thread that started it."""
    return PlanBuilder(RankGroup(checkpoint.directory, ONE_RANK, num_blocks=BLOCKS, block_size=BLOCK_SIZE))


@pytest.mark.parametrize("with_trace", [False, True])
def test_a_profile_tells_where_the_time_went(checkpoint: TinyCheckpoint, with_trace: bool) -> None:
    builder = alone(checkpoint)
    start = Command(start_profile=ranks_pb2.StartProfile())
    assert [report.done for report in order(builder, start)] == [True]
    assert "recorded already" in order(builder, start)[0].problem
    complete(builder, num_tokens=3)
    (report,) = order(builder, Command(stop_profile=ranks_pb2.StopProfile(with_trace=with_trace)))
    assert report.done
    assert "3 steps were recorded" in report.profile_table
    assert "gap before a step median" in report.profile_table
    assert "aten::" in report.profile_table
    if with_trace:
        assert json.loads(gzip.decompress(report.profile_trace))["traceEvents"]
    else:
        assert report.profile_trace == b""
    assert "start one first" in order(builder, Command(stop_profile=ranks_pb2.StopProfile()))[0].problem


def test_a_record_ends_by_itself_and_a_trace_that_is_too_long_is_left_out() -> None:
    recorder = StepRecorder(max_steps=2, max_trace_bytes=100)
    for _ in range(3):
        torch.ones(2).add_(1)
        recorder.count_step()
    record = recorder.finish(with_trace=True)
    assert "2 steps were recorded" in record.table
    assert "Record fewer steps" in record.table
    assert record.trace == b""

"""GPU ranks and CPU ranks of one group, the GPUs played by the host: every way of a sequence to the cache is right.

Mixed groups run in threads of this process; what they exchange is tested elsewhere. Logits are compared with those of
transformers for the whole sequence.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch

from hetero_api.errors import ModelError
from hetero_api.v1 import ranks_pb2
from hetero_worker.attention.torch_paged import TorchPagedAttention
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.backends.torch_reference import TorchReference
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.errors import MemoryBudgetError, ProtocolError
from hetero_worker.process.messages import check_kind
from hetero_worker.runners.graphs.device_inputs import DeviceInputs
from hetero_worker.runners.plan_runner import PlanRunner
from tests.support.pseudo_gpu import PseudoGpu
from tests.support.rank_group import PlanBuilder, RankGroup, Shares, StepOutcome
from tests.support.rank_shares import layers_on
from tests.support.tape import TapeBackend
from tests.support.tiny_checkpoints import VOCAB_SIZE, TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

TOLERANCE = 1e-4
BLOCKS, BLOCK_SIZE = 64, 4
CONTIGUOUS = 128
"""Positions of the longest sequence: one block holds it."""
NUM_LAYERS = 4

LAYOUTS: dict[str, tuple[Shares, int]] = {
    "1 GPU": (Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),)), 1),
    "2 GPU + 2 CPU, CPU ranks on MLP only": (
        Shares(
            kv_heads=((5, 3, 0, 0),),
            mlp_columns=((11, 16, 3, 20),),
            vocab_rows=(64, 136, 0, 0),
            experts=((1, 2, 0, 3),),
        ),
        2,
    ),
    "2 GPU + 2 CPU, all MLP on CPU ranks": (
        Shares(
            kv_heads=((1, 7, 0, 0),), mlp_columns=((0, 0, 50, 0),), vocab_rows=(200, 0, 0, 0), experts=((0, 0, 4, 2),)
        ),
        2,
    ),
    "2 GPU + 2 CPU, CPU ranks with heads": (
        Shares(
            kv_heads=((3, 2, 2, 1),), mlp_columns=((20, 0, 29, 1),), vocab_rows=(64, 0, 64, 72), experts=((0, 3, 2, 1),)
        ),
        2,
    ),
    "1 GPU + 3 CPU": (
        Shares(
            kv_heads=((6, 0, 2, 0),), mlp_columns=((30, 0, 0, 20),), vocab_rows=(0, 200, 0, 0), experts=((2, 0, 1, 3),)
        ),
        1,
    ),
    "GPU only, CPU ranks idle": (
        Shares(kv_heads=((4, 4, 0),), mlp_columns=((25, 25, 0),), vocab_rows=(100, 100, 0), experts=((3, 3, 0),)),
        2,
    ),
    "layers on GPU and CPU": (layers_on(0, 0, 1, 2, world_size=3), 2),
}
VARIANTS = ("llama-biased", "qwen3-moe-some-dense", "gemma2")


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TinyCheckpoint:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param), num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return save_tiny("llama-tied", tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=LAYOUTS.values(), ids=list(LAYOUTS))
def builder(checkpoint: TinyCheckpoint, request: pytest.FixtureRequest) -> PlanBuilder:
    shares, num_gpu_ranks = request.param
    return PlanBuilder(
        RankGroup(checkpoint.directory, shares, num_gpu_ranks=num_gpu_ranks, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    )


def _prompt(length: int, *, seed: int = 1) -> list[int]:
    return [(seed * 37 + i * i * 11 + i) % VOCAB_SIZE for i in range(length)]


def _check(outcome: StepOutcome, builder: PlanBuilder, checkpoint: TinyCheckpoint) -> None:
    """Every draw's logits are those of its whole sequence, drawn token excluded."""
    assert outcome.sampled
    for row, (slot, _) in enumerate(outcome.sampled):
        expected = checkpoint.logits(builder.sequences[slot].tokens[:-1])[-1]
        assert (outcome.logits[row] - expected).abs().max() <= TOLERANCE, f"slot {slot}"


def _complete(builder: PlanBuilder, checkpoint: TinyCheckpoint, slot: int, prompt: list[int]) -> None:
    """Prefill whole, decode some; the slot is free afterwards."""
    builder.start(slot, prompt)
    for _ in range(3):
        builder.schedule(slot)
        _check(builder.run(), builder, checkpoint)
    builder.release(slot)


def _order(builder: PlanBuilder, command: ranks_pb2.GroupCommand) -> None:
    reports = [output.report for output in builder.command(command).outputs]
    assert all(report is not None and report.done for report in reports), reports


def test_every_path_equals_the_reference(builder: PlanBuilder, checkpoint: TinyCheckpoint) -> None:
    """Chunks of each size, a prefix hit, mixed batches, preemption, then sleep at both levels and other caches."""
    for chunk in (1, 3, 4, 7):
        builder.start(0, _prompt(9, seed=chunk))
        for _ in range(-(-9 // chunk)):
            builder.schedule(0, chunk)
            outcome = builder.run()
        _check(outcome, builder, checkpoint)
        builder.release(0)
    common = _prompt(3 * BLOCK_SIZE)
    for slot, tokens in {0: [*common, 5], 1: _prompt(19, seed=5)}.items():
        builder.start(slot, tokens)
        builder.schedule(slot)
    _check(builder.run(), builder, checkpoint)
    builder.start(2, [*common, 9, 8, 7], shared_blocks=builder.sequences[0].blocks[:3])
    for slot in (2, 1, 0):
        builder.schedule(slot)
    _check(builder.run(), builder, checkpoint)
    preempted = list(builder.sequences[1].tokens)
    builder.release(1)
    builder.start(1, preempted)
    for slot, count in {0: None, 2: None, 1: 7}.items():
        builder.schedule(slot, count)
    _check(builder.run(), builder, checkpoint)
    builder.schedule(1)
    _check(builder.run(), builder, checkpoint)
    for slot in (0, 1, 2):
        builder.release(slot)
    builder.run()
    cache = ranks_pb2.AllocateCache(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    for level in (1, 2):
        _order(builder, ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=level)))
        _order(builder, ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(weights=True, cache=cache)))
        builder.use_blocks(BLOCKS, BLOCK_SIZE)
        _complete(builder, checkpoint, 3, _prompt(13, seed=level))
    contiguous = ranks_pb2.AllocateCache(num_blocks=3, block_size=CONTIGUOUS)
    _order(builder, ranks_pb2.GroupCommand(reset_cache=contiguous))
    builder.use_blocks(3, CONTIGUOUS)
    _complete(builder, checkpoint, 4, _prompt(11, seed=8))


@pytest.mark.parametrize("level", [1, 2])
def test_weights_leave_the_device_to_sleep_and_an_epoch_finds_them_again(llama: TinyCheckpoint, level: int) -> None:
    group = RankGroup(llama.directory, LAYOUTS["1 GPU"][0], num_gpu_ranks=1)
    builder = PlanBuilder(group)
    runner = group.runners[0]
    shard = runner._model_state.shard
    assert shard is not None
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in shard.decoder.tensors}
    assert sum(storage.nbytes() for storage in storages.values()) == group.reports[0].weight_bytes
    _order(builder, ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=level)))
    if level == 1:
        assert not any(storage.nbytes() for storage in storages.values())
    group.start()  # asleep when the epoch ended
    assert (group.reports[0].load_s == 0) == (level == 1)
    _complete(PlanBuilder(group), llama, 0, _prompt(7))


@pytest.mark.parametrize("level", [1, 2])
def test_nothing_holds_on_to_what_sleeps_nor_to_its_copy_once_it_woke(llama: TinyCheckpoint, level: int) -> None:
    """Or its memory would not be given back: neither cache and graphs, nor weights, nor the host's copy of these."""
    group = RankGroup(llama.directory, LAYOUTS["1 GPU"][0], num_gpu_ranks=1, make_graphs=TapeBackend)
    builder = PlanBuilder(group)
    builder.start(0, _prompt(5))
    for _ in range(5):
        builder.schedule(0)
        builder.run()
    builder.release(0)
    builder.run()
    state = group.runners[0]._model_state
    assert state.cache is not None
    assert state.shard is not None
    held: dict[str, weakref.ref[Any]] = {
        "cache": weakref.ref(state.cache.forward),
        "keys": weakref.ref(next(layer.keys for layer in state.cache.layers if layer is not None)),
        "decoder": weakref.ref(state.shard.decoder),
    }
    _order(builder, ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=level)))
    asleep = {"cache", "keys"} if level == 1 else set(held)
    assert {name for name, thing in held.items() if thing() is None} == asleep
    copies = weakref.WeakSet([state.offloaded] if state.offloaded is not None else [])
    assert len(copies) == (level == 1)
    cache = ranks_pb2.AllocateCache(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    _order(builder, ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(weights=True, cache=cache)))
    assert not copies


def test_weights_that_cannot_wake_sleep_on(llama: TinyCheckpoint) -> None:
    """One rank has no room for the cache: no weight stays on the device, and a smaller cache wakes all."""
    group = RankGroup(llama.directory, LAYOUTS["1 GPU"][0], num_gpu_ranks=1)
    builder = PlanBuilder(group)
    _order(builder, ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=1)))
    too_large = ranks_pb2.AllocateCache(num_blocks=1 << 24, block_size=16)
    outcome = builder.command(ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(weights=True, cache=too_large)))
    report = outcome.outputs[0].report
    assert report is not None
    assert not report.done
    assert "ask for fewer blocks" in report.problem
    runner = group.runners[0]
    shard = runner._model_state.shard
    assert shard is not None
    assert not any(tensor.untyped_storage().nbytes() for tensor in shard.decoder.tensors)
    cache = ranks_pb2.AllocateCache(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    _order(builder, ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(weights=True, cache=cache)))
    _complete(builder, llama, 0, _prompt(7))


def test_inputs_and_caches_lie_on_the_device_and_the_hosts_buffers_are_free_for_the_next_step(
    llama: TinyCheckpoint,
) -> None:
    group = RankGroup(llama.directory, LAYOUTS["1 GPU"][0], num_gpu_ranks=1)
    builder = PlanBuilder(group)
    builder.start(0, _prompt(5))
    builder.schedule(0)
    builder.run()
    cache = group.runners[0]._model_state.cache
    assert cache is not None
    inputs = cache.inputs
    assert isinstance(inputs, DeviceInputs)
    builder.schedule(0)
    plan = builder.take_plan()
    cache.slots.apply(plan)
    made = inputs.fill(plan, cache.slots).decoder_input
    before = [made.token_ids.clone(), made.positions.clone(), made.attention.slot_mapping.clone()]
    for own in (inputs._host._token_ids, inputs._host._positions, inputs._host._slot_mapping):
        own.fill(-1)
    after = [made.token_ids, made.positions, made.attention.slot_mapping]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_largest_step_and_what_attention_gathers_are_kept_free(
    llama: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, _ = LAYOUTS["GPU only, CPU ranks idle"]
    plain = RankGroup(llama.directory, shares, num_gpu_ranks=0).reports
    gathered = 512 << 20
    monkeypatch.setattr(TorchPagedAttention, "gather_bytes", gathered)
    device = RankGroup(llama.directory, shares, num_gpu_ranks=2).reports
    for cpu, gpu in zip(plain[:2], device[:2], strict=True):
        # Of what is missing, the cache would have got its part.
        assert 0.8 * gathered < cpu.kv_budget_bytes - gpu.kv_budget_bytes < gathered
    assert device[2].kv_budget_bytes == plain[2].kv_budget_bytes == 0
    assert device[0].kernels[:3] == ["linear=torch", "attention=paged-torch", "fused=torch"]


def test_graphs_are_recorded_later_and_have_their_room_kept(
    llama: TinyCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    def report(**changes: Any) -> ranks_pb2.Loaded:
        with caplog.at_level("INFO", logger="hetero_worker.runners.shard"):
            group = RankGroup(llama.directory, LAYOUTS["1 GPU"][0], num_gpu_ranks=1, **changes)
        return group.reports[0]

    with_graphs, without = report(make_graphs=TapeBackend), report()
    kept = with_graphs.graph_reserve_bytes
    assert kept > 30 << 20
    assert 0.8 * kept < without.kv_budget_bytes - with_graphs.kv_budget_bytes < kept
    assert f"workspace - {kept / (1 << 20):,.0f} MiB graphs = " in caplog.text
    assert without.graph_reserve_bytes == 0
    eager = report(make_graphs=TapeBackend, enforce_eager=True)
    assert eager.graph_reserve_bytes == 0
    assert eager.kv_budget_bytes == pytest.approx(without.kv_budget_bytes, abs=kept / 4)


def test_a_profile_tells_what_graphs_take(llama: TinyCheckpoint) -> None:
    shares = LAYOUTS["1 GPU"][0]
    for make_graphs, told in ((TapeBackend, True), (None, False)):
        group = RankGroup(llama.directory, shares, num_gpu_ranks=1, make_graphs=make_graphs)
        builder = PlanBuilder(group)
        for command in (
            ranks_pb2.GroupCommand(start_profile=ranks_pb2.StartProfile()),
            ranks_pb2.GroupCommand(stop_profile=ranks_pb2.StopProfile()),
        ):
            (output,) = builder.command(command).outputs
        assert output.report is not None
        assert ("graphs of steps: 0 MiB taken of the " in output.report.profile_table) == told


def test_a_gpu_rank_takes_no_more_than_its_part_of_the_memory(llama: TinyCheckpoint) -> None:
    group = RankGroup(llama.directory, LAYOUTS["1 GPU"][0], num_gpu_ranks=1)
    budgets = []
    for part in (0.95, 1.0):
        runner = PlanRunner(PseudoGpu())
        runner.attach(LocalExchange())
        request = group.requests[0]
        budgets.append(runner.load(dataclasses.replace(request, memory_utilization=part)).kv_budget_bytes)
    assert budgets[0] < budgets[1]
    runner = PlanRunner(PseudoGpu())
    runner.attach(LocalExchange())
    with pytest.raises(MemoryBudgetError, match="no memory is left for the KV cache"):
        runner.load(dataclasses.replace(group.requests[0], memory_utilization=0.1))


def test_a_dtype_that_the_device_lacks_is_refused_by_its_name(llama: TinyCheckpoint) -> None:
    request = RankGroup(llama.directory, LAYOUTS["1 GPU"][0], num_gpu_ranks=1).requests[0]
    runner = PlanRunner(PseudoGpu())
    runner.attach(LocalExchange())
    with pytest.raises(ModelError, match="dtype 'float8' is not supported on pseudo GPU 0; supported there: float32"):
        runner.load(dataclasses.replace(request, dtype="float8"))


@pytest.mark.parametrize(("rank", "num_gpu_ranks"), [(0, 1), (0, 4), (2, 3), (0, 0), (3, 3), (1, 1), (7, 2)])
def test_a_rank_computes_on_the_kind_of_device_that_its_number_says(rank: int, num_gpu_ranks: int) -> None:
    backends: list[DeviceBackend] = [PseudoGpu(), TorchReference()]
    own, other = backends if rank < num_gpu_ranks else reversed(backends)
    check_kind(own, "p", rank, num_gpu_ranks=num_gpu_ranks)
    with pytest.raises(ProtocolError, match=rf"pool some-pool: .* {num_gpu_ranks} GPU ranks, rank {rank} computes"):
        check_kind(other, "some-pool", rank, num_gpu_ranks=num_gpu_ranks)

"""Prompts whose experts come to the GPU rank: what is computed is what it is where experts stay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_placement.cost_model import CostModel
from hetero_placement.hardware import Hardware
from hetero_placement.streaming import StreamingCosts
from hetero_worker.distributed.exchange import HostExchange
from hetero_worker.errors import ProtocolError
from hetero_worker.layers.linear_kernels import kept_bits
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.memory.streams import Way
from hetero_worker.models.decoder import Decoder
from tests.support.native_compute import op_queue_of
from tests.support.played_device import COMPUTING, PlayedDevice
from tests.support.pseudo_gpu import PlayedDriver
from tests.support.rank_group import LINK_BYTES, PlanBuilder, RankGroup, Shares
from tests.support.thread_exchange import thread_exchanges
from tests.support.tiny_checkpoints import TinyCheckpoint, save_tiny
from tests.unit.placement.placement_setup import cpu, gpu
from tests.unit.worker_model.test_expert_commands import another, move, order

pytestmark = pytest.mark.unit

PROMPT = [7, 150, 3, 88, 199, 0, 42, 42, 64, 63, 127]
TOLERANCE = 1e-4
BUFFER_BYTES = 64 << 20
ONE = Shares(kv_heads=((8, 0),), mlp_columns=((50, 0),), vocab_rows=(200, 0), experts=((2, 4),))
NONE_OWN = Shares(kv_heads=((8, 0),), mlp_columns=((50, 0),), vocab_rows=(200, 0), experts=((0, 6),))
TWO = Shares(kv_heads=((8, 0, 0),), mlp_columns=((50, 0, 0),), vocab_rows=(200, 0, 0), experts=((1, 2, 3),))
SLICES = replace(TWO, experts=((1, 0, 0),), expert_slices=(0, 1, 3))
LAYOUTS = {"one": ONE, "none of its own": NONE_OWN, "two": TWO, "slices": SLICES}


@dataclass
class Group:
    """Ranks of one played host, whose segment would be in a folder."""

    folder: Path

    def exchanges(self, plan: ShardPlan) -> list[HostExchange]:
        made = thread_exchanges(plan.world_size, link_bytes=LINK_BYTES)
        for exchange in made:
            exchange.shared_path = self.folder / "segment"
        return [*made]

    def of(self, checkpoint: TinyCheckpoint, shares: Shares, **options: object) -> RankGroup:
        given = {"num_gpu_ranks": 1, "expert_buffer_bytes": BUFFER_BYTES, "make_exchanges": self.exchanges, **options}
        return RankGroup(checkpoint.directory, shares, **given)  # type: ignore[arg-type]


def decoder_of(group: RankGroup, rank: int) -> Decoder:
    shard = group.runners[rank]._model_state.shard
    assert shard is not None
    return shard.decoder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyCheckpoint]:
    return {
        variant: save_tiny(variant, tmp_path_factory.mktemp(variant), initializer_range=0.2, num_hidden_layers=3)
        for variant in ("qwen3-moe", "deepseek-v3")
    }


def completed(
    group: RankGroup, *, streams_from: int | None, chunk: int | None = None, num_tokens: int = 3
) -> torch.Tensor:
    """Logits of a greedy completion of PROMPT, whose first `chunk` tokens go first."""
    builder, logits = PlanBuilder(group), []
    builder.streams_from = streams_from
    builder.start(0, PROMPT)
    if chunk is not None:
        builder.schedule(0, chunk)
        builder.run()
    for _ in range(num_tokens):
        builder.schedule(0)
        logits.append(builder.run().logits[0])
    return torch.stack(logits)


def prompt_logits(group: RankGroup, *, streams_from: int | None = 2, chunk: int | None = 5) -> torch.Tensor:
    """Logits behind PROMPT alone: host cores round rows to whole numbers where weights are, and a GPU does not."""
    return completed(group, streams_from=streams_from, chunk=chunk, num_tokens=1)


def next_logits(builder: PlanBuilder) -> torch.Tensor:
    """Logits behind PROMPT, whose slot is free before and after."""
    builder.start(0, PROMPT)
    builder.schedule(0)
    found = builder.run().logits[0]
    builder.release(0)
    return found


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", ["qwen3-moe", "deepseek-v3"])
def test_streamed_prompts_are_those_that_stay(
    checkpoints: dict[str, TinyCheckpoint], tmp_path: Path, variant: str, layout: str, quantization: str
) -> None:
    checkpoint, shares = checkpoints[variant], LAYOUTS[layout]
    group = Group(tmp_path).of(checkpoint, shares, quantization=quantization)
    assert set(group.problems.values()) == {""}
    resident = RankGroup(checkpoint.directory, shares, num_gpu_ranks=1, quantization=quantization, native=False)
    torch.testing.assert_close(prompt_logits(group), prompt_logits(resident, streams_from=None), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", ["one", "slices"])
def test_decoding_goes_on_where_experts_are(
    checkpoints: dict[str, TinyCheckpoint], tmp_path: Path, layout: str
) -> None:
    checkpoint = checkpoints["qwen3-moe"]
    group = Group(tmp_path).of(checkpoint, LAYOUTS[layout])
    resident = RankGroup(checkpoint.directory, LAYOUTS[layout], num_gpu_ranks=1)
    streamed, stayed = completed(group, streams_from=2), completed(resident, streams_from=None)
    torch.testing.assert_close(streamed, stayed, rtol=0, atol=TOLERANCE)
    assert not torch.equal(streamed, stayed)


def test_a_step_below_the_threshold_gives_what_it_gave(checkpoints: dict[str, TinyCheckpoint], tmp_path: Path) -> None:
    checkpoint = checkpoints["qwen3-moe"]
    group = Group(tmp_path).of(checkpoint, TWO)
    resident = RankGroup(checkpoint.directory, TWO, num_gpu_ranks=1)
    assert torch.equal(completed(group, streams_from=len(PROMPT) + 1), completed(resident, streams_from=None))


def test_ranks_on_host_cores_exchange_nothing_for_streamed_layers(
    checkpoints: dict[str, TinyCheckpoint], tmp_path: Path
) -> None:
    group = Group(tmp_path).of(checkpoints["qwen3-moe"], TWO)
    before = [exchange.traffic.messages for exchange in group.exchanges]
    prompt_logits(group)
    assert [exchange.traffic.messages for exchange in group.exchanges] == before


def test_a_prompt_whose_prefix_is_cached(checkpoints: dict[str, TinyCheckpoint], tmp_path: Path) -> None:
    group = Group(tmp_path).of(checkpoints["qwen3-moe"], ONE)
    builder = PlanBuilder(group)
    builder.streams_from = 2
    builder.start(0, PROMPT)
    builder.schedule(0)
    whole = builder.run().logits[0]
    builder.start(1, PROMPT, shared_blocks=builder.sequences[0].blocks[:2])
    builder.schedule(1)
    torch.testing.assert_close(builder.run().logits[0], whole, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("lost", [0, 1])
def test_another_epoch_streams_from_ranks_that_stayed_and_from_new_ones(
    checkpoints: dict[str, TinyCheckpoint], tmp_path: Path, lost: int
) -> None:
    """A rank is lost with its memory, and another takes its place."""
    checkpoint, played = checkpoints["qwen3-moe"], Group(tmp_path)
    group = played.of(checkpoint, TWO)
    expected = prompt_logits(group)
    fresh = played.of(checkpoint, TWO)
    before = decoder_of(group, 1 - lost)
    group.runners[lost] = fresh.runners[lost]
    group.start()
    assert decoder_of(group, 1 - lost) is before
    torch.testing.assert_close(prompt_logits(group), expected, rtol=0, atol=TOLERANCE)


def test_a_new_cache_and_sleep_let_go_of_shared_memory_and_streaming_goes_on(
    checkpoints: dict[str, TinyCheckpoint], tmp_path: Path
) -> None:
    group = Group(tmp_path).of(checkpoints["qwen3-moe"], TWO)
    builder = PlanBuilder(group)
    builder.streams_from = 2
    expected = next_logits(builder)
    cache = ranks_pb2.AllocateCache(num_blocks=64, block_size=4)
    for command in (
        ranks_pb2.GroupCommand(reset_cache=cache),
        ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=2)),
    ):
        assert all(report.done for report in order(builder, command))
        if command.HasField("sleep"):
            woken = ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(weights=True, cache=cache))
            assert all(report.done for report in order(builder, woken))
        stream = decoder_of(group, 0).expert_stream
        assert stream is not None
        assert not stream.layers
        builder.use_blocks(64, 4)
        torch.testing.assert_close(next_logits(builder), expected, rtol=0, atol=TOLERANCE)
        assert len(stream.layers) == 3


@pytest.mark.parametrize("shares", [ONE, TWO], ids=["one", "two"])
def test_experts_that_change_places_are_streamed_from_their_new_ones(
    checkpoints: dict[str, TinyCheckpoint], tmp_path: Path, shares: Shares
) -> None:
    group = Group(tmp_path).of(checkpoints["qwen3-moe"], shares, quantization="int4")
    builder = PlanBuilder(group)
    builder.streams_from = 2
    expected = next_logits(builder)
    move(group, builder, another(group))
    torch.testing.assert_close(next_logits(builder), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("layout", ["one", "slices"])
def test_buffers_of_the_solver_hold_what_ranks_pack(
    checkpoints: dict[str, TinyCheckpoint], tmp_path: Path, layout: str, quantization: str
) -> None:
    group = Group(tmp_path).of(checkpoints["qwen3-moe"], LAYOUTS[layout], quantization=quantization)
    config, ranks = group.requests[0].config, range(group.plan.world_size)
    bits = kept_bits(NativeLinear(op_queue_of()), torch.float32, config)
    hardware = Hardware((gpu(1e12, bus=1e10), *(replace(cpu(1e11), weight_bits=bits) for _ in ranks[1:])))
    needed = StreamingCosts(CostModel(config, hardware, dtype="float32"), group.plan).buffer_bytes
    helpers = [decoder_of(group, rank).expert_mlps for rank in ranks[1:]]
    packed = max(sum(mlps[layer].panels().num_bytes for mlps in helpers) for layer in helpers[0])
    assert 2 * packed < needed
    own = sum(mlp.weight_bytes(torch.float32) for mlp in helpers[0].values())
    assert needed < 2 * own * len(helpers) + 2 * (1 << 20), "not by far"


class _LateDriver(PlayedDriver):
    """Driver whose streams take their time, and keep a record."""

    devices: list[PlayedDevice]

    def streams(self) -> PlayedDevice:
        self.devices.append(PlayedDevice())
        return self.devices[-1]


def test_copies_run_beside_the_computing_of_the_layer_before(
    checkpoints: dict[str, TinyCheckpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's copy begins before the layer before is computed, behind the one before that."""
    devices: list[PlayedDevice] = []
    monkeypatch.setattr(_LateDriver, "devices", devices, raising=False)
    monkeypatch.setattr("tests.support.pseudo_gpu.PlayedDriver", _LateDriver)
    group = Group(tmp_path).of(checkpoints["qwen3-moe"], TWO)
    resident = RankGroup(checkpoints["qwen3-moe"].directory, TWO, num_gpu_ranks=0)
    streamed = prompt_logits(group, chunk=None)
    torch.testing.assert_close(streamed, prompt_logits(resident, streams_from=None, chunk=None), rtol=0, atol=TOLERANCE)
    (device,) = [device for device in devices if device.on(Way.IN) and device.pins]
    copies = device.on(Way.IN)
    assert len(copies) == 3
    assert all(copy.is_done for copy in copies)
    waits = [
        operation for where, operation in device.asked if where == COMPUTING and set(operation.after) & set(copies)
    ]
    assert [copies.index(next(iter(set(wait.after) & set(copies)))) for wait in waits] == [0, 1, 2]
    asked = [operation.number for operation in copies]
    assert asked[1] < waits[0].number, "the second layer's copy is asked for before the first is computed"
    assert waits[0].number < asked[2] < waits[1].number, "the third's behind the first, before the second is computed"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"make_exchanges": None}, "the ranks share no memory"),
        ({"expert_buffer_bytes": 4096}, "two buffers of a layer's"),
        ({"native": False}, "this rank computes by torch"),
    ],
)
def test_ranks_that_cannot_say_why_and_compute_as_ever(
    checkpoints: dict[str, TinyCheckpoint], tmp_path: Path, options: dict[str, object], problem: str
) -> None:
    group = Group(tmp_path).of(checkpoints["qwen3-moe"], ONE, **options)
    assert all(group.problems.values())
    assert any(problem in told for told in group.problems.values())
    assert completed(group, streams_from=None).isfinite().all()
    assert not list(tmp_path.iterdir()), "sockets are gone"
    group.start()
    with pytest.raises(ProtocolError, match="step plan 1 streams experts: "):
        completed(group, streams_from=2)


def test_a_plan_that_streams_what_was_not_to_be_shared_is_refused(checkpoints: dict[str, TinyCheckpoint]) -> None:
    group = RankGroup(checkpoints["qwen3-moe"].directory, ONE, num_gpu_ranks=1)
    with pytest.raises(ProtocolError, match="step plan 1 streams experts: LoadModel ordered no buffers for them"):
        completed(group, streams_from=2)

"""Targets that read what ranks, gateway and operator send to one another."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Final

from google.protobuf.message import DecodeError

from hetero_api.errors import PlanError
from hetero_api.group_state import GroupState
from hetero_api.sharding import ShardPlan
from hetero_api.spec import PlacementShares
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.group.roster import RankLink
from hetero_gateway.group.settings import check_plan
from hetero_placement.shard_plans import deal_within_layers
from hetero_worker.distributed.rendezvous import Wait
from hetero_worker.distributed.shm_segment import SegmentLayout, ShmSegment
from hetero_worker.distributed.tcp.connecting import Door, Wire, _Answering, _Caller, _Dropped
from hetero_worker.errors import ExchangeError, ProtocolError
from hetero_worker.runners.input_batch import InputBuffers
from hetero_worker.runners.plan_check import PlanBounds, PlanCheck
from hetero_worker.runners.slots import SlotTable
from tests.support.status_scene import StatusScene
from tests.unit.fuzz.model_files import directory
from tests.unit.fuzz.target import Target, changed_frames, changed_message, frames_of, joined
from tests.unit.group.group_setup import HOST_TIMES, GroupBench, hello, model_config

BOUNDS: Final = PlanBounds(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, vocab_size=100, num_blocks=20, block_size=4
)
_MOST_FRAMES: Final = 24


# --- what the gateway sends to ranks ------------------------------------------------------------------------


def _take_plans(data: bytes) -> None:
    """Plans in their order: what passes the check is applied, and its inputs are filled."""
    slots = SlotTable(
        max_num_seqs=BOUNDS.max_num_seqs, max_model_len=BOUNDS.max_model_len, block_size=BOUNDS.block_size
    )
    buffers, check = InputBuffers(BOUNDS), PlanCheck(BOUNDS)
    for _, frame in frames_of(data)[:_MOST_FRAMES]:
        plan = ranks_pb2.StepPlan.FromString(frame)
        check.run(plan, slots.counts)
        slots.apply(plan)
        if not plan.HasField("command") and (plan.decode_slots or plan.spans):
            batch = buffers.fill(plan, slots)
            assert len(batch.decoder_input.token_ids) <= BOUNDS.max_num_batched_tokens
            buffers.advance_decoding(len(plan.decode_slots), slots)
            for span in plan.spans:
                slots.counts.num_computed[span.slot] += span.num_tokens
            slots.append_tokens(batch.draw_slots, [7] * len(batch.draw_slots))


def _plans() -> Iterator[bytes]:
    first = ranks_pb2.NewSequence(slot=0, token_ids=[1, 2, 3, 4, 5], num_prompt_tokens=5)
    second = ranks_pb2.NewSequence(
        slot=2, token_ids=range(9), num_prompt_tokens=9, num_computed_tokens=4, block_ids=[7],
        sampling=ranks_pb2.Sampling(temperature=0.7, top_k=3, num_logprobs=2, bias_token_ids=[3], biases=[1.0]),
    )  # fmt: skip
    sleep = ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=1))
    plans = [
        ranks_pb2.StepPlan(
            step_id=1, new_sequences=[first, second], block_slots=[0, 0, 2, 2], block_ids=[1, 2, 3, 4],
            spans=[ranks_pb2.ScheduledSpan(slot=slot, num_tokens=5, sample=True) for slot in (0, 2)],
        ),
        ranks_pb2.StepPlan(step_id=2, decode_slots=[0, 2], masked_slots=[2]),
        ranks_pb2.StepPlan(step_id=3, released_slots=[0], decode_slots=[2]),
        ranks_pb2.StepPlan(step_id=4, released_slots=[2], command=sleep),
    ]  # fmt: skip
    yield joined([(0, plan.SerializeToString()) for plan in plans])


def _read_shard_plan(data: bytes) -> None:
    plan = ShardPlan.from_proto(ranks_pb2.ShardPlan.FromString(data))
    check_plan(plan, model_config(num_hidden_layers=3), world_size=2)
    assert plan == ShardPlan.from_proto(plan.to_proto())


def _shard_plans() -> Iterator[bytes]:
    for cores in ([1, 1], [1, 3]):
        plan = deal_within_layers(model_config(num_hidden_layers=3), cores=cores, shares=PlacementShares())
        yield plan.to_proto().SerializeToString()


# --- how ranks meet -----------------------------------------------------------------------------------------


def _door(rank: int) -> Door:
    return Door(rank, "127.0.0.1", 7, b"s" * 32, Wait(5.0, lambda: False), handshake_s=5.0)


def _shake_hands(data: bytes) -> None:
    """The first byte says which end the bytes come to: that which dialled, or that which answers."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[1:4096])
        theirs.shutdown(socket.SHUT_WR)
        if data[:1] == b"d":
            _door(0)._introduce(ours, Wire(1, 1), "rank 1")
            raise AssertionError("bytes that nobody signed passed for rank 1's")
        answering = _Answering(_door(0), ours, [Wire(1, 0), Wire(1, 1)])
        with selectors.DefaultSelector() as selector:
            ours.setblocking(False)
            selector.register(ours, selectors.EVENT_READ)
            caller = answering._callers[ours] = _Caller(ours, deadline_s=1e18)
            while ours in answering._callers:
                answering._listen(caller, selector)
        assert not answering._made, "bytes that nobody signed passed for rank 1's"


def _handshakes() -> Iterator[bytes]:
    yield b"d" + b"HETEROX\0" + (1).to_bytes(4, "little") + bytes(16) + bytes(32)
    yield b"a" + _door(1).hello(1, 0, Wire(0, 1)) + bytes(32)


def _map_segment(data: bytes) -> None:
    """The first byte is the rank that attaches, the rest is the file."""
    folder, layout = directory("segment"), SegmentLayout(3, 4096)
    (folder / "s").write_bytes(data[1:].ljust(layout.total_bytes, b"\0") if len(data) % 2 else data[1:])
    segment = ShmSegment.attach("s", layout, rank=(data[0] if data else 0) % 3, folder=folder)
    try:
        assert len(segment.unmarked(1)) == 3
        segment.mark(1)
        assert len(segment.unmarked(1)) == 2
        assert len(segment.absent([0, 1, 2])) >= 2
    finally:
        segment.leave()
        segment.memory.close()


def _segments() -> Iterator[bytes]:
    yield bytes(SegmentLayout(3, 4096).total_bytes + 1)
    yield b"\1" + b"\xff" * 100


# --- what ranks send to the gateway, and that to the operator -----------------------------------------------


def _hear_ranks(data: bytes) -> None:
    messages = [(rank % 2, ranks_pb2.RankMessage.FromString(frame)) for rank, frame in frames_of(data)[:_MOST_FRAMES]]
    asyncio.run(_group_hears(messages))


async def _group_hears(messages: list[tuple[int, ranks_pb2.RankMessage]]) -> None:
    """Two ranks say this to a group; it may end their streams and its epochs, and must go on."""
    async with GroupBench() as bench:
        links = [RankLink("0"), RankLink("1")]
        for rank, message in messages:
            bench.group.receive(links[rank], message)
            await asyncio.sleep(0.002 if message.HasField("formed") or message.HasField("echo") else 0)
            bench.topology.SerializeToString()
        for link in links:
            bench.group.leave(link, "the end")
        await asyncio.sleep(0)
        reason = bench.topology.reason
        assert "internal error" not in reason, reason
        for task in bench._tasks:
            if task.done():
                task.result()


def _conversations() -> Iterator[bytes]:
    digest = ranks_pb2.FileDigest(name="model.safetensors", digest=b"w")
    formed = ranks_pb2.Formed(exchange=ranks_pb2.EXCHANGE_KIND_SHM, host_times=HOST_TIMES)
    loaded = ranks_pb2.Loaded(weight_bytes=9, kv_budget_bytes=1 << 20, kv_bytes_per_token=8)
    result = ranks_pb2.StepResult(step_id=1, slots=[0], token_ids=[5], step_s=0.1)
    said = [
        *(ranks_pb2.RankMessage(hello=hello(rank, files=[digest])) for rank in range(2)),
        *[ranks_pb2.RankMessage(epoch=1, echo=ranks_pb2.Echo(number=1))] * 2,
        *[ranks_pb2.RankMessage(epoch=1, formed=formed)] * 2,
        *[ranks_pb2.RankMessage(epoch=1, loaded=loaded)] * 2,
        *[ranks_pb2.RankMessage(epoch=1, allocated=ranks_pb2.Allocated(kv_bytes=1 << 20))] * 2,
        *[ranks_pb2.RankMessage(epoch=1, heartbeat=ranks_pb2.Heartbeat(step_id=1))] * 2,
        *[ranks_pb2.RankMessage(epoch=1, step_result=result)] * 2,
        ranks_pb2.RankMessage(epoch=1, failure=ranks_pb2.Failure(message="out of luck")),
    ]  # fmt: skip
    yield joined([(number % 2, message.SerializeToString()) for number, message in enumerate(said)])


@cache
def _scene() -> StatusScene:
    return StatusScene.serving()


def _report_status(data: bytes) -> None:
    """What the operator tells about a group whose gateway says this."""
    scene = _scene()
    assert scene.gateway is not None
    scene.gateway = replace(scene.gateway, group=admin_pb2.GetTopologyResponse.FromString(data))
    scene.report()


def _topologies() -> Iterator[bytes]:
    scene = StatusScene.serving()
    for state in (GroupState.READY, GroupState.LOADING, GroupState.ABORTED):
        scene.answer(state=state, reason="rank 1 is gone", exchange_reason="no memory is shared", failed=False)
        assert scene.gateway is not None
        yield scene.gateway.group.SerializeToString()


_PLANS, _SAID = changed_message(ranks_pb2.StepPlan), changed_message(ranks_pb2.RankMessage)
_SHARDS, _TOPOLOGY = changed_message(ranks_pb2.ShardPlan), changed_message(admin_pb2.GetTopologyResponse)
TARGETS: Final = (
    Target("step-plans", _take_plans, (ProtocolError, DecodeError), _plans, changed_frames(_PLANS)),
    Target("shard-plans", _read_shard_plan, (PlanError, DecodeError), _shard_plans, _SHARDS),
    Target("handshakes", _shake_hands, (_Dropped, OSError), _handshakes),
    Target("segments", _map_segment, (ExchangeError,), _segments),
    Target("rank-messages", _hear_ranks, (DecodeError,), _conversations, changed_frames(_SAID)),
    Target("statuses", _report_status, (DecodeError,), _topologies, _TOPOLOGY),
)

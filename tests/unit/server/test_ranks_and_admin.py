"""Who may join over gRPC, how a stream ends, and what Admin tells."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from hetero_api.contract import AUTHORIZATION_KEY
from hetero_api.v1 import admin_pb2, ranks_pb2, ranks_pb2_grpc
from tests.unit.group.group_setup import DEVICE, PATIENCE_S
from tests.unit.server.server_setup import TOKEN, GatewayBench, read_all, request, sampling

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        ((AUTHORIZATION_KEY, "Bearer another"),),
        ((AUTHORIZATION_KEY, TOKEN),),
        ((AUTHORIZATION_KEY, f"Bearer {TOKEN} "),),
        ((AUTHORIZATION_KEY, f"Bearer {TOKEN}"), (AUTHORIZATION_KEY, f"Bearer {TOKEN}")),
    ],
)
async def test_without_the_groups_token_nobody_joins(bench: GatewayBench, metadata: Any) -> None:
    stub: Any = ranks_pb2_grpc.RanksStub(bench.channel(bench.addresses.ranks))
    call = stub.Join(metadata=metadata)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert TOKEN not in str(caught.value.details())
    assert not bench.gateway.group.topology().ranks[0].joined


async def test_a_refused_rank_sees_failed_precondition_and_why(bench: GatewayBench) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(bench.new_rank().live(version="0.0.1"), PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "version: the rank runs HeteroInference 0.0.1" in str(caught.value.details())


async def test_a_rank_that_breaks_the_protocol_sees_invalid_argument(bench: GatewayBench) -> None:
    stub: Any = ranks_pb2_grpc.RanksStub(bench.channel(bench.addresses.ranks))
    call = stub.Join(metadata=((AUTHORIZATION_KEY, f"Bearer {TOKEN}"),))
    await call.write(ranks_pb2.RankMessage(epoch=3, formed=ranks_pb2.Formed()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the first message must be hello" in str(caught.value.details())


async def test_a_rank_that_closes_its_side_leaves(bench: GatewayBench) -> None:
    stub: Any = ranks_pb2_grpc.RanksStub(bench.channel(bench.addresses.ranks))
    call = stub.Join(metadata=((AUTHORIZATION_KEY, f"Bearer {TOKEN}"),))
    await call.done_writing()
    assert await asyncio.wait_for(call.read(), PATIENCE_S) is grpc.aio.EOF


async def test_a_rank_that_reads_nothing_holds_up_nobody(bench: GatewayBench) -> None:
    rank, life = await bench.join()
    rank.may_step.clear()
    call = bench.inference().Generate(request([1], sampling=sampling(max_tokens=2)))
    await call.read()
    topology = await asyncio.wait_for(bench.admin().GetTopology(admin_pb2.GetTopologyRequest()), PATIENCE_S)
    assert topology.state == admin_pb2.GROUP_STATE_READY
    life.cancel()


async def test_admin_tells_topology_and_consistent_counts(ready: GatewayBench) -> None:
    stub = ready.admin()
    topology = await stub.GetTopology(admin_pb2.GetTopologyRequest())
    assert (topology.name, topology.state, topology.epoch) == ("g", admin_pb2.GROUP_STATE_READY, 1)
    assert [rank.place.pod_name for rank in topology.ranks] == ["pod-0"]
    await read_all(ready.inference().Generate(request([1] * 9, sampling=sampling(max_tokens=3, ignore_eos=True))))
    stats = await stub.GetStats(admin_pb2.GetStatsRequest())
    assert (stats.finished_requests, stats.prompt_tokens, stats.generated_tokens) == (1, 9, 3)
    assert stats.free_blocks + stats.used_blocks == stats.num_blocks == topology.num_blocks == 32
    assert stats.cached_blocks == 2


async def test_topology_tells_mode_pinning_proof_and_speed(bench: GatewayBench) -> None:
    rank = bench.new_rank()
    device = ranks_pb2.DeviceReport(pinned=True, numa_nodes=[1], pin_message="memory: bound")
    device.MergeFrom(DEVICE)
    life = asyncio.create_task(rank.live(device=device))
    await bench.until(lambda: bench.gateway.group.is_ready)
    stub = bench.admin()
    before = await stub.GetTopology(admin_pb2.GetTopologyRequest())
    assert (before.placement_mode, before.tokens_per_second, before.stalled_s) == ("Tensor", 0, 0)
    assert (before.ranks[0].pin_message, before.ranks[0].local_memory_percent) == ("memory: bound", 97)
    await read_all(bench.inference().Generate(request([1] * 9, sampling=sampling(max_tokens=3, ignore_eos=True))))
    after = await stub.GetTopology(admin_pb2.GetTopologyRequest())
    assert after.tokens_per_second > 0
    rank.may_step.clear()
    call = bench.inference().Generate(request([1], sampling=sampling(max_tokens=1)))
    await call.read()
    await bench.until(lambda: bench.gateway.group.stalled_s > 0)
    assert (await stub.GetTopology(admin_pb2.GetTopologyRequest())).stalled_s > 0
    life.cancel()
    await bench.until(lambda: not bench.gateway.group.is_ready)
    lost = await stub.GetTopology(admin_pb2.GetTopologyRequest())
    assert not lost.ranks[0].HasField("local_memory_percent")
    assert (lost.ranks[0].pin_message, lost.stalled_s) == ("", 0)

"""What an administrator asks of a gateway over gRPC: codes, details, health, and answers of any size."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hetero_api.v1 import admin_pb2
from hetero_client.admin import AdminClient
from hetero_client.errors import InvalidRequestError, WrongStateError
from hetero_client.messages import CacheLayout
from hetero_gateway.server.calls import DETAILS_KEY
from hetero_gateway.server.health import GatewayProbes
from tests.unit.group.group_setup import PATIENCE_S, WarmRanks
from tests.unit.server.server_setup import GatewayBench, read_all, request, sampling

pytestmark = pytest.mark.unit

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def health_of(bench: GatewayBench) -> int:
    stub: Any = health_pb2_grpc.HealthStub(bench.channel(bench.addresses.inference))
    return int((await stub.Check(health_pb2.HealthCheckRequest())).status)


async def test_a_group_that_sleeps_does_not_serve_and_says_so_everywhere(ready: GatewayBench) -> None:
    stub = ready.admin()
    assert await health_of(ready) == SERVING
    assert list((await stub.Sleep(admin_pb2.SleepRequest(level=2))).freed_bytes) == [2000]
    assert await health_of(ready) == NOT_SERVING
    assert GatewayProbes._obstacle(_probes(ready)) == "the group is ASLEEP"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(ready.inference().Generate(request([1])))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "asleep" in str(caught.value.details())
    assert list((await stub.WakeUp(admin_pb2.WakeUpRequest(tags=["kv"]))).asleep) == ["weights"]
    assert await health_of(ready) == NOT_SERVING
    assert list((await stub.WakeUp(admin_pb2.WakeUpRequest())).asleep) == []
    assert await health_of(ready) == SERVING
    events = await read_all(ready.inference().Generate(request([1], sampling=sampling(max_tokens=2, ignore_eos=True))))
    assert events[-1].HasField("finished")


def _probes(bench: GatewayBench) -> GatewayProbes:
    return GatewayProbes(bench.gateway.group, None, step_timeout_s=1)  # type: ignore[arg-type]


async def test_the_cache_is_reset_and_told(ready: GatewayBench) -> None:
    stub = ready.admin()
    answer = await stub.ResetCache(admin_pb2.ResetCacheRequest(layout=admin_pb2.CACHE_LAYOUT_CONTIGUOUS))
    assert (answer.block_size, answer.num_blocks, len(answer.kv_bytes)) == (64, 2, 1)
    topology = await stub.GetTopology(admin_pb2.GetTopologyRequest())
    assert topology.cache_layout == admin_pb2.CACHE_LAYOUT_CONTIGUOUS
    assert (await stub.GetStats(admin_pb2.GetStatsRequest())).num_blocks == 2


async def test_the_wrong_state_is_a_failed_precondition_that_says_what_to_do(ready: GatewayBench) -> None:
    error = await refused(ready.admin().WakeUp(admin_pb2.WakeUpRequest()))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.details() == "WakeUp needs a group that is ASLEEP; it is READY: there is nothing to wake"


async def test_experts_of_a_model_without_any_are_a_failed_precondition(ready: GatewayBench) -> None:
    error = await refused(ready.admin().PlaceExperts(admin_pb2.PlaceExpertsRequest()))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "needs a model of experts" in str(error.details())


@pytest.mark.parametrize(
    ("method", "message", "field"),
    [
        ("ResetCache", admin_pb2.ResetCacheRequest(num_blocks=1), "num_blocks"),
        (
            "ResetCache",
            admin_pb2.ResetCacheRequest(layout=admin_pb2.CACHE_LAYOUT_CONTIGUOUS, block_size=4),
            "block_size",
        ),
        ("Sleep", admin_pb2.SleepRequest(), "level"),
        ("WakeUp", admin_pb2.WakeUpRequest(tags=["x"]), "tags[0]"),
        ("Profile", admin_pb2.ProfileRequest(duration_s=61), "duration_s"),
    ],
)
async def test_a_wrong_field_is_an_invalid_argument_with_its_path(
    ready: GatewayBench, method: str, message: Any, field: str
) -> None:
    error = await refused(getattr(ready.admin(), method)(message))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    metadata: Any = error.trailing_metadata()
    status = status_pb2.Status.FromString(metadata[DETAILS_KEY])
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    assert [violation.field for violation in bad_request.field_violations] == [field]


async def test_a_lost_rank_makes_a_verb_unavailable(bench: GatewayBench) -> None:
    rank, life = await bench.join()
    rank.may_step.clear()
    call = bench.admin().ResetCache(admin_pb2.ResetCacheRequest())
    plans = rank.num_plans
    await bench.until(lambda: rank.num_plans > plans)
    life.cancel()
    error = await refused(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_drain_answers_when_the_last_request_has_ended(bench: GatewayBench) -> None:
    rank, _ = await bench.join()
    rank.may_step.clear()
    call = bench.inference().Generate(request([1], sampling=sampling(max_tokens=20, ignore_eos=True)))
    await call.read()
    drain = asyncio.ensure_future(bench.admin().Drain(admin_pb2.DrainRequest()))
    await bench.until(lambda: bench.gateway.group.state.name == "DRAINING")
    assert not drain.done()
    rank.may_step.set()
    assert (await read_all(call))[-1].HasField("finished")
    await asyncio.wait_for(drain, PATIENCE_S)


async def test_records_of_any_size_reach_the_client(ready: GatewayBench, monkeypatch: pytest.MonkeyPatch) -> None:
    obey = WarmRanks.obey

    def with_large_trace(ranks: WarmRanks, step_id: int, command: Any) -> Any:
        report = obey(ranks, step_id, command)
        report.profile_trace = bytes(20 << 20)
        return report

    monkeypatch.setattr(WarmRanks, "obey", with_large_trace)
    with AdminClient(ready.addresses.admin) as admin:
        (record,) = await asyncio.to_thread(admin.profile, 0.01, with_trace=True)
    assert (record.table, len(record.trace)) == ("a table", 20 << 20)


async def test_the_client_has_a_method_and_typed_errors_for_each(ready: GatewayBench) -> None:
    with AdminClient(ready.addresses.admin) as admin:
        cache = await asyncio.to_thread(admin.reset_cache, layout=CacheLayout.CONTIGUOUS)
        assert (cache.block_size, cache.num_blocks) == (64, 2)
        with pytest.raises(InvalidRequestError, match="num_blocks: 1000000000 blocks and the null block need"):
            await asyncio.to_thread(admin.reset_cache, layout=CacheLayout.CONTIGUOUS, num_blocks=10**9)
        assert await asyncio.to_thread(admin.sleep, 1) == (1000,)
        with pytest.raises(WrongStateError, match="it is ASLEEP: call WakeUp first"):
            await asyncio.to_thread(admin.profile, 0.01)
        with pytest.raises(WrongStateError, match="PlaceExperts needs a group that is READY; it is ASLEEP"):
            await asyncio.to_thread(admin.place_experts)
        assert await asyncio.to_thread(admin.wake_up, ["weights"]) == ("kv",)
        topology = await asyncio.to_thread(admin.topology)
        assert (topology.state.value, topology.asleep, topology.cache_layout) == (
            "asleep", ("kv",), CacheLayout.CONTIGUOUS,
        )  # fmt: skip
        assert await asyncio.to_thread(admin.wake_up) == ()
        await asyncio.to_thread(admin.drain)

"""What ranks are asked to exchange by, and what the gateway makes of what they built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero_api.group_state import GroupState
from hetero_api.spec import ExchangeKind, PlacementShares
from hetero_api.v1 import ranks_pb2
from hetero_gateway.group.errors import EpochEnded
from hetero_gateway.group.orders import asked_exchange, built_exchange, load_order, parts_decide
from hetero_placement.decision import Streaming
from hetero_placement.shard_plans import deal_within_layers
from tests.unit.group.group_setup import GroupBench, ScriptedRank, group_settings, hello, model_config

pytestmark = pytest.mark.unit

SHM, TCP, GLOO = ranks_pb2.EXCHANGE_KIND_SHM, ranks_pb2.EXCHANGE_KIND_TCP, ranks_pb2.EXCHANGE_KIND_GLOO
TOGETHER = [hello(0), hello(1)]
APART = [hello(0), hello(1, host_id="there")]


@pytest.mark.parametrize(
    ("kind", "together", "apart"),
    [(ExchangeKind.AUTO, SHM, TCP), (ExchangeKind.TCP, TCP, TCP), (ExchangeKind.GLOO, GLOO, GLOO)],
)
def test_shared_memory_is_asked_for_where_ranks_are_on_one_host_and_tcp_elsewhere(
    kind: ExchangeKind, together: ranks_pb2.ExchangeKind.ValueType, apart: ranks_pb2.ExchangeKind.ValueType
) -> None:
    assert asked_exchange(kind, TOGETHER) == together
    assert asked_exchange(kind, APART) == apart
    assert asked_exchange(kind, [hello(0, host_id="")]) == apart


def test_shared_memory_that_cannot_be_is_an_end_that_names_field_and_hosts() -> None:
    assert asked_exchange(ExchangeKind.SHARED_MEMORY, TOGETHER) == SHM
    with pytest.raises(EpochEnded, match=r"spec\.exchange\.kind: SharedMemory, .*pod-1 on there") as caught:
        asked_exchange(ExchangeKind.SHARED_MEMORY, APART)
    assert caught.value.permanent


@pytest.mark.parametrize(
    ("kind", "built"),
    [
        (ExchangeKind.AUTO, GLOO), (ExchangeKind.AUTO, TCP), (ExchangeKind.TCP, GLOO), (ExchangeKind.GLOO, GLOO),
        (ExchangeKind.SHARED_MEMORY, SHM),
    ],
)  # fmt: skip
def test_what_ranks_built_is_told_with_their_reason(
    kind: ExchangeKind, built: ranks_pb2.ExchangeKind.ValueType
) -> None:
    formed = [ranks_pb2.Formed(exchange=built), ranks_pb2.Formed(exchange=built, exchange_reason="no compiler")]
    assert built_exchange(kind, formed) == (built, "no compiler")


@pytest.mark.parametrize(
    ("pools", "mode", "decide"),
    [
        ([{"name": "cpu", "ranks": 1}], "Auto", False),
        ([{"name": "cpu", "ranks": 2}], "Auto", True),
        ([{"name": "cpu", "ranks": 2}], "Layer", True),
        ([{"name": "cpu", "ranks": 2}], "Tensor", False),
        ([{"name": "a", "ranks": 1}, {"name": "b", "ranks": 1, "cpu": {"coresPerRank": 2}}], "Tensor", True),
        ([{"name": "a", "ranks": 1}, {"name": "b", "ranks": 1}], "Tensor", True),
        ([{"name": "gpu", "type": "GPU", "ranks": 2}], "Tensor", True),
        ([{"name": "gpu", "type": "GPU", "ranks": 1}, {"name": "cpu", "ranks": 1}], "Tensor", True),
    ],
)
def test_parts_are_measured_unless_ranks_are_alike_and_all_split_every_layer(
    pools: list[dict[str, Any]], mode: str, decide: bool
) -> None:
    assert parts_decide(group_settings(*pools, placement={"mode": mode})) is decide


def test_experts_are_always_measured() -> None:
    settings = group_settings({"name": "cpu", "ranks": 2}, placement={"mode": "Tensor"})
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
    config = model_config(**experts, moe_intermediate_size=2048, head_dim=64)
    assert parts_decide(replace(settings, config=config))


def test_gloo_will_not_do_where_shared_memory_is_required() -> None:
    formed = [ranks_pb2.Formed(exchange=GLOO, exchange_reason="/dev/shm is full")] * 2
    assert built_exchange(ExchangeKind.AUTO, formed) == (GLOO, "/dev/shm is full")
    with pytest.raises(EpochEnded, match=r"spec\.exchange\.kind: .*could not build: /dev/shm is full") as caught:
        built_exchange(ExchangeKind.SHARED_MEMORY, formed)
    assert caught.value.permanent


async def test_a_group_that_must_share_memory_and_cannot_fails_for_good() -> None:
    settings = group_settings(exchange={"kind": "SharedMemory"})
    async with GroupBench(settings) as bench:
        for ordinal in (0, 1):
            ScriptedRank(bench.group, ordinal).join(host_id=f"host-{ordinal}")
        await bench.until(GroupState.ABORTED)
        assert bench.group.failed
        assert "spec.exchange.kind: SharedMemory" in bench.topology.reason


async def test_topology_tells_why_the_exchange_is_not_the_fastest() -> None:
    async with GroupBench() as bench:
        ranks = [ScriptedRank(bench.group, ordinal) for ordinal in (0, 1)]
        for rank in ranks:
            rank.join()
        for rank in ranks:
            await rank.expect("form_group")
            rank.say(1, formed=ranks_pb2.Formed(exchange=GLOO, exchange_reason="no shared segment"))
        await bench.until(GroupState.LOADING)
        assert (bench.topology.exchange, bench.topology.exchange_reason) == (GLOO, "no shared segment")


def test_ranks_are_asked_to_defer_experts_as_the_resource_says() -> None:
    pools = ({"name": "gpu", "type": "GPU", "ranks": 1}, {"name": "cpu", "ranks": 1})
    plan = deal_within_layers(model_config(), cores=[1, 1], shares=PlacementShares())
    for engine, asked in (({}, 0), ({"expertDeferral": 3}, 3)):
        assert load_order(group_settings(*pools, engine=engine), plan).expert_deferral == asked


def test_ranks_share_experts_where_some_are_streamed() -> None:
    pools = ({"name": "gpu", "type": "GPU", "ranks": 1}, {"name": "cpu", "ranks": 1})
    plan = deal_within_layers(model_config(), cores=[1, 1], shares=PlacementShares())
    streaming = Streaming(256, 4096, 1 << 30, 1.0, 2.0)
    assert load_order(group_settings(*pools), plan).expert_buffer_bytes == 0
    assert load_order(group_settings(*pools), plan, streaming).expert_buffer_bytes == 1 << 30


def test_ranks_keep_memory_for_adapters_of_experts_as_the_resource_says() -> None:
    plan = deal_within_layers(model_config(), cores=[1], shares=PlacementShares())
    for adapters, asked in (({}, False), ({"experts": True}, True)):
        order = load_order(group_settings({"name": "cpu", "ranks": 1}, engine={"adapters": adapters}), plan)
        assert order.adapts_experts is asked

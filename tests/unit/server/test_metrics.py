"""What a scrape shows."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from hetero_api.probe_server import ProbeServer
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.server.errors import BindError
from hetero_gateway.server.gateway import Gateway, Ports
from hetero_gateway.server.metrics import graph_memory
from tests.unit.server.server_setup import TOKEN, GatewayBench, read_all, request, sampling, served_model

pytestmark = pytest.mark.unit


@pytest.fixture
async def scraped(ready: GatewayBench) -> AsyncIterator[tuple[GatewayBench, str]]:
    server = ready.gateway._start_probes("127.0.0.1", 0)
    yield ready, f"http://127.0.0.1:{server.port}/metrics"
    await asyncio.to_thread(server.stop)


async def scrape(url: str) -> dict[str, float]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def fetch() -> str:
        with opener.open(url, timeout=5) as response:
            return str(response.read().decode())

    families = text_string_to_metric_families(await asyncio.to_thread(fetch))
    return {
        sample.name + "".join(sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


async def test_requests_tokens_blocks_and_times_are_counted(scraped: tuple[GatewayBench, str]) -> None:
    bench, url = scraped
    stub = bench.inference()
    await read_all(stub.Generate(request([1] * 9, sampling=sampling(max_tokens=3, ignore_eos=True))))
    with pytest.raises(grpc.aio.AioRpcError):
        await read_all(stub.Generate(request("")))
    values = await scrape(url)
    assert values["hetero_requests_totalLENGTH"] == 1
    assert values["hetero_requests_totalINVALID_ARGUMENT"] == 1
    assert values["hetero_prompt_tokens_total"] == 9
    assert values["hetero_generated_tokens_total"] == 3
    assert values["hetero_time_to_first_token_seconds_count"] == 1
    assert values["hetero_step_seconds_count"] >= values["hetero_steps_total"] == 3
    assert (values["hetero_epoch"], values["hetero_ready"]) == (1, 1)
    assert (values["hetero_expert_rebalances_total"], values["hetero_moved_experts_total"]) == (0, 0)
    assert values["hetero_placement_predicted_tokens_per_second"] > 0
    assert values["hetero_placement_step_time_ratio"] > 0
    assert values["hetero_placement_measured_tokens_per_second"] == pytest.approx(
        values["hetero_placement_predicted_tokens_per_second"] / values["hetero_placement_step_time_ratio"]
    )
    assert (values["hetero_paused_requests"], values["hetero_recoveries_total"]) == (0, 0)
    assert (values["hetero_num_blocks"], values["hetero_free_blocks"]) == (32, 32)
    assert (values["hetero_running_requests"], values["hetero_waiting_requests"]) == (0, 0)


def test_what_graphs_took_is_told_of_ranks_that_make_some() -> None:
    ranks = [
        admin_pb2.RankStatus(place=ranks_pb2.RankPlace(rank=0), graph_bytes=5, graph_reserve_bytes=9),
        admin_pb2.RankStatus(place=ranks_pb2.RankPlace(rank=1)),
    ]
    samples = {tuple(sample.labels.values()): sample.value for sample in graph_memory(ranks).samples}
    assert samples == {("0", "taken"): 5, ("0", "reserved"): 9}


async def test_a_cancelled_call_is_counted_as_such(scraped: tuple[GatewayBench, str]) -> None:
    bench, url = scraped
    call = bench.inference().Generate(request([1], sampling=sampling(ignore_eos=True)))
    await call.read()
    call.cancel()
    await bench.until(lambda: bench.gateway.core.stats().finished_requests == 1)
    async with asyncio.timeout(5):
        while "hetero_requests_totalCANCELLED" not in (values := await scrape(url)):
            pass
    assert values["hetero_requests_totalCANCELLED"] == 1


async def test_a_metrics_port_that_is_taken_is_named(tmp_path: Path) -> None:
    server = ProbeServer.start(host="127.0.0.1", port=0, probes={}, registry=CollectorRegistry())
    gateway = Gateway(served_model(tmp_path), token=TOKEN)
    try:
        with pytest.raises(BindError, match=f"--metrics-port: cannot listen on 127.0.0.1 port {server.port}"):
            await gateway.listen(Ports("127.0.0.1", 0, 0, 0, 0, metrics=server.port))
    finally:
        await gateway.close("over")
        await asyncio.to_thread(server.stop)

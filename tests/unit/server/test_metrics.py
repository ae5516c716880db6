"""What a scrape shows."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from hetero_api.metrics import GatewayMetric
from hetero_api.probe_server import ProbeServer
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.telemetry.latencies import Latencies
from hetero_gateway.server.errors import BindError
from hetero_gateway.server.gateway import Gateway, Ports
from hetero_gateway.server.metrics import EngineReading, _group, rank_metrics
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
    assert values["vllm:prompt_tokens_total0g"] == values["vllm:prefix_cache_queries_total0g"] == 9
    assert values["vllm:generation_tokens_total0g"] == 3
    assert values["vllm:request_success_total0glength"] == 1
    for histogram in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert values[f"vllm:{histogram}_seconds_count0g"] == 1, histogram
    assert values["vllm:inter_token_latency_seconds_count0g"] == 2
    assert (values["vllm:request_prompt_tokens_sum0g"], values["vllm:request_generation_tokens_sum0g"]) == (9, 3)
    assert values["hetero_step_seconds_count"] >= values["hetero_steps_total"] == 3
    assert (values["hetero_epoch"], values["hetero_ready"]) == (1, 1)
    assert (values["hetero_expert_swaps_total"], values["hetero_expert_swap_read_bytes_total"]) == (0, 0)
    assert values["hetero_placement_predicted_tokens_per_second"] > 0
    assert values["hetero_placement_step_time_ratio"] > 0
    assert values["hetero_placement_measured_tokens_per_second"] == pytest.approx(
        values["hetero_placement_predicted_tokens_per_second"] / values["hetero_placement_step_time_ratio"]
    )
    assert (values["hetero_paused_requests"], values["hetero_recoveries_total"]) == (0, 0)
    assert (values["hetero_resting"], values["hetero_idle_sleeps_total"]) == (0, 0)
    assert (values["hetero_idle_sleep_seconds"], values["hetero_idle_wake_seconds"]) == (0, 0)
    assert (values["hetero_num_blocks"], values["hetero_free_blocks"]) == (32, 32)
    assert (values["vllm:num_requests_running0g"], values["vllm:num_requests_waiting0g"]) == (0, 0)
    assert (values["vllm:kv_cache_usage_perc0g"], values["vllm:num_preemptions_total0g"]) == (0, 0)
    assert values["vllm:spec_decode_num_drafts_total0g"] == 0


async def at_the_door(bench: GatewayBench, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{bench.addresses.http}", trust_env=False) as http:
        return await http.get("/metrics", headers=headers)


def of_a_pod(families: Iterable[Metric], name: str) -> tuple[float, dict[str, str]]:
    """What the Gateway API inference extension takes of a metric: the newest, here the only, sample of a gauge."""
    (family,) = (each for each in families if each.name == name)
    assert family.type == "gauge"
    (sample,) = family.samples
    return sample.value, sample.labels


async def test_the_inference_extensions_default_rules_read_a_scrape_of_the_serving_port(ready: GatewayBench) -> None:
    call = ready.inference().Generate(request([1] * 9, sampling=sampling(ignore_eos=True)))
    await call.read()
    families = list(text_string_to_metric_families((await at_the_door(ready)).text))
    call.cancel()
    assert of_a_pod(families, "vllm:num_requests_running")[0] == 1
    assert of_a_pod(families, "vllm:num_requests_waiting")[0] == 0
    assert 0 < of_a_pod(families, "vllm:kv_cache_usage_perc")[0] <= 1
    _, cache = of_a_pod(families, "vllm:cache_config_info")
    assert (int(cache["block_size"]), int(cache["num_gpu_blocks"])) == (4, 32)
    _, adapters = of_a_pod(families, "vllm:lora_requests_info")
    assert (int(adapters["max_lora"]), adapters["running_lora_adapters"], adapters["waiting_lora_adapters"]) == (
        0,
        "",
        "",
    )


async def test_a_scrape_has_the_catalogues_metrics_and_no_others(ready: GatewayBench) -> None:
    await read_all(ready.inference().Generate(request([1] * 9, sampling=sampling(max_tokens=3, ignore_eos=True))))
    families = list(text_string_to_metric_families((await at_the_door(ready)).text))
    scraped = {family.name: family for family in families if not family.name.endswith("_created")}
    catalogue = {metric.value.name: metric.value for metric in GatewayMetric}
    assert set(scraped) == set(catalogue)
    for name, family in scraped.items():
        spec = catalogue[name]
        assert (family.type, family.documentation) == (spec.type.value, spec.text)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(spec.labels), sample


async def test_names_keep_their_colon_whatever_format_a_scraper_prefers(scraped: tuple[GatewayBench, str]) -> None:
    bench, url = scraped
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    async with httpx.AsyncClient(trust_env=False) as http:
        for address in (url, f"http://{bench.addresses.http}/metrics"):
            answer = await http.get(address, headers={"Accept": accept})
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert "\nvllm:num_requests_running{" in answer.text


async def test_scrapes_at_once_wait_for_one_another(ready: GatewayBench) -> None:
    answers = await asyncio.gather(*(at_the_door(ready) for _ in range(8)))
    assert {answer.status_code for answer in answers} == {200}


def test_each_rank_has_its_place_memory_and_times() -> None:
    device = ranks_pb2.DeviceReport(kind=ranks_pb2.DEVICE_KIND_CPU, numa_nodes=[0, 2])
    ranks = [
        admin_pb2.RankStatus(
            place=ranks_pb2.RankPlace(rank=0, pool="cpu", pod_name="cpu-0", device=device),
            joined=True, weight_bytes=7, kv_bytes=3, graph_bytes=5, graph_reserve_bytes=9, local_memory_percent=97,
            decode=ranks_pb2.StepTimes(steps=4, rows=8, seconds=2.0, exchange_s=0.5), decode_read_bytes=600,
            memory_bandwidth=1e9,
        ),
        admin_pb2.RankStatus(place=ranks_pb2.RankPlace(rank=1, pool="cpu")),
    ]  # fmt: skip
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in rank_metrics(ranks)
        for sample in family.samples
    }
    assert samples["hetero_rank_info", "0", "cpu", "cpu-0", "CPU", "0,2"] == 1
    assert samples["hetero_rank_info", "1", "cpu", "", "", ""] == 0
    kinds = {"weights": 7, "kv": 3, "graphs": 5, "graphs_reserved": 9}
    assert {kind: samples["hetero_rank_memory_bytes", "0", kind] for kind in kinds} == kinds
    assert samples["hetero_rank_local_memory_ratio", "0"] == 0.97
    assert samples["hetero_rank_phase_steps_total", "0", "decode"] == 4
    assert samples["hetero_rank_step_seconds_total", "0", "decode", "compute"] == 1.5
    assert samples["hetero_rank_step_seconds_total", "0", "decode", "exchange"] == 0.5
    assert samples["hetero_rank_read_bytes_total", "0"] == 600
    assert samples["hetero_rank_memory_bandwidth_bytes_per_second", "0"] == 1e9
    assert ("hetero_rank_local_memory_ratio", "1") not in samples


def test_what_proposals_give_is_shown() -> None:
    topology = admin_pb2.GetTopologyResponse(speculation_gain=2.5)
    reading = EngineReading(admin_pb2.GetStatsResponse(), topology, Latencies(), ready=True, recoveries=0)
    samples = [sample for family in _group(reading) for sample in family.samples]
    assert [sample.value for sample in samples if sample.name == "hetero_speculation_gain"] == [2.5]


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

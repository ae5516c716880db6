"""Adapters at the gateway's doors: loaded by administrators, asked for by name, never mixed up in the prefix cache."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from hetero_api.v1 import admin_pb2
from hetero_gateway.group.errors import UnsupportedSpecError
from tests.unit.group.group_setup import WarmRanks
from tests.unit.server.server_setup import GatewayBench, read_all, request, sampling, served_model

pytestmark = pytest.mark.unit

ENGINE = {"blockSize": 4, "maxNumSeqs": 2, "maxNumBatchedTokens": 64}
ADAPTERS = {"maxLoaded": 2, "roots": ["/adapters", "/more"], "overHttp": True}
LONG = "a prompt that fills some blocks"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[GatewayBench]:
    model = served_model(tmp_path, engine=ENGINE | {"adapters": ADAPTERS})
    async with GatewayBench(model) as running:
        await running.join()
        yield running


def ranks_of(rank: Any) -> WarmRanks:
    ranks: WarmRanks = rank._ranks
    return ranks


async def load(bench: GatewayBench, name: str, directory: str) -> None:
    await bench.admin().LoadAdapter(admin_pb2.LoadAdapterRequest(name=name, directory=directory))


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), raised.value.details() or ""


async def answered(bench: GatewayBench, model: str) -> int:
    """Cached tokens of a prompt that is always the same."""
    events = await read_all(bench.inference().Generate(request(LONG, model=model, sampling=sampling(max_tokens=2))))
    cached: int = events[-1].finished.usage.cached_tokens
    return cached


async def post(bench: GatewayBench, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{bench.addresses.http}", trust_env=False) as http:
        return await http.post(path, json=body)


async def test_an_adapter_has_a_prefix_cache_of_its_own(bench: GatewayBench) -> None:
    """Also apart from that of an earlier adapter of its name and number."""
    await load(bench, "one", "/adapters/one")
    await load(bench, "two", "/more/two")
    assert await answered(bench, "") == 0
    assert await answered(bench, "g") > 0
    for name in ("one", "two"):
        assert await answered(bench, name) == 0
        assert await answered(bench, name) > 0
    await bench.admin().UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="one"))
    await load(bench, "one", "/adapters/one")
    assert await answered(bench, "one") == 0


async def test_names_that_are_not_loaded_are_refused_at_both_doors(bench: GatewayBench) -> None:
    await load(bench, "one", "/adapters/one")
    code, text = await refusal(read_all(bench.inference().Generate(request("a", model="two"))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "model" in text
    assert "'one'" in text
    answer = await post(bench, "/v1/completions", model="two", prompt="a")
    assert answer.status_code == 404
    assert "'g', 'one'" in answer.json()["error"]["message"]
    answer = await post(bench, "/v1/embeddings", model="one", input="a")
    assert answer.status_code == 400
    assert "adapters make no embeddings" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "directory", "code", "problem"),
    [
        ("", "/adapters/x", grpc.StatusCode.INVALID_ARGUMENT, "1 to 256 printable characters"),
        ("g", "/adapters/x", grpc.StatusCode.INVALID_ARGUMENT, "the model's own name"),
        ("hf://org/model", "/adapters/x", grpc.StatusCode.INVALID_ARGUMENT, "the model's own name"),
        ("x", "/elsewhere/x", grpc.StatusCode.INVALID_ARGUMENT, "/adapters, /more"),
        ("x", "/adapters/../etc", grpc.StatusCode.INVALID_ARGUMENT, "/adapters, /more"),
        ("x", "adapters/x", grpc.StatusCode.INVALID_ARGUMENT, "/adapters, /more"),
        ("one", "/adapters/x", grpc.StatusCode.FAILED_PRECONDITION, "loaded already"),
        ("x", "/adapters/x", grpc.StatusCode.FAILED_PRECONDITION, "maxLoaded"),
    ],
)
async def test_loads_that_make_no_sense_are_refused_before_any_rank_hears_of_them(
    bench: GatewayBench, name: str, directory: str, code: grpc.StatusCode, problem: str
) -> None:
    await load(bench, "one", "/adapters/one")
    await load(bench, "two", "/adapters/two")
    told, text = await refusal(load(bench, name, directory))
    assert told is code
    assert problem in text


async def test_a_rank_that_cannot_load_an_adapter_says_why(tmp_path: Path) -> None:
    async with GatewayBench(served_model(tmp_path, engine=ENGINE | {"adapters": ADAPTERS})) as bench:
        rank, _ = await bench.join()
        ranks_of(rank).problem_of_adapters = "adapter_config.json: use_dora: True is not served"
        answer = await post(bench, "/v1/load_lora_adapter", lora_name="one", lora_path="/adapters/one")
        assert answer.status_code == 409
        assert "use_dora" in answer.json()["error"]["message"]
        assert list((await bench.admin().ListAdapters(admin_pb2.ListAdaptersRequest())).adapters) == []


async def test_an_adapter_stays_while_a_request_uses_it(tmp_path: Path) -> None:
    async with GatewayBench(served_model(tmp_path, engine=ENGINE | {"adapters": ADAPTERS})) as bench:
        rank, _ = await bench.join()
        await load(bench, "one", "/adapters/one")
        rank.may_step.clear()
        call = bench.inference().Generate(request("abc", model="one", sampling=sampling(max_tokens=40)))
        assert (await call.read()).HasField("started")
        code, text = await refusal(bench.admin().UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="one")))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "1 requests use 'one'" in text
        rank.may_step.set()
        await load(bench, "two", "/adapters/two")
        await read_all(call)
        await bench.admin().UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="one"))
        assert ranks_of(rank).adapters == {2: "/adapters/two"}
        assert 1 in ranks_of(rank).used_adapters


async def test_a_new_epoch_loads_what_the_last_one_had(tmp_path: Path) -> None:
    async with GatewayBench(served_model(tmp_path, engine=ENGINE | {"adapters": ADAPTERS})) as bench:
        _, life = await bench.join()
        await load(bench, "one", "/adapters/one")
        life.cancel()
        await bench.until(lambda: not bench.gateway.group.is_ready)
        rank, _ = await bench.join()
        assert ranks_of(rank).adapters == {1: "/adapters/one"}
        assert await answered(bench, "one") == 0
        await asyncio.gather(answered(bench, "one"), answered(bench, ""))


async def test_the_http_door_loads_lists_answers_and_unloads(bench: GatewayBench) -> None:
    answer = await post(bench, "/v1/load_lora_adapter", lora_name="one", lora_path="/adapters/one")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'one' added successfully.")
    async with httpx.AsyncClient(base_url=f"http://{bench.addresses.http}", trust_env=False) as http:
        models = (await http.get("/v1/models")).json()["data"]
        assert (await http.get("/v1/models/one")).json()["parent"] == "g"
    assert [(each["id"], each.get("parent")) for each in models] == [("g", None), ("one", "g")]
    answer = await post(bench, "/v1/completions", model="one", prompt="a", max_tokens=2)
    assert answer.json()["model"] == "one"
    answer = await post(bench, "/v1/load_lora_adapter", lora_name="x", lora_path="/etc")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "lora_path"
    answer = await post(bench, "/v1/unload_lora_adapter", lora_name="one")
    assert answer.status_code == 200
    assert (await post(bench, "/v1/unload_lora_adapter", lora_name="one")).status_code == 409


async def test_the_http_door_loads_nothing_unless_asked_to(tmp_path: Path) -> None:
    """And with an administrator's token, to nobody else."""
    body = {"lora_name": "one", "lora_path": "/adapters/one"}
    closed = served_model(tmp_path, engine=ENGINE | {"adapters": ADAPTERS | {"overHttp": False}})
    async with GatewayBench(closed) as bench:
        await bench.join()
        assert (await post(bench, "/v1/load_lora_adapter", **body)).status_code == 404
    opened = served_model(tmp_path, engine=ENGINE | {"adapters": ADAPTERS})
    async with GatewayBench(opened, admin_token="secret") as bench:
        await bench.join()
        assert (await post(bench, "/v1/load_lora_adapter", **body)).status_code == 401


async def test_adapters_of_the_resource_are_there_from_the_start(tmp_path: Path) -> None:
    load = [{"name": "one", "directory": "/adapters/one"}, {"name": "two", "directory": "/more/two"}]
    async with GatewayBench(served_model(tmp_path, engine=ENGINE | {"adapters": ADAPTERS | {"load": load}})) as bench:
        rank, _ = await bench.join()
        assert ranks_of(rank).adapters == {1: "/adapters/one", 2: "/more/two"}
        assert await answered(bench, "two") == 0


@pytest.mark.parametrize(
    ("load", "problem"),
    [
        (
            [("a", "/adapters/a"), ("b", "/adapters/b"), ("c", "/adapters/c")],
            "load: 3 adapters are more than maxLoaded",
        ),
        ([("a", "/elsewhere/a")], r"load\[0\].directory: lies in none"),
        ([("a", "/adapters/../a")], r"load\[0\].directory: lies in none"),
        ([("a", "/adapters/a"), ("a", "/adapters/b")], r"load\[1\].name: 'a'"),
        ([("org/model", "/adapters/a")], r"load\[0\].name: 'org/model'"),
    ],
)
def test_adapters_of_the_resource_that_make_no_sense_are_refused(
    tmp_path: Path, load: list[tuple[str, str]], problem: str
) -> None:
    adapters = ADAPTERS | {"load": [{"name": name, "directory": directory} for name, directory in load]}
    with pytest.raises(UnsupportedSpecError) as raised:
        served_model(tmp_path, engine=ENGINE | {"adapters": adapters})
    assert re.search(problem, "\n".join(raised.value.problems))


async def test_a_group_without_roots_loads_nothing(tmp_path: Path) -> None:
    async with GatewayBench(served_model(tmp_path)) as bench:
        await bench.join()
        code, text = await refusal(load(bench, "one", "/adapters/one"))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "spec.engine.adapters.maxLoaded" in text

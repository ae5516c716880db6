"""Adapters at the gateway's doors: loaded by administrators, asked for by name, never mixed up in the prefix cache."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from hetero_api.spec import AdaptersSpec
from hetero_api.v1 import admin_pb2
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import GroupLost
from hetero_gateway.group.adapters import registry
from hetero_gateway.group.admin_rpcs import AdminRpcs
from hetero_gateway.group.errors import UnsupportedSpecError
from hetero_gateway.server.reading import RequestReader
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


@pytest.fixture
async def joined(tmp_path: Path) -> AsyncIterator[tuple[GatewayBench, Any]]:
    """A gateway and its rank."""
    model = served_model(tmp_path, engine=ENGINE | {"adapters": ADAPTERS}, gateway={"maxQueuedRequests": 4})
    async with GatewayBench(model) as running:
        rank, _ = await running.join()
        yield running, rank


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters give way as soon as no request uses them."""
    monkeypatch.setattr(registry, "SETTLED_S", 0.0)


async def known(bench: GatewayBench) -> list[str]:
    answer = await bench.admin().ListAdapters(admin_pb2.ListAdaptersRequest())
    return [each.name for each in answer.adapters]


@pytest.mark.usefixtures("at_once")
async def test_the_least_recently_used_adapter_gives_way_and_comes_back(joined: tuple[GatewayBench, Any]) -> None:
    bench, rank = joined
    await load(bench, "one", "/adapters/one")
    await load(bench, "two", "/adapters/two")
    assert await answered(bench, "one") == 0
    await load(bench, "three", "/more/three")
    assert ranks_of(rank).adapters == {1: "/adapters/one", 2: "/more/three"}
    assert await known(bench) == ["one", "three", "two"]
    assert await answered(bench, "two") == 0
    assert ranks_of(rank).adapters == {1: "/adapters/two", 2: "/more/three"}
    assert await answered(bench, "one") > 0, "its weights are the same, so its prefixes are, too"
    await bench.admin().UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="three"))
    assert await known(bench) == ["one", "two"]
    assert ranks_of(rank).adapters == {1: "/adapters/two", 2: "/adapters/one"}


@pytest.mark.usefixtures("at_once")
async def test_a_request_waits_while_others_use_all_adapters_that_are_loaded(joined: tuple[GatewayBench, Any]) -> None:
    bench, rank = joined
    for name in ("three", "one", "two"):
        await load(bench, name, f"/adapters/{name}")
    rank.may_step.clear()
    calls = [
        bench.inference().Generate(request("abc", model=name, sampling=sampling(max_tokens=4)))
        for name in ("one", "two")
    ]
    for call in calls:
        assert (await call.read()).HasField("started")
    code, text = await refusal(load(bench, "four", "/adapters/four"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "maxLoaded" in text
    waiting = asyncio.create_task(answered(bench, "three"))
    await asyncio.sleep(0.1)
    assert sorted(ranks_of(rank).adapters.values()) == ["/adapters/one", "/adapters/two"]
    assert not waiting.done()
    rank.may_step.set()
    await asyncio.gather(*map(read_all, calls))
    assert await waiting == 0
    assert "/adapters/three" in ranks_of(rank).adapters.values()


async def test_a_load_that_waits_for_room_is_woken_by_what_makes_some() -> None:
    """The end of a request, an adapter that goes, and the time when one settles; nothing looks again meanwhile."""
    now_s = 100.0
    known = registry.AdapterRegistry(AdaptersSpec.model_validate(ADAPTERS), taken=(), clock=lambda: now_s)
    adapters = [known.new(name, f"/adapters/{name}") for name in ("one", "two")]
    for number, adapter in enumerate(adapters, 1):
        known.place(adapter, number)
    ends = [known.begin(number) for number in (1, 2)]
    for change in (ends[0], lambda: known.remove("one"), known.note_change):
        waiting = asyncio.create_task(known.wait_for_room(60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        change()
        await asyncio.wait_for(waiting, 5.0)
    ends[1]()
    known.ask(replace(adapters[1], number=2))
    now_s += registry.SETTLED_S - 0.01
    await asyncio.wait_for(known.wait_for_room(60.0), 5.0)


async def test_an_adapter_that_was_just_asked_for_does_not_give_way(joined: tuple[GatewayBench, Any]) -> None:
    bench, _ = joined
    for name in ("one", "two"):
        await load(bench, name, f"/adapters/{name}")
        await answered(bench, name)
    code, _ = await refusal(load(bench, "three", "/adapters/three"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.usefixtures("at_once")
async def test_requests_of_more_adapters_than_are_loaded_are_all_answered(joined: tuple[GatewayBench, Any]) -> None:
    bench, rank = joined
    names = ["", *(f"a{number}" for number in range(6))]
    for name in names[1:]:
        await load(bench, name, f"/adapters/{name}")
    few = asyncio.Semaphore(4)  # as many as the gateway queues

    async def ask(name: str) -> None:
        async with few:
            await answered(bench, name)

    await asyncio.gather(*(ask(name) for _ in range(8) for name in names))
    assert len(ranks_of(rank).adapters) == ADAPTERS["maxLoaded"]
    assert await known(bench) == names[1:]


@pytest.mark.usefixtures("at_once")
async def test_an_adapter_that_cannot_be_loaded_again_fails_its_own_request_only(
    joined: tuple[GatewayBench, Any],
) -> None:
    bench, rank = joined
    for name in ("one", "two", "three"):
        await load(bench, name, f"/adapters/{name}")
    ranks_of(rank).problem_of_adapters = "/adapters/one/adapter_model.safetensors: no such file"
    code, text = await refusal(read_all(bench.inference().Generate(request("a", model="one"))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "no such file" in text
    assert await answered(bench, "") == 0
    ranks_of(rank).problem_of_adapters = ""
    assert await answered(bench, "one") == 0


async def test_an_adapter_that_is_not_loaded_is_refused_while_the_group_sleeps(
    joined: tuple[GatewayBench, Any],
) -> None:
    bench, _ = joined
    for name in ("one", "two", "three"):
        await load(bench, name, f"/adapters/{name}")
    await bench.admin().Sleep(admin_pb2.SleepRequest(level=1))
    code, text = await refusal(read_all(bench.inference().Generate(request("a", model="one"))))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "ASLEEP" in text


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


@pytest.mark.usefixtures("at_once")
async def test_a_request_for_an_adapter_waits_when_the_group_is_lost_while_it_wakes(
    joined: tuple[GatewayBench, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, _ = joined
    for name in ("one", "two", "three"):
        await load(bench, name, f"/adapters/{name}")
    rests = iter([True])

    async def rouse(_: AdminRpcs) -> None:
        raise GroupLost("rank 0 was lost")

    monkeypatch.setattr(EngineCore, "is_resting", property(lambda _: next(rests, False)))
    monkeypatch.setattr(AdminRpcs, "rouse", rouse)
    assert await answered(bench, "one") == 0


@pytest.mark.usefixtures("at_once")
async def test_an_adapter_stays_until_all_prompts_of_a_call_are_read(
    joined: tuple[GatewayBench, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, _ = joined
    await load(bench, "one", "/adapters/one")
    read, others = RequestReader.read, iter(["two", "three"])

    async def read_late(self: RequestReader, *given: Any, **named: Any) -> Any:
        for name in others:
            await load(bench, name, f"/adapters/{name}")
        return await read(self, *given, **named)

    turns = iter([read, read_late])

    async def read_in_turn(self: RequestReader, *given: Any, **named: Any) -> Any:
        return await next(turns)(self, *given, **named)

    monkeypatch.setattr(RequestReader, "read", read_in_turn)
    answer = await post(bench, "/v1/completions", model="one", prompt=["a", "b"], max_tokens=1)
    assert answer.status_code == 200, answer.text


@pytest.fixture
def lost_folders(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Folders of adapters that ranks cannot read."""
    lost: set[str] = set()
    obey = WarmRanks.obey

    def obey_or_not(self: WarmRanks, step_id: int, command: Any) -> Any:
        directory = command.load_adapter.directory
        self.problem_of_adapters = f"{directory}: no such file" if directory in lost else ""
        return obey(self, step_id, command)

    monkeypatch.setattr(WarmRanks, "obey", obey_or_not)
    return lost


async def test_a_group_heals_without_an_adapter_whose_folder_is_lost(
    joined: tuple[GatewayBench, Any], lost_folders: set[str]
) -> None:
    bench, rank = joined
    [life] = bench._tasks
    for name in ("one", "two"):
        await load(bench, name, f"/adapters/{name}")
    rank.may_step.clear()
    models = ("one", "two", "")
    calls = [
        asyncio.create_task(read_all(bench.inference().Generate(request(f"r{model}", model=model)))) for model in models
    ]
    core = bench.gateway.core
    await bench.until(lambda: core.stats().running_requests + core.stats().waiting_requests == 3)
    lost_folders.add("/adapters/one")
    life.cancel()
    await bench.until(lambda: not bench.gateway.group.is_ready)
    rank, _ = await bench.join()
    assert ranks_of(rank).adapters == {2: "/adapters/two"}
    code, text = await refusal(calls[0])
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "'one' cannot be loaded again: " in text
    assert "/adapters/one: no such file" in text
    for call in calls[1:]:
        assert (await call)[-1].HasField("finished")
    code, text = await refusal(read_all(bench.inference().Generate(request("later", model="one"))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "no such file" in text
    lost_folders.clear()
    assert await answered(bench, "one") == 0


async def test_weights_are_updated_without_an_adapter_whose_folder_is_lost(
    joined: tuple[GatewayBench, Any], lost_folders: set[str]
) -> None:
    bench, _ = joined
    await load(bench, "one", "/adapters/one")
    lost_folders.add("/adapters/one")
    await bench.admin().UpdateWeights(admin_pb2.UpdateWeightsRequest())
    assert bench.gateway.group.is_ready
    code, text = await refusal(read_all(bench.inference().Generate(request("a", model="one"))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "no such file" in text
    lost_folders.clear()
    assert await answered(bench, "one") == 0


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
        for ending in ("%0A", "%0a%00"):
            assert (await post(bench, "/v1/load_lora_adapter" + ending, **body)).status_code == 400, ending
        assert list(bench.gateway.group.adapters) == []


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

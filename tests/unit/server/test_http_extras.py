"""Beside completions: calls about tokens, the version, web pages of other origins, and the model's own defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_api.contract import VERSION
from hetero_api.errors import ModelError
from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.server.config import read_model
from hetero_gateway.server.sampling_params import read_sampling_defaults
from tests.unit.server.server_setup import GatewayBench, served_model, write_manifest, write_model

pytestmark = pytest.mark.unit

ORIGIN = "https://chat.example.org"


def http(bench: GatewayBench) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{bench.addresses.http}", trust_env=False)


async def test_text_and_chats_are_turned_to_tokens_and_back(bench: GatewayBench) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with http(bench) as client:
        text = (await client.post("/tokenize", json={"model": "g", "prompt": "hello"})).json()
        chat = (await client.post("/tokenize", json={"messages": messages, "add_special_tokens": True})).json()
        back = (await client.post("/detokenize", json={"tokens": text["tokens"]})).json()
        whole = (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()
    assert (text["count"], text["max_model_len"]) == (5, 64)
    assert back == {"prompt": "hello"}
    assert whole == {"prompt": "[user]hi[assistant]"}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/tokenize", {}, 400, "exactly one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "not served here"),
        ("/tokenize", {"messages": []}, 400, "at least one message"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens: "),
        ("/detokenize", {"tokens": [258]}, 400, "must be in the vocabulary"),
    ],
)
async def test_calls_about_tokens_have_bounds(
    bench: GatewayBench, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    async with http(bench) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


async def test_the_version_is_told(bench: GatewayBench) -> None:
    async with http(bench) as client:
        assert (await client.get("/version")).json() == {"version": VERSION}


@pytest.mark.parametrize(("origin", "allowed"), [(ORIGIN, ORIGIN), ("https://elsewhere.org", None)])
async def test_pages_of_named_origins_may_call(tmp_path: Path, origin: str, allowed: str | None) -> None:
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    async with (
        GatewayBench(served_model(tmp_path, gateway={"http": {"corsOrigins": [ORIGIN]}})) as bench,
        http(bench) as client,
    ):
        before = await client.options("/v1/chat/completions", headers=asked)
        called = await client.get("/version", headers={"Origin": origin})
    assert before.headers.get("access-control-allow-origin") == allowed
    assert called.headers.get("access-control-allow-origin") == allowed
    assert called.status_code == 200


async def test_without_origins_no_page_may_call(bench: GatewayBench) -> None:
    async with http(bench) as client:
        assert "access-control-allow-origin" not in (await client.get("/version", headers={"Origin": ORIGIN})).headers


def write_defaults(folder: Path, **defaults: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(defaults))


@pytest.mark.parametrize(("setting", "is_greedy"), [({}, True), ({"engine": {"samplingDefaults": "None"}}, False)])
async def test_the_models_own_defaults_count_where_a_request_is_silent(
    tmp_path: Path, setting: dict[str, Any], is_greedy: bool
) -> None:
    write_defaults(write_model(tmp_path), temperature=0.0, top_k=20, eos_token_id=256, do_sample=True)
    model = read_model(write_manifest(tmp_path / "g.yaml", **setting), tmp_path)
    async with GatewayBench(model) as bench:
        reader = bench.gateway._endpoint._reader
        silent = await reader.read(pb.GenerateRequest(text="a"))
        own = await reader.read(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(temperature=0.5, top_k=0)))
    assert (silent.sampling.temperature, silent.sampling.top_k) == ((0.0, 20) if is_greedy else (1.0, 0))
    assert (own.sampling.temperature, own.sampling.top_k) == (0.5, 0)


def test_defaults_that_are_none_are_the_models_fault(tmp_path: Path) -> None:
    write_defaults(tmp_path, temperature="hot")
    with pytest.raises(ModelError, match="temperature must be a number"):
        read_sampling_defaults(tmp_path)


@pytest.mark.parametrize("defaults", [{"top_p": 3}, {"top_p": 0.0}, {"temperature": -1.0}])
def test_defaults_out_of_bounds_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, defaults: dict[str, float]
) -> None:
    write_defaults(tmp_path, min_p=0.5, **defaults)
    assert read_sampling_defaults(tmp_path) == pb.SamplingParams(min_p=0.5)
    assert f"generation_config.json: {next(iter(defaults))} must be" in caplog.text


@pytest.mark.parametrize(("value", "top_k"), [(-1, 0), (-1.0, 0), (50.0, 50)])
def test_a_default_top_k_may_be_written_in_other_ways(tmp_path: Path, value: float, top_k: int) -> None:
    write_defaults(tmp_path, top_k=value, temperature=1.0)
    assert read_sampling_defaults(tmp_path) == pb.SamplingParams(top_k=top_k, temperature=1)


def test_defaults_may_be_null_or_missing(tmp_path: Path) -> None:
    assert not read_sampling_defaults(tmp_path).ListFields()
    write_defaults(tmp_path, temperature=None)
    assert not read_sampling_defaults(tmp_path).ListFields()

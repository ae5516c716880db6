"""Nothing is in flight after a call that failed, whichever step of it failed and whichever door it came through."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest

from hetero_gateway.server import inference
from hetero_gateway.server.openai import answers, endpoint
from tests.unit.group.group_setup import wait_until
from tests.unit.server.server_setup import GatewayBench, read_all, request, sampling

pytestmark = pytest.mark.unit

LONG: dict[str, Any] = {"model": "g", "prompt": "hello", "n": 16, "max_tokens": 50, "ignore_eos": True}


@pytest.fixture
async def held(bench: GatewayBench) -> GatewayBench:
    """A gateway that serves, whose rank holds its steps: whatever is submitted stays in flight."""
    rank, _ = await bench.join()
    rank.may_step.clear()
    return bench


async def _post(
    bench: GatewayBench, *, headers: list[tuple[bytes, bytes]] | None = None, **body: Any
) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{bench.addresses.http}", trust_env=False) as http:
        return await http.post("/v1/completions", json=LONG | body, headers=headers)


def _broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken for the test")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("request_id", ["€", "a\r\nb", "x" * 129])
async def test_an_id_that_no_header_can_hold_is_refused(held: GatewayBench, request_id: str, stream: bool) -> None:
    answer = await _post(held, request_id=request_id, stream=stream)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    assert held.gateway.core.is_idle


async def test_an_id_in_a_header_has_the_same_bounds(held: GatewayBench) -> None:
    answer = await _post(held, headers=[(b"x-request-id", "é".encode())], stream=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    assert held.gateway.core.is_idle


@pytest.mark.parametrize("broken", ["_EventStream", "_events"])
async def test_a_stream_that_cannot_begin_ends_its_requests(
    held: GatewayBench, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, broken, _broken)
    answer = await _post(held, stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert held.gateway.core.is_idle
    await held.gateway.wait_idle()


async def test_a_chunk_that_cannot_be_written_is_the_servers_error(
    ready: GatewayBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers.CompletionFormatter, "delta_part", lambda *_: {"text": "\ud83d"})
    answer = await _post(ready, stream=True)
    assert '"code":"internal"' in answer.text
    await wait_until(lambda: ready.gateway.core.is_idle)
    async with httpx.AsyncClient(base_url=f"http://{ready.addresses.http}", trust_env=False) as http:
        counted = (await http.get("/metrics")).text
    assert 'hetero_http_calls_total{outcome="500"} 1.0' in counted


@pytest.mark.parametrize("method", ["delta", "end"])
async def test_a_stream_that_breaks_ends_its_requests(
    ready: GatewayBench, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers.ResponseFormatter, method, _broken)
    answer = await _post(ready, stream=True)
    assert '"code":"internal"' in answer.text
    assert "[DONE]" not in answer.text
    await wait_until(lambda: ready.gateway.core.is_idle)
    await ready.gateway.wait_idle()


async def test_an_answer_that_cannot_be_made_ends_its_requests(
    ready: GatewayBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers.Choice, "__init__", _broken)
    assert (await _post(ready)).status_code == 500
    assert ready.gateway.core.is_idle
    await ready.gateway.wait_idle()


async def test_of_several_prompts_none_is_left_when_one_is_refused(held: GatewayBench) -> None:
    # One more than run and wait.
    answer = await _post(held, prompt=["hello"] * 4, n=1)
    assert answer.status_code == 429
    assert held.gateway.core.is_idle
    await held.gateway.wait_idle()


@pytest.mark.parametrize("broken", ["started_event", "stream_events"])
async def test_a_grpc_stream_that_breaks_ends_its_request(
    ready: GatewayBench, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, broken, _broken)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(ready.inference().Generate(request("a", sampling=sampling(n=16, max_tokens=50))))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    await wait_until(lambda: ready.gateway.core.is_idle)
    await ready.gateway.wait_idle()

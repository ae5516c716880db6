"""The OpenAI endpoint, through the public `openai` client, over a real gateway; its ranks compute without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hetero_api.metrics import GatewayMetric
from hetero_gateway.server.config import read_model
from tests.unit.server.server_setup import MAX_MODEL_LEN, GatewayBench, request, sampling, write_manifest, write_model

CHAT: Any = [{"role": "user", "content": "hello"}]
NAME = "g"


@pytest.fixture
async def client(ready: GatewayBench) -> AsyncIterator[Any]:
    async with _client(ready) as open_client:
        yield open_client


def _client(bench: GatewayBench) -> Any:
    """Untyped: its overloads know no field beyond the API's own."""
    return openai.AsyncOpenAI(base_url=f"http://{bench.addresses.http}/v1", api_key="none", max_retries=0)


async def _grpc_text(bench: GatewayBench, **fields: Any) -> str:
    """What the other door says to the same request."""
    call = bench.inference().Generate(request("hello", sampling=sampling(**fields)))
    return "".join([event.delta.text async for event in call])


async def _post(bench: GatewayBench, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{bench.addresses.http}", trust_env=False) as http:
        return await http.post(path, json=body)


async def test_a_completion_says_what_the_grpc_door_says(client: Any, ready: GatewayBench) -> None:
    answer = await client.completions.create(model=NAME, prompt="hello", max_tokens=8, seed=5)

    assert answer.object == "text_completion"
    assert answer.choices[0].text == await _grpc_text(ready, max_tokens=8, seed=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)


async def test_completions_stop_after_sixteen_tokens_unless_told_otherwise(client: Any) -> None:
    answer = await client.completions.create(model=NAME, prompt="hello", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


async def test_a_chat_is_rendered_by_the_models_template(client: Any) -> None:
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
    ]
    answer = await client.chat.completions.create(
        model=NAME, messages=messages, max_completion_tokens=3, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("[system]be brief[user]hello[assistant]")
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens == 3


async def test_a_streamed_chat_opens_tells_its_text_its_end_and_its_usage(client: Any) -> None:
    whole = await client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=8, seed=3)
    stream = await client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=8, seed=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count("length") == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


async def test_usage_comes_with_every_chunk_when_asked_for(client: Any) -> None:
    stream = await client.completions.create(
        model=NAME, prompt="hello", max_tokens=4, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_several_prompts_are_numbered_through(client: Any) -> None:
    prompts = ["hello", "world"]
    answer = await client.completions.create(model=NAME, prompt=prompts, n=2, max_tokens=4, seed=1)
    alone = [await client.completions.create(model=NAME, prompt=p, n=2, max_tokens=4, seed=1) for p in prompts]

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [choice.text for one in alone for choice in one.choices]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 16)


async def test_a_prompt_may_be_token_ids(client: Any) -> None:
    by_text = await client.completions.create(model=NAME, prompt="hello", max_tokens=4, seed=1)
    tokens = list(range(5))
    answer = await client.completions.create(model=NAME, prompt=[tokens, tokens], max_tokens=4, seed=1)
    assert len(answer.choices) == 2
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.usage is not None
    assert by_text.usage is not None
    assert answer.usage.prompt_tokens == 2 * by_text.usage.prompt_tokens


async def test_an_echo_puts_the_prompt_before_the_text(client: Any) -> None:
    plain = await client.completions.create(model=NAME, prompt="hello", max_tokens=4, seed=1)
    echoed = await client.completions.create(model=NAME, prompt="hello", max_tokens=4, seed=1, echo=True)
    assert echoed.choices[0].text == "hello" + plain.choices[0].text


async def test_models_are_named_by_the_resource_and_by_the_hub(client: Any) -> None:
    (model,) = (await client.models.list()).data
    assert model.id == NAME
    assert model.model_extra is not None
    assert (model.model_extra["max_model_len"], model.model_extra["source"]) == (MAX_MODEL_LEN, "")
    by_root = await client.completions.create(model=str(model.model_extra["root"]), prompt="hello", max_tokens=1)
    assert by_root.model == NAME
    assert (await client.models.retrieve(NAME)).id == NAME


async def test_another_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here; this replica serves 'g'"):
        await client.chat.completions.create(model="gpt-4", messages=CHAT)


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"temperature": -1}, "temperature", "between 0 and"),
        ({"top_p": 0.0}, "top_p", "top_p"),
        ({"top_k": -2}, "top_k", "top_k"),
        ({"n": 0}, "n", "n"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": "7"}, "max_tokens", "valid integer"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid literal"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
        ({"stop": ["", "a"]}, "stop", "empty"),
        ({"frequency_penalty": 3}, "frequency_penalty", "between -2 and 2"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "role"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "goes with type json_schema"),
        ({"stream_options": {"include_usage": True}}, "body", "stream: true"),
        ({"top_logprobs": 2}, "body", "logprobs: true"),
        ({"tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tool_choice": "required"}, "body", "not among tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot set 'messages'"),
        ({"messages": [{"role": "user", "content": "x" * 100}]}, "prompt", "the model's length"),
    ],
)
async def test_bad_fields_are_refused_by_name(ready: GatewayBench, body: dict[str, Any], param: str, text: str) -> None:
    answer = await _post(ready, "/v1/chat/completions", **({"model": NAME, "messages": CHAT} | body))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert param in (error["param"] or "")
    assert text in error["message"]
    assert (await _post(ready, "/v1/chat/completions", model=NAME, messages=CHAT, max_tokens=1)).status_code == 200


@pytest.mark.parametrize("prompt", ["x" * 64, "x" * 100_000, [1] * 64])
async def test_a_prompt_that_is_too_long_has_the_apis_code(ready: GatewayBench, prompt: Any) -> None:
    answer = await _post(ready, "/v1/completions", model=NAME, prompt=prompt)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_body_that_is_no_json_is_refused(ready: GatewayBench) -> None:
    async with httpx.AsyncClient(base_url=f"http://{ready.addresses.http}", trust_env=False) as http:
        answer = await http.post("/v1/completions", content=b"{")
        elsewhere = await http.get("/v1/nothing")
        wrong_method = await http.get("/v1/completions")
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]
    assert elsewhere.status_code == 404
    assert wrong_method.status_code == 405
    assert "POST /v1/chat/completions" in elsewhere.json()["error"]["message"]


async def test_without_a_group_the_answer_is_503_with_a_hint_when_to_try_again(bench: GatewayBench) -> None:
    answer = await _post(bench, "/v1/completions", model=NAME, prompt="hello")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "unavailable"
    async with httpx.AsyncClient(base_url=f"http://{bench.addresses.http}", trust_env=False) as http:
        assert (await http.get("/health")).status_code == 503


async def test_a_full_queue_answers_429(bench: GatewayBench) -> None:
    rank, _ = await bench.join()
    rank.may_step.clear()
    async with _client(bench) as client:
        filling = [
            asyncio.create_task(client.completions.create(model=NAME, prompt="hello", max_tokens=2)) for _ in range(3)
        ]

        def is_full() -> bool:
            stats = bench.gateway.core.stats()
            return stats.running_requests + stats.waiting_requests == len(filling)

        await bench.until(is_full)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model=NAME, prompt="hello", max_tokens=2)
        rank.may_step.set()
        assert len(await asyncio.gather(*filling)) == 3


async def test_an_id_that_is_in_flight_is_refused(bench: GatewayBench) -> None:
    rank, _ = await bench.join()
    rank.may_step.clear()
    async with _client(bench) as client:
        mine = {"request_id": "mine"}
        first = asyncio.create_task(
            client.completions.create(model=NAME, prompt="hello", max_tokens=2, extra_body=mine)
        )
        await bench.until(lambda: bench.gateway.core.stats().running_requests == 1)
        with pytest.raises(openai.ConflictError, match="'mine' is in flight"):
            await client.completions.create(model=NAME, prompt="hello", extra_body=mine)
        rank.may_step.set()
        assert (await first).id == "cmpl-mine"


@pytest.mark.parametrize("request_id", ["mine", "x" * 127, "x" * 500])
async def test_calls_whose_headers_have_one_id_are_served_side_by_side(bench: GatewayBench, request_id: str) -> None:
    await bench.join()
    async with _client(bench) as client:

        async def ask(prompt: Any) -> Any:
            return await client.completions.with_raw_response.create(
                model=NAME, prompt=prompt, max_tokens=2, extra_headers={"X-Request-Id": request_id}
            )

        for answer in (*await asyncio.gather(ask("a"), ask("b")), await ask(["a", "b"])):
            assert answer.headers["x-request-id"] == request_id[:128]
            assert answer.parse().id == f"cmpl-{request_id[:128]}"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_request(bench: GatewayBench, stream: bool) -> None:
    rank, _ = await bench.join()
    rank.may_step.clear()
    client = _client(bench)
    call = asyncio.create_task(_read_all(client, stream=stream))
    await bench.until(lambda: bench.gateway.core.stats().running_requests == 1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await client.close()
    rank.may_step.set()
    await bench.until(lambda: bench.gateway.core.stats().running_requests == 0)
    assert bench.gateway.core.stats().used_blocks == 0


async def _read_all(client: Any, *, stream: bool) -> None:
    answer: Any = await client.completions.create(model=NAME, prompt="hello", max_tokens=50, stream=stream)
    if stream:
        async for _ in answer:
            pass


async def test_a_request_that_breaks_in_the_middle_says_so_in_its_stream(bench: GatewayBench) -> None:
    rank, _ = await bench.join()
    async with _client(bench) as client:
        stream = await client.completions.create(
            model=NAME, prompt="hello", max_tokens=50, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        rank.may_step.clear()
        bench.gateway.core.fail("broken for the test")
        with pytest.raises(openai.APIError, match="broken for the test"):
            async for _ in stream:
                pass


async def test_json_comes_out_as_the_schema_says(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = await client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=60, seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    assert list(json.loads(answer.choices[0].message.content or "")) == ["ok"]


async def test_tools_reach_the_template(tmp_path: Path) -> None:
    (write_model(tmp_path) / "chat_template.jinja").write_text(
        "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}{% endfor %}"
    )
    model = read_model(write_manifest(tmp_path / "g.yaml"), tmp_path)
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "seen"},
    ]
    async with GatewayBench(model) as bench:
        await bench.join()
        async with _client(bench) as client:
            answer = await client.chat.completions.create(model=NAME, messages=messages, tools=tools, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("<look>hi(look)seen")


async def test_calls_are_counted_by_their_outcome_and_first_tokens_are_timed(ready: GatewayBench) -> None:
    assert (await _post(ready, "/v1/completions", model=NAME, prompt="hello", max_tokens=2)).status_code == 200
    assert (await _post(ready, "/v1/completions", model=NAME, prompt="hello", n=0)).status_code == 400
    registry = ready.gateway.metrics.registry
    assert registry.get_sample_value("hetero_http_calls_total", {"outcome": "200"}) == 1
    assert registry.get_sample_value("hetero_http_calls_total", {"outcome": "400"}) == 1
    assert sum(ready.gateway.core.latencies().buckets[GatewayMetric.FIRST_TOKEN].counts) == 1

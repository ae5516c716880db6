"""Calls of tools through the public `openai` client: streamed as whole, forced by grammar, and in agents' bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hetero_gateway.engine.text.answer_formats import FORMATS
from hetero_gateway.server.config import read_model
from tests.unit.engine.family_answers import ANSWERS, TOOLS, Answer
from tests.unit.server.server_setup import GatewayBench, GrpcRank, write_manifest, write_model

pytestmark = pytest.mark.unit

NAME = "g"
CHAT: Any = [{"role": "user", "content": "How is it in Bern?"}]
FUNCTIONS: Any = [{"type": "function", "function": {"name": name, "parameters": p}} for name, p in TOOLS.items()]
CHATS = "/v1/chat/completions"
BODIES = Path(__file__).parents[2] / "data" / "agents"


def template_of(answer: Answer) -> str:
    """A template of the answer's family, whose prompt ends as the answer's does."""
    signs = "".join(FORMATS[answer.family].signs) + "<think>"
    return "{# " + signs + " #}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + answer.prompt


@asynccontextmanager
async def serving(
    folder: Path, template: str, *, length: int = 4096, **gateway: Any
) -> AsyncIterator[tuple[Any, GrpcRank, GatewayBench]]:
    (write_model(folder, max_position_embeddings=65_536) / "chat_template.jinja").write_text(template)
    model = {"uri": "hf://org/model", "maxModelLen": length}
    manifest = write_manifest(folder / "g.yaml", model=model, gateway={"maxQueuedRequests": 8, **gateway})
    async with GatewayBench(read_model(manifest, folder)) as bench:
        rank, _ = await bench.join()
        address = f"http://{bench.addresses.http}/v1"
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            yield client, rank, bench


async def streamed(client: Any, **fields: Any) -> dict[str, Any]:
    """The message that a stream's deltas make, as a client adds them up."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    async for chunk in await client.chat.completions.create(model=NAME, stream=True, **fields):
        (choice,) = chunk.choices
        delta = choice.delta
        message["content"] += delta.content or ""
        message["reasoning_content"] += (delta.model_extra or {}).get("reasoning_content", "")
        message["finish_reason"] = choice.finish_reason or message["finish_reason"]
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert (call.index, call.type) == (len(message["tool_calls"]), "function")
                message["tool_calls"].append([call.function.name, ""])
            message["tool_calls"][call.index][1] += call.function.arguments
    return message


async def whole(client: Any, **fields: Any) -> dict[str, Any]:
    answer = await client.chat.completions.create(model=NAME, **fields)
    (choice,) = answer.choices
    message = choice.message
    return {
        "content": message.content or "",
        "reasoning_content": (message.model_extra or {}).get("reasoning_content", ""),
        "tool_calls": [[call.function.name, call.function.arguments] for call in message.tool_calls or ()],
        "finish_reason": choice.finish_reason,
    }


@pytest.mark.parametrize("name", [name for name in ANSWERS if not name.startswith("gpt-oss")])
async def test_a_streamed_answer_is_the_whole_one(tmp_path: Path, name: str) -> None:
    answer = ANSWERS[name]
    async with serving(tmp_path, template_of(answer)) as (client, rank, bench):
        rank.say(bench.model.tokenizer.encode(answer.text))
        fields: Any = {"messages": CHAT, "tools": FUNCTIONS}
        told, said = await asyncio.gather(streamed(client, **fields), whole(client, **fields))
    assert told == said
    calls = [(name, json.loads(arguments)) for name, arguments in said["tool_calls"]]
    assert (said["reasoning_content"], said["content"], calls) == answer.meaning
    assert said["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("family", FORMATS)
async def test_a_forced_call_is_made(tmp_path: Path, family: str) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    template = "{# " + "".join(FORMATS[family].signs) + " #}{% for m in messages %}{{ m.content }}{% endfor %}"
    named = {"type": "function", "function": {"name": "look"}}
    async with serving(tmp_path, template) as (client, _, _):
        said = await whole(
            client, messages=CHAT, tools=tools, tool_choice=named, parallel_tool_calls=False, max_tokens=300, seed=1
        )
    if family != "GptOss":  # its frame is special tokens, which this tokenizer has not
        assert (said["content"], said["finish_reason"]) == ("", "tool_calls")
        ((name, arguments),) = said["tool_calls"]
        assert (name, list(json.loads(arguments))) == ("look", ["ok"])


def allowing(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_only_allowed_tools_are_shown_and_called(tmp_path: Path) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("look", "go")]
    template = "{# " + "".join(FORMATS["Hermes"].signs) + " #}{{ messages[0].content }}{{ tools | length }}"
    async with serving(tmp_path, template) as (client, rank, bench):
        fields: Any = {"messages": CHAT, "tools": tools, "max_tokens": 300, "seed": 1, "parallel_tool_calls": False}
        must = await whole(client, **fields, tool_choice=allowing("required", "go"))
        assert [name for name, _ in must["tool_calls"]] == ["go"]
        rank.say(bench.model.tokenizer.encode("No."))
        answer = await client.chat.completions.create(
            model=NAME, **fields, tool_choice=allowing("auto", "go"), logprobs=False
        )
        assert answer.choices[0].message.content == "No."
        assert answer.usage.prompt_tokens == len(CHAT[0]["content"] + "1")
        for mode in ("auto", "required"):
            with pytest.raises(openai.BadRequestError, match="'fly', which is not among tools"):
                await whole(client, **fields, tool_choice=allowing(mode, "go", "fly"))


@pytest.mark.parametrize(("name", "value"), [("ignore_eos", True), ("min_tokens", 50)])
async def test_a_forced_call_may_end(name: str, value: object, tmp_path: Path) -> None:
    """A complete call allows nothing but the end: where that is banned no token is left, and ranks cannot draw."""
    async with serving(tmp_path, "{{ messages }}", http={"toolCallFormat": "Hermes"}) as (client, _, _):
        with pytest.raises(openai.BadRequestError, match=f"{name}.*cannot be set with tool_choice"):
            await whole(client, messages=CHAT, tools=FUNCTIONS, tool_choice="required", extra_body={name: value})


async def test_without_a_known_format_no_call_can_be_forced(tmp_path: Path) -> None:
    async with serving(tmp_path, "{{ messages }}") as (client, _, _):
        with pytest.raises(openai.BadRequestError, match="the format of this model's calls is not known"):
            await whole(client, messages=CHAT, tools=FUNCTIONS, tool_choice="required")


async def test_the_resource_names_a_format(tmp_path: Path) -> None:
    answer = ANSWERS["hermes"]
    async with serving(tmp_path, "{{ messages }}", http={"toolCallFormat": "Hermes"}) as (client, rank, bench):
        rank.say(bench.model.tokenizer.encode(answer.text))
        fields: Any = {"messages": CHAT, "tools": FUNCTIONS}
        none, fewer = await asyncio.gather(
            whole(client, **fields, tool_choice="none"), whole(client, **fields, parallel_tool_calls=False)
        )
    assert (len(none["tool_calls"]), len(fewer["tool_calls"])) == (0, 1)


async def test_a_form_comes_behind_a_thought_that_the_prompt_has_begun(tmp_path: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    async with serving(tmp_path, "{{ messages[0].content }}<think>\n") as (client, rank, bench):
        rank.say(bench.model.tokenizer.encode("Hm {\n</think>\ntrue"))
        said = await whole(client, messages=CHAT, response_format=form)
    assert (said["reasoning_content"], said["content"]) == ("Hm {", "true")


async def posted(bench: GatewayBench, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{bench.addresses.http}", trust_env=False) as http:
        return await http.post(path, json={"model": NAME} | body)


LEFT_OUT = {
    "codex.json": "",
    "claude-code.json": "metadata, thinking, reasoning, messages.content.cache_control, messages.thinking, "
    "messages.cache_control",
}


@pytest.mark.parametrize("name", LEFT_OUT)
async def test_bodies_of_agents_are_answered(tmp_path: Path, name: str) -> None:
    answer = ANSWERS["hermes"]
    body = json.loads((BODIES / name).read_text(encoding="utf-8")) | {"model": NAME}
    async with serving(tmp_path, template_of(answer), length=40_000) as (_, rank, bench):
        rank.say(bench.model.tokenizer.encode(answer.text))
        told = await posted(bench, CHATS, **body)
    assert (told.status_code, told.headers.get("x-hetero-ignored", "")) == (200, LEFT_OUT[name])
    assert '"tool_calls"' in told.text


async def test_fields_that_are_left_out_are_named(tmp_path: Path) -> None:
    messages = [{**CHAT[0], "cache_control": {}}]
    fields = {"store": True, "verbosity": "low", "a\r\nb": 1, "messages": messages, "tools": [{"type": "web_search"}]}
    async with serving(tmp_path, "{{ messages[0].content }}") as (_, _, bench):
        told = await posted(bench, CHATS, max_tokens=1, **fields)
        many = {f"k{number}": 1 for number in range(1000)}
        short = await posted(bench, "/v1/completions", prompt="a", max_tokens=1, **many)
    names = told.headers["x-hetero-ignored"].split(", ")
    assert names == ["tools.type=web_search", "store", "verbosity", "a%0D%0Ab", "messages.cache_control"]
    assert len(short.headers["x-hetero-ignored"].split(", ")) == 16


async def test_strict_fields_are_refused_unless_they_change_no_answer(tmp_path: Path) -> None:
    async with serving(tmp_path, "{{ messages[0].content }}", http={"strictFields": True}) as (_, _, bench):
        taken = await posted(bench, CHATS, max_tokens=1, messages=CHAT, user="me")
        refused = await posted(bench, CHATS, max_tokens=1, messages=CHAT, verbosity="low")
    assert (taken.status_code, taken.headers["x-hetero-ignored"]) == (200, "user")
    assert refused.status_code == 400
    assert "verbosity: is not a field that this endpoint knows" in refused.json()["error"]["message"]


async def test_the_template_sees_its_options(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{{ enable_thinking }}{{ reasoning_effort }}"
    async with serving(tmp_path, template) as (client, _, _):
        fields = {"messages": CHAT, "reasoning_effort": "low", "max_tokens": 1}
        answer = await client.chat.completions.create(
            model=NAME, **fields, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
        )
    assert answer.usage.prompt_tokens == len(CHAT[0]["content"] + "False" + "low")

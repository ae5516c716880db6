"""The contract with Shepherd Model Gateway: the published router in front of our door, public clients before it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from hetero_gateway.server.config import read_model
from tests.unit.server.router_setup import RouterBench
from tests.unit.server.server_setup import GrpcRank, write_manifest, write_model
from tests.unit.server.smg_setup import smg

pytestmark = pytest.mark.unit

NAME = "g"
CHAT: Any = [{"role": "user", "content": "How is it in Bern?"}]
SCHEMA: Any = {"type": "object", "properties": {"city": {"enum": ["Bern"]}}, "required": ["city"]}
SCHEMA["additionalProperties"] = False
FUNCTIONS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
TEMPLATE = (
    "{# <tool_call> #}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{{ tools | tojson if tools }}<assistant>"
)
QWEN = ("--parser", "symphony", "--tool-call-parser", "qwen")


@dataclass(frozen=True, slots=True)
class Routed:
    """A router, and the gateways behind it."""

    address: str
    benches: list[RouterBench]
    ranks: list[GrpcRank]

    def say(self, text: str) -> None:
        for bench, rank in zip(self.benches, self.ranks, strict=True):
            rank.say(bench.model.tokenizer.encode(text))

    def openai(self) -> Any:
        return openai.AsyncOpenAI(base_url=f"http://{self.address}/v1", api_key="none", max_retries=0)

    def anthropic(self) -> Any:
        return anthropic.AsyncAnthropic(base_url=f"http://{self.address}", api_key="none", max_retries=0)


@asynccontextmanager
async def routed(folder: Path, *, gateways: int = 1, arguments: tuple[str, ...] = QWEN) -> AsyncIterator[Routed]:
    (write_model(folder, max_position_embeddings=65_536) / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_p": 0.75}')
    model = {"uri": "hf://org/model", "maxModelLen": 4096}
    manifest = write_manifest(folder / "g.yaml", model=model, gateway={"maxQueuedRequests": 64})
    async with AsyncExitStack() as stack:
        benches = [await stack.enter_async_context(RouterBench(read_model(manifest, folder))) for _ in range(gateways)]
        ranks = [(await bench.join())[0] for bench in benches]
        doors = [bench.addresses.router for bench in benches]
        address = await stack.enter_async_context(smg(*doors, log=folder / "smg.log", arguments=arguments))
        yield Routed(address, benches, ranks)


async def test_chats_completions_and_embeddings_are_answered(tmp_path: Path) -> None:
    async with routed(tmp_path) as it, it.openai() as client:
        it.say("It rains there. Stay in.")
        whole = await client.chat.completions.create(model=NAME, messages=CHAT, stop="Stay")
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("It rains there. ", "stop")
        assert whole.usage.prompt_tokens == len("<user>How is it in Bern?<assistant>")
        pieces = [
            chunk.choices[0].delta.content or ""
            async for chunk in await client.chat.completions.create(
                model=NAME, messages=CHAT, max_tokens=8, stream=True
            )
        ]
        assert ("".join(pieces), len(pieces) > 4) == ("It rains", True)
        told = await client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=2, logprobs=True)
        assert len(told.choices[0].logprobs.content) == 2
        completion = await client.completions.create(model=NAME, prompt="a", max_tokens=2)
        assert completion.choices[0].text == "It"
        made = await client.embeddings.create(model=NAME, input="hello", encoding_format="float")
        assert sum(each * each for each in made.data[0].embedding) == pytest.approx(1)


async def test_tools_are_called_and_forced(tmp_path: Path) -> None:
    async with routed(tmp_path) as it, it.openai() as client:
        it.say(CALL)
        fields: Any = {"model": NAME, "messages": CHAT, "tools": FUNCTIONS}
        free = await client.chat.completions.create(**fields)
        for rank in it.ranks:  # a grammar binds their own tokens
            rank.forget_script()
        forced = await client.chat.completions.create(**fields, tool_choice="required", max_tokens=200)
        for answer in (free, forced):
            (call,) = answer.choices[0].message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})


async def test_a_schema_binds_an_answer(tmp_path: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    async with routed(tmp_path) as it, it.openai() as client:
        answer = await client.chat.completions.create(model=NAME, messages=CHAT, response_format=form, max_tokens=200)
    assert json.loads(answer.choices[0].message.content) == {"city": "Bern"}


async def test_responses_and_messages_are_answered(tmp_path: Path) -> None:
    async with routed(tmp_path) as it, it.openai() as client, it.anthropic() as claude:
        it.say("It rains.")
        response = await client.responses.create(model=NAME, input="How is it in Bern?")
        message = await claude.messages.create(model=NAME, max_tokens=50, messages=CHAT)
        assert response.output_text == "It rains."
        assert (message.content[0].text, message.stop_reason) == ("It rains.", "end_turn")
        it.say(CALL)
        tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}
        response = await client.responses.create(model=NAME, input="How is it in Bern?", tools=[tool])
        (call,) = [item for item in response.output if item.type == "function_call"]
        assert json.loads(call.arguments) == {"city": "Bern"}
        tool = {"name": "weather", "input_schema": SCHEMA}
        async with claude.messages.stream(model=NAME, max_tokens=200, messages=CHAT, tools=[tool]) as stream:
            message = await stream.get_final_message()
        (use,) = [item for item in message.content if item.type == "tool_use"]
        assert (use.name, use.input, message.stop_reason) == ("weather", {"city": "Bern"}, "tool_use")


async def test_wrong_requests_are_refused_in_words(tmp_path: Path) -> None:
    async with routed(tmp_path) as it, it.openai() as client:
        with pytest.raises(openai.APIStatusError, match="4096"):
            await client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "a" * 5000}])
        assert all(bench.gateway.core.is_idle for bench in it.benches)


async def test_a_client_that_leaves_ends_its_request(tmp_path: Path) -> None:
    async with routed(tmp_path) as it:
        (rank,), (bench,) = it.ranks, it.benches
        rank.may_step.clear()
        async with httpx.AsyncClient(base_url=f"http://{it.address}", trust_env=False) as http:
            body = {"model": NAME, "messages": CHAT, "stream": True}
            with pytest.raises(httpx.ReadTimeout):
                await http.post("/v1/chat/completions", json=body, timeout=0.5)
        rank.may_step.set()
        await bench.until(lambda: bench.gateway.core.is_idle)


async def test_prompts_go_where_their_prefix_is(tmp_path: Path) -> None:
    arguments = (*QWEN, "--policy", "cache_aware", "--block-size", "4")
    async with routed(tmp_path, gateways=2, arguments=arguments) as it, it.openai() as client:
        it.say("Ok.")
        heads = [f"{number} " + "The same head of a long conversation. " * 8 for number in range(4)]
        for _ in range(3):
            for head in heads:
                await client.completions.create(model=NAME, prompt=head, max_tokens=1)
        stats = [bench.gateway.core.stats() for bench in it.benches]
        prompts = sum(each.prompt_tokens + each.cached_tokens for each in stats)
        cached = sum(each.cached_tokens for each in stats)
        # Each head is computed by one gateway alone, then found twice.
        assert cached / prompts > 0.6

"""Chat templates as models are shipped with them: a conversation becomes the text that transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.text.chat_template import ChatTemplate, with_tool_use
from hetero_gateway.server.reading import template_message
from tests.support.llama_cpp_files import llama_cpp_models

pytestmark = pytest.mark.unit

TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL_ARGUMENTS = {"city": "Bern"}
CALL: dict[str, Any] = {
    "id": "call12345", "type": "function", "function": {"name": "weather", "arguments": json.dumps(CALL_ARGUMENTS)},
}  # fmt: skip
SYSTEM = pb.ChatMessage(role="system", content="Be brief.")
USER = pb.ChatMessage(role="user", content="How is 天气 in <Bern>?")
CALLING = pb.ChatMessage(role="assistant", tool_calls_json=json.dumps([CALL]), reasoning="I look.")
RESULT = pb.ChatMessage(role="tool", content="sunny", tool_call_id="call12345", name="weather")
ANSWER = pb.ChatMessage(role="assistant", content="Sunny.", reasoning="It is sunny.")
THANKS = pb.ChatMessage(role="user", content="Thanks")

FAMILIES = {
    "deepseek-v3.1": "deepseek-ai-DeepSeek-V3.1",
    "gemma-4": "google-gemma-4-31B-it",
    "glm-4.6": "GLM-4.6",
    "glm-4.7-flash": "GLM-4.7-Flash",
    "gpt-oss": "openai-gpt-oss-120b",
    "llama-3.3": "meta-llama-Llama-3.3-70B-Instruct",
    "minimax-m2": "MiniMax-M2",
    "mistral-small-3.2": "Mistral-Small-3.2-24B-Instruct-2506",
    "qwen2.5": "Qwen-Qwen2.5-7B-Instruct",
    "qwen3": "Qwen-Qwen3-0.6B",
    "qwen3.5": "Qwen3.5-4B",
    "smollm3": "HuggingFaceTB-SmolLM3-3B",
}
SILENT = ("smollm3",)
"""Families whose template shows tools and calls only if it is asked for in its own way."""
HERMES = "NousResearch-Hermes-3-Llama-3.1-8B"
KIMI = "Kimi-K2-Instruct"


@pytest.fixture(scope="module")
def templates() -> Path:
    return llama_cpp_models() / "templates"


def rendered(template: str, messages: list[dict[str, Any]], *, tools: Any = None) -> str:
    return ChatTemplate(template, special_tokens=TOKENS, source="template").render(messages, tools=tools)


def expected(
    template: str, messages: list[dict[str, Any]], *, tools: Any = None, arguments: Any = CALL_ARGUMENTS
) -> str:
    """What transformers makes of it, if calls have their `arguments` in that form."""
    calls = [CALL | {"function": CALL["function"] | {"arguments": arguments}}]
    messages = [message | {"tool_calls": calls} if "tool_calls" in message else message for message in messages]
    render: Any = render_jinja_template  # its annotations say neither what it returns nor what it takes beside
    (text,), _ = render([messages], tools=tools, chat_template=template, add_generation_prompt=True, **TOKENS)
    return str(text)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("turns", ["system and user", "a tool's result", "after an answer"])
def test_a_conversation_is_rendered_as_transformers_does(templates: Path, family: str, turns: str) -> None:
    template = (templates / f"{FAMILIES[family]}.jinja").read_text(encoding="utf-8")
    messages, tools = [SYSTEM, USER], None
    if turns != "system and user":
        messages, tools = [*messages, CALLING, RESULT], TOOLS
    if turns == "after an answer":
        messages += [ANSWER, THANKS]
    given = [template_message(message) for message in messages]
    text = rendered(template, given, tools=tools)
    assert text == expected(template, given, tools=tools)
    assert "Be brief." in text
    assert USER.content in text
    assert ("sunny" in text) == (tools is not None)
    assert ("weather" in text and "Bern" in text.split(USER.content)[1]) == (tools is not None and family not in SILENT)


@pytest.mark.parametrize(
    ("name", "content"), [("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", None), ("meetkai-functionary-medium-v3.2", "")]
)
def test_a_template_gets_calls_in_the_form_that_it_shows(templates: Path, name: str, content: str | None) -> None:
    """Arguments as text, and a content that is null."""
    template = (templates / f"{name}.jinja").read_text(encoding="utf-8")
    given = [template_message(message) for message in (USER, CALLING, RESULT)]
    text = rendered(template, given, tools=TOOLS)
    given[1]["content"] = content
    assert text == expected(template, given, tools=TOOLS, arguments=json.dumps(CALL_ARGUMENTS))
    assert "Bern" in text.split(USER.content)[1]


def test_a_template_for_tools_beside_another_is_rendered_as_alone(templates: Path) -> None:
    tool_use = (templates / f"{HERMES}-tool_use.jinja").read_text(encoding="utf-8")
    default = (templates / f"{FAMILIES['qwen2.5']}.jinja").read_text(encoding="utf-8")
    messages = [template_message(message) for message in (USER, CALLING, RESULT)]
    for template, tools in ((tool_use, TOOLS), (default, None)):
        text = rendered(with_tool_use(default, tool_use), messages, tools=tools)
        assert text == expected(template, messages, tools=tools)


def test_gpt_oss_keeps_the_reasoning_of_a_call_and_drops_that_of_an_answer(templates: Path) -> None:
    template = (templates / f"{FAMILIES['gpt-oss']}.jinja").read_text(encoding="utf-8")
    given = [template_message(message) for message in (USER, CALLING, RESULT)]
    open_call = rendered(template, given, tools=TOOLS)
    assert "<|channel|>analysis<|message|>I look.<|end|>" in open_call
    assert open_call.endswith("<|start|>assistant")
    given += [template_message(message) for message in (ANSWER, THANKS)]
    assert "It is sunny." not in rendered(template, given, tools=TOOLS)


def test_a_template_that_changes_lists_is_refused_where_it_does_so(templates: Path) -> None:
    """As by transformers: the sandbox lets no template change what it was given."""
    template = (templates / f"{KIMI}.jinja").read_text(encoding="utf-8")
    given = [template_message(message) for message in (SYSTEM, USER)]
    assert rendered(template, given) == expected(template, given)
    calls = [*given, template_message(CALLING), template_message(RESULT)]
    with pytest.raises(InvalidRequest, match="'append' of 'list' object is unsafe"):
        rendered(template, calls, tools=TOOLS)

"""Calls of tools as an independent parser reads them, mlx-lm's; and templates as shipped choose the family."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hetero_gateway.engine.text.answer_formats import FORMATS, AnswerFormat
from hetero_gateway.engine.text.answer_parser import AnswerParser
from hetero_gateway.engine.text.chat_template import ChatTemplate
from tests.support.llama_cpp_files import llama_cpp_models
from tests.support.mlx_lm_parsers import parsed
from tests.unit.engine.family_answers import ANSWERS, BERN, TOOLS, meaning_of

pytestmark = pytest.mark.unit

FUNCTIONS: Any = [{"type": "function", "function": {"name": name, "parameters": p}} for name, p in TOOLS.items()]
PARSERS = {
    "hermes": ("json_tools", "(?s)<tool_call>.*?</tool_call>"),
    "qwen3": ("json_tools", "(?s)<tool_call>.*?</tool_call>"),
    "qwen3-coder": ("qwen3_coder", "(?s)<tool_call>.*?</tool_call>"),
    "mistral, a list": ("mistral", r"(?s)\[TOOL_CALLS\].*"),
    "glm-4.5": ("glm47", "(?s)<tool_call>get_weather.*?</tool_call>"),
    "glm-4.7": ("glm47", "(?s)<tool_call>get_weather.*?</tool_call>"),
    "minimax-m2": ("minimax_m2", "(?s)<minimax:tool_call>.*"),
}
TEMPLATES = {
    "Qwen-Qwen2.5-7B-Instruct": "Hermes",
    "Qwen-Qwen3-0.6B": "Hermes",
    "Qwen3-Coder": "Qwen3Coder",
    "Qwen3.5-4B": "Qwen3Coder",
    "meta-llama-Llama-3.1-8B-Instruct": "Llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "Llama3",
    "meta-llama-Llama-3.3-70B-Instruct": "Llama3",
    "Mistral-Small-3.2-24B-Instruct-2506": "Mistral",
    "mistralai-Ministral-3-14B-Reasoning-2512": "Mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "MistralList",
    "llama-cpp-deepseek-r1": "DeepSeekV3",
    "deepseek-ai-DeepSeek-V3.1": "DeepSeekV31",
    "GLM-4.6": "Glm",
    "GLM-4.7-Flash": "Glm",
    "MiniMax-M2": "MiniMaxM2",
    "openai-gpt-oss-120b": "GptOss",
    "google-gemma-2-2b-it": None,
    "meetkai-functionary-medium-v3.1": None,
}
THINKING = {"Qwen-Qwen3-0.6B", "Qwen3.5-4B", "GLM-4.6", "GLM-4.7-Flash", "MiniMax-M2", "llama-cpp-deepseek-r1"}


@pytest.mark.parametrize("name", PARSERS)
def test_calls_are_those_of_an_independent_parser(name: str) -> None:
    module, pattern = PARSERS[name]
    answer = ANSWERS[name]
    theirs = []
    for text in re.findall(pattern, answer.text):
        found = parsed(module, text, FUNCTIONS)
        theirs += found if isinstance(found, list) else [found]
    ours = [call for call in answer.meaning[2] if name not in ("glm-4.5", "glm-4.7") or call[0] == "get_weather"]
    assert [(call["name"], call["arguments"]) for call in theirs] == ours


def template(name: str) -> str:
    return (llama_cpp_models() / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_as_shipped_names_its_family(name: str) -> None:
    found = AnswerFormat.find(template(name), special_id=lambda _: None)
    family = TEMPLATES[name]
    assert found.calls is (FORMATS[family] if family else None)
    assert (found.thought is not None) >= (name in THINKING)


WRITTEN = [
    name for name, family in TEMPLATES.items() if family not in (None, "GptOss") and not name.startswith("llama-")
]
"""Those that can be rendered as they are."""


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_as_its_template_writes_it_is_read(name: str) -> None:
    """What the template makes of an assistant's call is what the model is trained to write."""
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "get_weather", "arguments": BERN}}
    made = ChatTemplate(template(name), special_tokens={"bos_token": "", "eos_token": ""}, source=name)
    question: Any = [{"role": "user", "content": "?"}]
    prompt = made.render(question, tools=FUNCTIONS)
    turns = made.render([*question, {"role": "assistant", "content": "", "tool_calls": [call]}], tools=FUNCTIONS)
    answer = turns[next(place for place in range(len(turns)) if prompt[place : place + 1] != turns[place]) :]
    parser = AnswerParser(AnswerFormat.find(template(name), special_id=lambda _: None), tools=TOOLS)
    _, _, calls = meaning_of(parser.push(answer) + parser.finish())
    assert calls == [("get_weather", BERN)]

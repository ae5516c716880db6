"""Answers of each family of models, written after the published templates, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hetero_gateway.engine.text.answer_formats import FORMATS, THINK, AnswerFormat
from hetero_gateway.engine.text.answer_parser import AnswerParser, CallArguments, CallStart, Content, Piece, Reasoning

WEATHER: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wind": {"type": "boolean"},
        "hours": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city"],
}
TIME: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}
TOOLS: Final = {"get_weather": WEATHER, "get-time.now": TIME}
BERN: Final = {"city": 'Bern "天气" <b>', "days": 3, "wind": True, "hours": [6, 18]}
BERN_JSON: Final = json.dumps(BERN, ensure_ascii=False)
BOTH: Final = [("get_weather", BERN), ("get-time.now", {})]


@dataclass(frozen=True)
class Answer:
    """An answer to a prompt that ends with `prompt`; `signs` make a template of its family."""

    family: str
    text: str
    calls: Sequence[tuple[str, Mapping[str, Any]]] = field(default_factory=lambda: list(BOTH))
    content: str = ""
    reasoning: str = ""
    prompt: str = ""

    @property
    def form(self) -> AnswerFormat:
        return AnswerFormat(FORMATS[self.family], THINK)

    def parser(self, **changes: Any) -> AnswerParser:
        options: dict[str, Any] = {"tools": TOOLS, "is_thinking": self.prompt.endswith("<think>\n")}
        return AnswerParser(self.form, **(options | changes))

    @property
    def meaning(self) -> tuple[str, str, list[tuple[str, Any]]]:
        return self.reasoning, self.content, [(name, dict(arguments)) for name, arguments in self.calls]


def meaning_of(pieces: Iterable[Piece]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, text and calls, the arguments parsed where they are JSON."""
    reasoning, content, names, arguments = "", "", list[str](), list[str]()
    for piece in pieces:
        match piece:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case CallStart(index, _, name):
                assert index == len(names)
                names.append(name)
                arguments.append("")
            case CallArguments(index, text):
                arguments[index] += text
    return reasoning, content, [(name, _parsed(text)) for name, text in zip(names, arguments, strict=True)]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


ANSWERS: Final = {
    "hermes": Answer(
        "Hermes",
        "I look.\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {BERN_JSON}}}'
        '\n</tool_call>\n<tool_call>\n{"name": "get-time.now", "arguments": {}}\n</tool_call>',
        content="I look.",
    ),
    "hermes, arguments first": Answer(
        "Hermes",
        f'<tool_call>\n{{"arguments": {BERN_JSON}, "name": "get_weather"}}\n</tool_call>\n'
        '<tool_call>{"name": "get-time.now", "arguments": "{}"}</tool_call>\n',
    ),
    "qwen3": Answer(
        "Hermes",
        "<think>\nThe weather,\nthen.\n</think>\n\nI look.\n\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {BERN_JSON}}}\n</tool_call>',
        calls=BOTH[:1],
        content="I look.",
        reasoning="The weather,\nthen.",
    ),
    "qwen3-coder": Answer(
        "Qwen3Coder",
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n"
        'Bern "天气" <b>\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=wind>\nTrue\n</parameter>\n'
        "<parameter=hours>\n[6, 18]\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get-time.now>\n</function>\n</tool_call>",
        content="I look.",
    ),
    "qwen3-coder, outer tag left out": Answer(
        "Qwen3Coder", "<function=get-time.now>\n</function>\n</tool_call>", calls=BOTH[1:]
    ),
    "llama3": Answer("Llama3", f'{{"name": "get_weather", "parameters": {BERN_JSON}}}', calls=BOTH[:1]),
    "llama3, python tag": Answer(
        "Llama3",
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {BERN_JSON}}}; '
        '{"name": "get-time.now", "parameters": {}}',
    ),
    "mistral": Answer(
        "Mistral",
        f"I look.[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{BERN_JSON}[TOOL_CALLS]get-time.now[ARGS]{{}}",
        content="I look.",
    ),
    "mistral, a list": Answer(
        "MistralList",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {BERN_JSON}, "id": "a1b2c3d4e"}}, '
        '{"name": "get-time.now", "arguments": {}}]',
    ),
    "deepseek-v3": Answer(
        "DeepSeekV3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{BERN_JSON}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get-time.now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek-r1": Answer(
        "DeepSeekV3",
        "Hm.\n</think>\n\nI look."
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get-time.now\n```json\n"
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls=BOTH[1:],
        content="I look.",
        reasoning="Hm.",
        prompt="<think>\n",
    ),
    "deepseek-v3.1": Answer(
        "DeepSeekV31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{BERN_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>get-time.now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "glm-4.5": Answer(
        "Glm",
        '\n<think>Hm.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern "天气" <b>'
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>wind</arg_key>\n<arg_value>true"
        "</arg_value>\n<arg_key>hours</arg_key>\n<arg_value>[6, 18]</arg_value>\n</tool_call>\n"
        "<tool_call>get-time.now\n</tool_call>",
        content="I look.",
        reasoning="Hm.",
    ),
    "glm-4.7": Answer(
        "Glm",
        "Hm.</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>"
        "<tool_call>get-time.now</tool_call>",
        calls=[("get_weather", {"city": "Bern"}), BOTH[1]],
        reasoning="Hm.",
        prompt="<think>\n",
    ),
    "minimax-m2": Answer(
        "MiniMaxM2",
        'Hm.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">'
        'Bern "天气" <b></parameter>\n<parameter name="days">3</parameter>\n<parameter name="wind">true</parameter>\n'
        '<parameter name="hours">[6, 18]</parameter>\n</invoke>\n<invoke name="get-time.now">\n</invoke>\n'
        "</minimax:tool_call>",
        content="I look.",
        reasoning="Hm.",
        prompt="<think>\n",
    ),
    "gpt-oss": Answer(
        "GptOss",
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{BERN_JSON}"
        "<|start|>assistant<|channel|>commentary to=functions.get-time.now <|constrain|>json<|message|>{}",
    ),
}

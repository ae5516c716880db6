"""Forced calls: what their grammars allow is what the parser reads, and nothing else is allowed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.request import Constraint, ConstraintKind
from hetero_gateway.engine.text.answer_formats import FORMATS, THINK, AnswerFormat
from hetero_gateway.engine.text.answer_parser import AnswerParser
from hetero_gateway.engine.text.asked_answer import AskedAnswer
from hetero_gateway.engine.text.call_grammars import behind_thought, forced_calls
from hetero_gateway.engine.text.constraints import ConstraintCompiler, _grammar
from tests.unit.engine.family_answers import meaning_of
from tests.unit.engine.test_channels import PROMPT as HARMONY_PROMPT
from tests.unit.engine.test_channels import TOKENIZER as HARMONY

pytestmark = pytest.mark.unit

LOOK = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["a", "b"], "description": "x" * 100_000},
        "at": {"$ref": "#/$defs/place"},
        "deep": {"type": "boolean"},
    },
    "required": ["kind", "at"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "integer", "minimum": 0, "maximum": 9}},
}
STOP: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"look": LOOK, "stop": STOP}
FREE = {"say": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}}
TOKENIZER = LLTokenizer("byte")
END = 256


def matcher(grammar: str) -> LLMatcher:
    made = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def allows(grammar: str, text: str) -> bool:
    """Whether `text` is all that the grammar wants."""
    made = matcher(grammar)
    return all(made.consume_token(byte) for byte in text.encode()) and made.is_accepting()


def drawn(grammar: str, seed: int) -> str:
    """A text that the grammar allows."""
    made, chance, text = matcher(grammar), random.Random(seed), bytearray()
    while len(text) < 2000:
        mask = made.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if made.is_accepting() and (not allowed or chance.random() < 0.2):
            return text.decode()
        printable = [byte for byte in allowed if 32 <= byte < 127 or byte == 10]
        text.append(chance.choice(printable or allowed))
        assert made.consume_token(text[-1])
    raise AssertionError(f"no end: {text[-200:]!r}")


def written(family: str, tools: dict[str, Any] = TOOLS, **options: Any) -> str:
    form = AnswerFormat(FORMATS[family], options.pop("thought", None))
    assert form.calls is not None
    return forced_calls(form, form.calls, tools, **({"is_thinking": False, "in_parallel": True} | options)).text


@pytest.mark.parametrize("family", [family for family in FORMATS if family != "GptOss"])
@pytest.mark.parametrize("seed", range(3))
def test_all_that_the_grammar_allows_are_calls(family: str, seed: int) -> None:
    text = drawn(written(family), seed)
    parser = AnswerParser(AnswerFormat(FORMATS[family], None), tools=TOOLS)
    reasoning, content, calls = meaning_of(parser.push(text) + parser.finish())
    assert (reasoning, content) == ("", "")
    assert calls
    for name, arguments in calls:
        assert {*TOOLS[name].get("required", ())} <= {*arguments}, text
        assert arguments.get("kind", "a") in ("a", "b")
        assert arguments.get("at", 0) in range(10)


def test_a_call_of_gpt_oss_has_its_frame() -> None:
    text = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}"
    assert allows(written("GptOss"), text)
    assert allows(written("GptOss"), f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{text}")
    marks = {"<|channel|>": 7, "<|message|>": 8}
    form = AnswerFormat(FORMATS["GptOss"], None, marks)
    assert form.calls is not None
    grammar = forced_calls(form, form.calls, {"stop": STOP}, is_thinking=False, in_parallel=False).text
    assert '<[7]> "commentary to=functions.stop <|constrain|>json" <[8]>' in grammar


def test_only_one_call_where_calls_do_not_go_in_parallel() -> None:
    one = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    assert allows(written("Hermes"), f"{one}\n{one}")
    assert allows(written("Hermes", in_parallel=False), one)
    assert not allows(written("Hermes", in_parallel=False), f"{one}\n{one}")


def test_text_is_free_up_to_its_closing_tag() -> None:
    text = "<tool_call>\n<function=say>\n<parameter=text>\na <b>\n</c>\n</parameter>\n</function>\n</tool_call>"
    assert allows(written("Qwen3Coder", FREE), text)


@pytest.mark.parametrize(
    ("is_thinking", "thought"), [(True, "Hm {\n</think>\n\n"), (False, "<think>Hm</think>"), (False, "")]
)
def test_a_model_may_think_before_it_calls(is_thinking: bool, thought: str) -> None:
    grammar = written("Hermes", thought=THINK, is_thinking=is_thinking)
    assert allows(grammar, thought + '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>')


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "integer"}'), "12"),
        (Constraint(ConstraintKind.REGEX, "[ab]/c"), "a/c"),
        (Constraint(ConstraintKind.GRAMMAR, 'start: "x" Y\nY: /y+/'), "xyy"),
        (Constraint(ConstraintKind.CHOICE, "", ("one", "two")), "two"),
    ],
)
def test_any_form_comes_behind_a_thought(form: Constraint, text: str) -> None:
    grammar = _grammar(behind_thought(AnswerFormat(None, THINK), form), "field")
    assert allows(grammar, f"Hm 7</think>\n{text}")
    assert not allows(grammar, text)


def test_white_space_of_json_is_bounded() -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    grammar = _grammar(Constraint(ConstraintKind.JSON_SCHEMA, schema), "field")
    assert allows(grammar, '{\n    "a": 1\n}')
    assert allows(grammar, "{" + " " * 40 + "}")
    assert not allows(grammar, "{\n\n}")
    assert not allows(grammar, "{" + " " * 41 + "}")
    own = json.dumps({**json.loads(schema), "x-guidance": {"whitespace_pattern": "[ \\n]{1,90}"}})
    assert allows(_grammar(Constraint(ConstraintKind.JSON_SCHEMA, own), "field"), "{" + "\n" * 90 + "}")


@pytest.mark.parametrize(
    "answer",
    [
        "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}",
        "<|channel|>analysis<|message|>Hm {<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}",
    ],
)
async def test_a_forced_call_of_gpt_oss_is_read_from_its_special_tokens(answer: str) -> None:
    form = AnswerFormat.find("", special_id=HARMONY.special_id, calls="GptOss")
    asked = AskedAnswer(form, tools={"stop": STOP}, is_forced=True, in_parallel=False)
    constraint = asked.constraint(None, prompt_end="<|start|>assistant")
    assert constraint is not None
    assert constraint.has_frame
    size, ends = HARMONY.vocab_size, frozenset(HARMONY.encode("<|call|><|return|>"))
    compiled = await ConstraintCompiler(HARMONY, vocab_size=size, eos_token_ids=ends).compile(constraint)
    ids, progress = HARMONY.encode(answer), compiled.matcher()
    progress.replay(ids, field_name="received")
    mask = progress.mask()
    assert {token for token in range(size) if mask[token // 8] >> token % 8 & 1} == ends

    detokenizer = HARMONY.detokenizer((), HARMONY.encode(HARMONY_PROMPT), asked.shown_token_ids)
    text = detokenizer.push(ids) + detokenizer.finish()
    parser = asked.parser("<|start|>assistant")
    assert meaning_of(parser.push(text) + parser.finish()) == ("", "", [("stop", {})])


async def test_a_format_that_is_not_known_cannot_be_forced() -> None:
    asked = AskedAnswer(AnswerFormat(None, None), tools=TOOLS, is_forced=True)
    with pytest.raises(InvalidRequest, match="format of this model's calls is not known"):
        asked.constraint(None, prompt_end="")


@pytest.mark.parametrize("name", [name for name, calls in FORMATS.items() if calls.writing.tag])
def test_an_enum_that_is_no_list_is_refused(name: str) -> None:
    tool = {"type": "object", "properties": {"kind": {"type": "string", "enum": 5}}}
    asked = AskedAnswer(AnswerFormat(FORMATS[name], None), tools={"look": tool}, is_forced=True)
    with pytest.raises(InvalidRequest, match="tools: enum must be a list, not 5"):
        asked.constraint(None, prompt_end="")

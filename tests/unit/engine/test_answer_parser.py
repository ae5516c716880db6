"""Answers of the families in pieces: the same however they are cut, and plain text where markup is broken."""

from __future__ import annotations

import json
import time

import pytest

from hetero_gateway.engine.text.answer_formats import FORMATS, THINK, AnswerFormat
from hetero_gateway.engine.text.answer_parser import AnswerParser, CallArguments, CallStart, Content, Piece
from hetero_gateway.engine.text.call_arguments import json_value
from tests.unit.engine.family_answers import ANSWERS, TOOLS, Answer, meaning_of

pytestmark = pytest.mark.unit

HERMES = ANSWERS["hermes"]


def in_pieces(answer: Answer, text: str, size: int) -> list[Piece]:
    parser = answer.parser()
    cuts = [text[begin : begin + size] for begin in range(0, len(text), size)]
    return [piece for cut in cuts for piece in parser.push(cut)] + parser.finish()


def at_once(answer: Answer, text: str) -> list[Piece]:
    return in_pieces(answer, text, max(1, len(text)))


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_an_answer_means_the_same_however_it_is_cut(name: str, size: int) -> None:
    answer = ANSWERS[name]
    assert meaning_of(in_pieces(answer, answer.text, size)) == answer.meaning


@pytest.mark.parametrize("name", ANSWERS)
def test_broken_markup_means_the_same_however_it_is_cut_and_is_no_error(name: str) -> None:
    answer = ANSWERS[name]
    text = answer.text
    shortened = [text[:place] for place in range(0, len(text), 9)]
    for broken in [*shortened, *(text[:place] + text[place + 1 :] for place in range(0, len(text), 4))]:
        assert meaning_of(in_pieces(answer, broken, 1)) == meaning_of(at_once(answer, broken)), broken


@pytest.mark.parametrize("name", ANSWERS)
def test_nothing_of_a_text_without_markup_is_lost(name: str) -> None:
    text = 'An [if] <b>, {"a": 1} and <tool_calls> or `<fun` <｜x｜> [TOOL] to=x <|start|>: <param>'
    parser = ANSWERS[name].parser(is_thinking=False)
    pieces = [piece for character in text for piece in parser.push(character)] + parser.finish()
    assert meaning_of(pieces) == ("", text, [])


@pytest.mark.parametrize("name", ANSWERS)
def test_without_tools_calls_are_text(name: str) -> None:
    answer = ANSWERS[name]
    parser = answer.parser(tools=None)
    reasoning, content, calls = meaning_of(parser.push(answer.text) + parser.finish())
    assert (reasoning, calls) == (answer.reasoning, [])
    assert content in answer.text
    assert content.endswith(answer.text[-20:])


def test_only_what_may_become_markup_is_held_back() -> None:
    parser = HERMES.parser()
    assert parser.push("one <b> two ") == [Content("one <b> two")]
    assert parser.push("three <tool") == [Content(" three")]
    assert parser.push("box>") == [Content(" <toolbox>")]


def test_a_call_is_announced_with_its_header_and_its_arguments_come_as_they_are_written() -> None:
    parser = HERMES.parser()
    assert parser.push('<tool_call>{"name": "get_weather", "arguments": ') == []
    start, first = parser.push('{"city": "Be')
    assert isinstance(start, CallStart)
    assert (start.index, start.name) == (0, "get_weather")
    assert first == CallArguments(0, '{"city": "Be')
    assert parser.push('rn"') == [CallArguments(0, 'rn"')]


def test_a_string_between_tags_comes_as_it_is_written() -> None:
    parser = ANSWERS["qwen3-coder"].parser()
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert parser.push('a "b"') == [CallArguments(0, 'a \\"b\\"')]
    assert parser.push("\n") == []
    assert parser.push("c\n</param") == [CallArguments(0, "\\nc")]


def test_a_call_that_breaks_off_stays_as_far_as_it_came() -> None:
    assert meaning_of(at_once(HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": "Be')) == (
        "", "", [("get_weather", '{"city": "Be')],
    )  # fmt: skip
    assert meaning_of(at_once(HERMES, '<tool_call>{"name": "get_weather", "arguments": {"a": (1)}}')) == (
        "", "(1)}}", [("get_weather", '{"a": ')],
    )  # fmt: skip


def test_a_parameter_is_read_as_its_schema_says() -> None:
    kinds = {
        "any": {},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    }
    values = {"any": "12", "maybe": "null", "either": "x 1", "unknown": "[1]", "quoted": '"a"'}
    properties = kinds | {"quoted": {"type": "string"}}
    written = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())
    parser = ANSWERS["qwen3-coder"].parser(tools={"f": {"properties": properties}})
    (_, _, [(_, arguments)]) = meaning_of(parser.push(f"<function=f>{written}</function>") + parser.finish())
    assert arguments == {"any": 12, "maybe": None, "either": "x 1", "unknown": [1], "quoted": '"a"'}


def test_json_that_names_no_tool_is_an_answer() -> None:
    text = '{"name": "Bern", "parameters": {"size": 1}}'
    assert meaning_of(at_once(ANSWERS["llama3"], text)) == ("", text, [])


def test_a_call_without_a_mark_of_its_own_stands_at_the_beginning() -> None:
    text = 'So: {"name": "get_weather", "parameters": {}}'
    assert meaning_of(at_once(ANSWERS["llama3"], text)) == ("", text, [])


def test_after_the_last_call_that_was_asked_for_nothing_is_said() -> None:
    parser = HERMES.parser(max_calls=1)
    _, content, calls = meaning_of(parser.push(HERMES.text + " More.") + parser.finish())
    assert (content, len(calls)) == ("I look.", 1)


def test_each_call_has_an_id_of_its_own_as_its_template_takes_it() -> None:
    ids = [piece.id for piece in at_once(HERMES, HERMES.text) if isinstance(piece, CallStart)]
    assert len({*ids}) == 2
    assert all(each.startswith("call_") for each in ids)
    mistral = ANSWERS["mistral"]
    ids = [piece.id for piece in at_once(mistral, mistral.text) if isinstance(piece, CallStart)]
    assert [len(each) for each in ids] == [9, 9]
    assert all(each.isalnum() for each in ids)


def test_a_model_that_does_not_think_may_write_the_marks_of_a_thought() -> None:
    parser = AnswerParser(AnswerFormat(None, None))
    assert parser.push("<think>a</think>b") == [Content("<think>a</think>b")]


def test_a_thought_that_does_not_end_is_all_there_is() -> None:
    parser = AnswerParser(AnswerFormat(None, THINK))
    assert meaning_of(parser.push("<think>\nHm. <tool_call> </thin") + parser.finish()) == (
        "Hm. <tool_call> </thin", "", [],
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "unit", [" ", "\n", "<", "<tool_call>", '<tool_call>{"name": "a', "[TOOL_CALLS]a", "{", "<think>"]
)
def test_long_runs_of_what_may_be_markup_take_little_time(name: str, unit: str) -> None:
    parser = AnswerParser(AnswerFormat(FORMATS[name], THINK), tools=TOOLS)
    begin_s = time.process_time()
    for _ in range(1000):
        parser.push(unit)
    parser.finish()
    assert time.process_time() - begin_s < 1.0


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "[1, NaN]"])
@pytest.mark.parametrize("types", [frozenset(), frozenset(("number",)), frozenset(("string", "number"))])
def test_numbers_that_json_has_not_are_texts(text: str, types: frozenset[str]) -> None:
    assert json_value(text, types) == json.dumps(text)


@pytest.mark.parametrize("arguments", [r'{"text": "look \ud83d"}', r'"look \ud83d"'])
def test_halves_of_surrogate_pairs_are_no_text(arguments: str) -> None:
    parser = HERMES.parser()
    text = f'<tool_call>\n{{"arguments": {arguments}, "name": "f\\ude00"}}\n</tool_call>'
    start, told = parser.push(text) + parser.finish()
    assert isinstance(start, CallStart)
    assert isinstance(told, CallArguments)
    assert start.name == "f\N{REPLACEMENT CHARACTER}"
    assert "look \N{REPLACEMENT CHARACTER}" in told.text

"""Structural tags: the grammars that they become allow what they say, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.text.structural_tags import MAX_DEPTH, structural_grammar
from tests.unit.engine.test_call_grammars import allows, drawn, matcher

pytestmark = pytest.mark.unit

ONE: dict[str, Any] = {"type": "json_schema", "json_schema": {"const": 1}}
TEXT: dict[str, Any] = {"type": "any_text"}
FIRST = {"type": "tag", "begin": "<f=a>", "content": ONE, "end": "</f>"}
SECOND = {"begin": "<f=b>", "content": TEXT, "end": ["</f>", "</g>"]}
BOTH: dict[str, Any] = {"triggers": ["<f="], "tags": [FIRST, SECOND]}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def grammar(form: Any, special_ids: dict[str, int] | None = None) -> str:
    return structural_grammar(json.dumps({"type": "structural_tag", "format": form}), special_ids or {}, field="tag")


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "text": (const("a/b"), ["a/b"], ["", "a", "a/bc"]),
    "no text": (const(""), [""], ["a"]),
    "any text": (TEXT, ["", "a\nb"], []),
    "schema": (ONE, ["1"], ["2"]),
    "pattern": ({"type": "regex", "pattern": r"[a-c]/\/x"}, ["b//x"], ["d//x"]),
    "sequence": ({"type": "sequence", "elements": [const("a"), ONE]}, ["a1"], ["a", "1a"]),
    "or": ({"type": "or", "elements": [const("a"), const("b")]}, ["a", "b"], ["ab", ""]),
    "optional": ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
    "plus": ({"type": "plus", "content": const("a")}, ["a", "aa"], [""]),
    "star": ({"type": "star", "content": const("a")}, ["", "aaa"], ["b"]),
    "tag": (FIRST, ["<f=a>1</f>"], ["<f=a>2</f>", "x<f=a>1</f>"]),
    "several ends": ({"type": "tag", **SECOND}, ["<f=b>x</f>", "<f=b></g>"], ["<f=b>x"]),
    "amid text": (
        {"type": "triggered_tags", **BOTH}, ["hey", "a <f=a>1</f> b <f=b>c</g>", ""], ["<f=c>1</f>", "<f=a>2</f>"]
    ),
    "at least one": (
        {"type": "triggered_tags", **BOTH, "at_least_one": True}, ["<f=a>1</f>", "<f=a>1</f> b"], ["", "a <f=a>1</f>"]
    ),
    "just one": (
        {"type": "triggered_tags", **BOTH, "at_least_one": True, "stop_after_first": True},
        ["<f=a>1</f>"], ["", "<f=a>1</f> b"],
    ),
    "at most one": (
        {"type": "triggered_tags", **BOTH, "stop_after_first": True}, ["", "hey <f=a>1</f>"], ["<f=a>1</f> b"]
    ),
    "separated": (
        {"type": "tags_with_separator", "tags": [FIRST], "separator": ","},
        ["", "<f=a>1</f>", "<f=a>1</f>,<f=a>1</f>"], ["<f=a>1</f><f=a>1</f>", ","],
    ),
    "separated, at least one": (
        {"type": "tags_with_separator", "tags": [FIRST], "separator": ",", "at_least_one": True},
        ["<f=a>1</f>"], [""],
    ),
    "separated, just one": (
        {"type": "tags_with_separator", "tags": [FIRST], "separator": ",", "stop_after_first": True},
        ["", "<f=a>1</f>"], ["<f=a>1</f>,<f=a>1</f>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_form_allows_what_it_says(name: str) -> None:
    form, allowed, forbidden = CASES[name]
    made = grammar(form)
    assert [text for text in allowed if not allows(made, text)] == []
    assert [text for text in forbidden if allows(made, text)] == []


def test_the_older_form_is_tags_amid_text() -> None:
    old = {"structures": [{"begin": "<f=a>", "schema": {"const": 1}, "end": "</f>"}], "triggers": ["<f="]}
    made = structural_grammar(json.dumps(old), {}, field="tag")
    assert allows(made, "so <f=a>1</f> then")
    assert not allows(made, "<f=a>2</f>")


def test_a_forced_call_is_drawn() -> None:
    form = {"type": "triggered_tags", "triggers": ["<f="], "tags": [FIRST], "at_least_one": True}
    assert drawn(grammar({**form, "stop_after_first": True}), 0) == "<f=a>1</f>"


def test_special_tokens_are_named_by_id() -> None:
    made = grammar({"type": "tag", "begin": "<call>x", "content": ONE, "end": "</call>"}, {"<call>": 256})
    assert '<[256]> "x"' in made
    assert matcher(made).consume_token(256)


def nested(depth: int) -> dict[str, Any]:
    form: dict[str, Any] = const("a")
    for _ in range(depth):
        form = {"type": "optional", "content": form}
    return form


REFUSED: dict[str, tuple[Any, str]] = {
    "a kind": ({"type": "token", "token": 1}, "format of type 'token', which is not served"),
    "no kind": ({}, "format of type None"),
    "an odd kind": ({"type": ["tag"]}, "which is not served"),
    "no format": ([], "needs an object 'format'"),
    "no text": ({"type": "const_string", "value": 1}, "needs a text 'value'"),
    "no elements": ({"type": "or", "elements": []}, "needs a list of objects 'elements'"),
    "an odd element": ({"type": "or", "elements": [1]}, "needs a list of objects 'elements'"),
    "excluded text": ({"type": "any_text", "excludes": ["a"]}, "any_text with excludes"),
    "a style": ({**ONE, "style": "qwen_xml"}, "style 'qwen_xml'"),
    "an odd end": ({"type": "tag", "begin": "a", "content": ONE, "end": 1}, "whose end is no text"),
    "no triggers": ({"type": "triggered_tags", "triggers": [""], "tags": [FIRST]}, "without triggers"),
    "another trigger": ({"type": "triggered_tags", "triggers": ["x"], "tags": [FIRST]}, "begins with no trigger"),
    "too deep": (nested(MAX_DEPTH + 1), "levels deep"),
    "too much": ({"type": "sequence", "elements": [const("a")] * 5000}, "at most 4096 formats"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    form, problem = REFUSED[name]
    with pytest.raises(InvalidRequest, match="tag") as caught:
        grammar(form)
    assert problem in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "[" * 100_000])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        structural_grammar(text, {}, field="tag")

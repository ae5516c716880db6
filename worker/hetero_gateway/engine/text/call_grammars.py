"""Grammars of answers that must call a tool, and of answers that think before they take their form.

They are llguidance's: a Lark grammar, with JSON Schemas of the tools' parameters inside. Marks that are special tokens
of the model's tokenizer are named by id, since text never matches them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.request import Constraint, ConstraintKind
from hetero_gateway.engine.text.answer_formats import AnswerFormat, CallFormat, Writing
from hetero_gateway.engine.text.call_arguments import types_of
from hetero_gateway.engine.text.constraints import WHITESPACE

_GAP: Final = r"/[ \r\n\t]{0,4}/"
ANY_TEXT: Final = r"/(?s:.*)/"
_ANY_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object"}
_ANNOTATIONS: Final = frozenset(("description", "title", "examples", "default", "$schema", "$comment"))
"""Keywords of JSON Schema that bind nothing."""
_NAMED: Final = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""Keywords whose value has names of the user's as keys."""
_VALUES: Final = frozenset(("enum", "const"))


def forced_calls(
    form: AnswerFormat, calls: CallFormat, tools: Mapping[str, Any], *, is_thinking: bool, in_parallel: bool
) -> Constraint:
    """Return the form of an answer that calls at least one of `tools`, schemas of parameters by name.

    A model that thinks may do so before; with `is_thinking` the prompt has begun a thought.
    """
    grammar = _Grammar(form)
    written = grammar.calls(calls, tools, in_parallel=in_parallel)
    start = f"{grammar.thought(is_thinking=is_thinking)}{written}"
    return Constraint(ConstraintKind.GRAMMAR, grammar.text(start), source="tools", has_frame=True)


def behind_thought(form: AnswerFormat, constraint: Constraint) -> Constraint:
    """Return the constraint of an answer whose prompt has begun a thought: the form comes behind it."""
    grammar = _Grammar(form)
    return replace(constraint, prelude=grammar.text(f"{grammar.thought(is_thinking=True)}@form"))


class LarkRules:
    """Rules of one grammar, as they are needed. `special_ids`: special tokens that it may hold, by text."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._rules: list[str] = []

    def text(self, start: str) -> str:
        """Return the grammar whose whole is `start`."""
        return "\n".join([f"start: {start}", *self._rules])

    def until(self, mark: str) -> str:
        """Return the rule of any text up to `mark`, which ends it."""
        if any(special in mark for special in self._special_ids):
            return f"{self.rule(ANY_TEXT)} {self.literal(mark)}"
        return self.rule(ANY_TEXT, options=f"[suffix={json.dumps(mark)}]")

    def literal(self, text: str) -> str:
        """Return what matches just this text; empty for none."""
        return " ".join(self._parts(text))

    def rule(self, body: str, *, options: str = "") -> str:
        """Return the name of a new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _parts(self, text: str) -> Iterator[str]:
        marks = "|".join(map(re.escape, sorted(self._special_ids, key=len, reverse=True)))
        for part in re.split(f"({marks})", text) if marks else [text]:
            if part in self._special_ids:
                yield f"<[{self._special_ids[part]}]>"
            elif part:
                yield json.dumps(part, ensure_ascii=False)


class _Grammar(LarkRules):
    """Rules of an answer in a family's format."""

    def __init__(self, form: AnswerFormat) -> None:
        super().__init__(form.special_ids)
        framed = form.calls.framed_thought if form.calls else None
        self._thought = framed or form.thought

    def thought(self, *, is_thinking: bool) -> str:
        """Return the part before the calls: the rest of a thought, or a thought or none."""
        if self._thought is None:
            return ""
        rest = f"{self.until(self._thought.closing)} {self.rule(_GAP)} "
        return rest if is_thinking else f"({self.literal(self._thought.opening)} {rest})? "

    def calls(self, calls: CallFormat, tools: Mapping[str, Any], *, in_parallel: bool) -> str:
        writing = calls.writing
        call = self.rule(" | ".join(self._call(writing, name, schema) for name, schema in tools.items()))
        more = f" ({self.literal(writing.joint)} {call})*" if in_parallel else ""
        return f"{self.literal(writing.begin)} {call}{more} {self.literal(writing.end)}"

    def _call(self, writing: Writing, name: str, schema: Any) -> str:
        schema = schema if isinstance(schema, dict) and schema else _ANY_ARGUMENTS
        arguments = self._tagged(writing, schema) if writing.tag else json_rule(schema)
        return self.rule(f"{self._named(writing.head, name)} {arguments} {self.literal(writing.tail)}")

    def _tagged(self, writing: Writing, schema: Mapping[str, Any]) -> str:
        """Return the rules of parameters between tags, each once at most, in the schema's order."""
        properties, required = schema.get("properties"), schema.get("required")
        known = properties if isinstance(properties, dict) else {}
        needed = required if isinstance(required, list) else []
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = []
        for key, each in known.items():
            value = self._value(writing, {**each, **shared} if isinstance(each, dict) else each)
            part = f"{self._named(writing.tag, key)} {value}"
            parts.append(part if key in needed else f"({part})?")
        return " ".join(parts)

    def _value(self, writing: Writing, schema: Any) -> str:
        if types_of(schema) == {"string"} and not {"enum", "const", "pattern"} & set(schema):
            return self.until(writing.end_tag)
        if types_of(schema) == {"string"}:
            return f"{self._choices(schema)} {self.literal(writing.end_tag)}"
        return f"{json_rule(schema)} {self.literal(writing.end_tag)}"

    def _choices(self, schema: Mapping[str, Any]) -> str:
        """Return the rule of a string that is written without quotation marks."""
        if "pattern" in schema and not {"enum", "const"} & set(schema):
            return self.rule("/[^<]*/")
        texts = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(texts, list):
            raise InvalidRequest("tools", f"enum must be a list, not {texts!r:.80}")
        return self.rule(" | ".join(json.dumps(str(text)) for text in texts))

    def _named(self, text: str, name: str) -> str:
        return self.literal(text.replace("{}", name, 1))


def json_rule(schema: Any) -> str:
    """Return what matches JSON of a schema; keywords that are not known bind nothing."""
    # Keywords that the library does not know are left to the caller: an agent's tools come from many places.
    options = {"whitespace_pattern": WHITESPACE, "lenient": True}
    bare = _bare(schema)
    return f"%json {json.dumps({'x-guidance': options, **bare} if isinstance(bare, dict) else bare)}"


def _bare(schema: Any, *, has_names: bool = False) -> Any:
    """Return a schema without what binds nothing: descriptions of tools are long."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if has_names or key not in _ANNOTATIONS}
    return {key: value if key in _VALUES else _bare(value, has_names=key in _NAMED) for key, value in kept.items()}

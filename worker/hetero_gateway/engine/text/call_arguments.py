"""Arguments of calls in text that comes in pieces: JSON as it is, and JSON of the parameters between tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import regex

from hetero_gateway.engine.text.answer_formats import Tags

_OUTSIDE_TEXTS: Final = frozenset(" \t\r\n,:+-.0123456789eEtrufalsn")
"""Characters of JSON beside brackets and texts."""
_CLOSING: Final = {"{": "}", "[": "]"}
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
"""Values as some templates write them."""
_TYPES: Final[tuple[tuple[type, frozenset[str]], ...]] = (
    (bool, frozenset(("boolean",))),
    (int, frozenset(("integer", "number"))),
    (float, frozenset(("number",))),
    (str, frozenset(("string",))),
    (dict, frozenset(("object",))),
    (list, frozenset(("array",))),
    (type(None), frozenset(("null",))),
)
"""JSON Schema's types of a value; bool goes first, because it is an int in Python."""


class JsonText:
    """A JSON object or list that comes in pieces: looks for its end, by its brackets and texts."""

    def __init__(self) -> None:
        self.text = ""
        """All that was taken."""
        self.is_complete = False
        self._open: list[str] = []
        self._in_text = False
        self._is_escaped = False

    def take(self, text: str) -> str:
        """Take what belongs to the object, and return the rest. A rest of one that is not complete cannot be JSON."""
        end = 0
        while end < len(text) and not self.is_complete and self._accepts(text[end]):
            end += 1
        self.text += text[:end]
        return text[end:]

    def _accepts(self, character: str) -> bool:
        if self._in_text:
            self._in_text = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
            return True
        if character in _CLOSING:
            self._open.append(_CLOSING[character])
        elif character in "}]":
            if not self._open or self._open.pop() != character:
                return False
            self.is_complete = not self._open
        elif character == '"':
            self._in_text = True
        return character in _OUTSIDE_TEXTS or character in '{}[]"'


class JsonReader:
    """Reader of arguments that are a JSON object: they are passed on as they come."""

    def __init__(self) -> None:
        self._object = JsonText()

    def read(self, text: str, *, is_last: bool) -> tuple[str, str, bool]:  # noqa: ARG002
        """Return new text of the arguments, the rest of `text`, and whether the arguments are over."""
        rest = self._object.take(text)
        return text[: len(text) - len(rest)], rest, self._object.is_complete or bool(rest)


class TaggedReader:
    """Reader of parameters between tags, which become a JSON object.

    A parameter that can only be a string is passed on as it comes, another one once it is whole.
    """

    def __init__(self, tags: Tags, *, end: regex.Pattern[str], schema: Any) -> None:
        self._tags = tags
        self._end = end
        properties = schema.get("properties") if isinstance(schema, dict) else None
        self._properties: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
        self._opening = "{"
        """Text before the next parameter."""
        self._types: frozenset[str] | None = None
        """Types of the parameter that is open, if one is."""
        self._value = ""

    def read(self, text: str, *, is_last: bool) -> tuple[str, str, bool]:
        """Return new text of the arguments, the rest of `text`, and whether the arguments are over."""
        arguments = ""
        while True:
            step = self._between if self._types is None else self._within
            new, text, goes_on, is_over = step(text, is_last)
            arguments += new
            if is_over or not goes_on:
                return arguments, text, is_over

    def _between(self, text: str, is_last: bool) -> tuple[str, str, bool, bool]:
        """Read a tag: new arguments, the rest, whether there is more to read now, and whether arguments are over."""
        opening = self._tags.opening.match(text, partial=not is_last)
        if opening and not opening.partial:
            return self._open(opening["key"]), text[opening.end() :], True, False
        end = self._end.match(text, partial=not is_last)
        if end and not end.partial:
            return ("{}" if self._opening == "{" else "}"), text, False, True
        return "", text, False, not (opening or end)

    def _open(self, key: str) -> str:
        self._types, self._value = types_of(self._properties.get(key)), ""
        opening, self._opening = self._opening, ", "
        return f'{opening}"{json_string(key)}": ' + ('"' if self._is_text else "")

    def _within(self, text: str, is_last: bool) -> tuple[str, str, bool, bool]:
        """Read a value, and return as `_between` does."""
        found = self._tags.closing.search(text, partial=not is_last)
        end = found.start() if found else len(text)
        is_whole = found is not None and not found.partial
        new, text = text[:end], text[found.end() :] if found and is_whole else text[end:]
        if self._is_text:
            shown = json_string(new) + ('"' if is_whole else "")
        else:
            self._value += new
            shown = json_value(self._value, self._types or frozenset()) if is_whole else self._value if is_last else ""
        if is_whole:
            self._types = None
        return shown, text, is_whole, False

    @property
    def _is_text(self) -> bool:
        return self._types == frozenset(("string",))


def json_string(text: str) -> str:
    """Return a piece of a JSON string, without quotation marks."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_value(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that a model wrote as it is; `types` are those that its schema allows, empty: any.

    A value of none of the types is a string if strings are allowed, else what it is.
    """
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    try:
        found = json.loads(bare, parse_constant=int)  # which takes neither NaN nor Infinity
    except (ValueError, RecursionError):
        return f'"{json_string(text)}"'
    if "string" in types and not types & _types_of_value(found):
        return f'"{json_string(text)}"'
    return bare


def types_of(schema: Any) -> frozenset[str]:
    """Return the types that a JSON Schema allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return frozenset()
    declared = schema.get("type")
    types = {each for each in [declared, *_listed(declared)] if isinstance(each, str)}
    if not types:
        values = [schema["const"]] if "const" in schema else _listed(schema.get("enum"))
        types.update(*map(_types_of_value, values))
    for choice in (*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
        types |= types_of(choice)
    return frozenset(types)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _types_of_value(value: Any) -> frozenset[str]:
    return next((names for kind, names in _TYPES if isinstance(value, kind)), frozenset())

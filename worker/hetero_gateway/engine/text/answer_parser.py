"""Answers to pieces: what a model thinks, what it says and the tools that it calls, as its text comes.

The pieces of an answer do not depend on how its text was cut. Text is held back only while it may become markup, and
text that turns out to be none is said as it is. A call is announced once its header is complete; its arguments follow
as they come. If arguments break off or go wrong, the call stays as far as it came, and the rest is text.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import regex

from hetero_gateway.engine.text.answer_formats import AnswerFormat, Arguments, CallForm, CallFormat, Place
from hetero_gateway.engine.text.call_arguments import JsonReader, JsonText, TaggedReader

_ID_CHARS: Final = 24
_ALPHANUMERIC: Final = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Content:
    """New text that the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """New text that the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. `index` is its number in the answer, `id` names it."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """New text of a call's arguments; all of it together is a JSON object."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class AnswerParser:
    """Parser of one answer.

    `tools` are the request's functions: JSON Schemas of their parameters, by name. Without them calls are text.
    `is_thinking`: the prompt has opened a thought. Of `max_calls` calls, all that follows the last is left out.
    """

    def __init__(
        self,
        form: AnswerFormat,
        *,
        tools: Mapping[str, Any] | None = None,
        is_thinking: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self._calls = form.calls if tools else None
        self._tools = tools or {}
        self._max_calls = max_calls
        self._thought_begin, self._thought_end = _thought_patterns(form)
        self._buffer = ""
        self._pieces: list[Piece] = []
        self._num_calls = 0
        self._says = False
        """Whether anything was said that is not white space."""
        self._skips_space = is_thinking
        self._follows_call = False
        self._form: CallForm | None = None
        self._header = ""
        self._object = JsonText()
        self._reader: JsonReader | TaggedReader = JsonReader()
        self._state: Callable[[bool], bool] = self._begin
        if is_thinking:
            self._state = self._think

    def push(self, text: str) -> list[Piece]:
        """Add text, and return the pieces that are certain with it."""
        self._buffer += text
        return self._run(is_last=False)

    def finish(self) -> list[Piece]:
        """Return the rest: no more text comes."""
        return self._run(is_last=True)

    def _run(self, *, is_last: bool) -> list[Piece]:
        while self._state(is_last):
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    # --- states: each takes from the buffer, and returns whether the next state has something to do ------

    def _begin(self, is_last: bool) -> bool:
        begin = self._thought_begin
        found = begin.match(self._buffer, partial=not is_last) if begin is not None else None
        if found and found.partial:
            return False
        self._state = self._say
        if found:
            self._buffer = self._buffer[found.end() :]
            self._state, self._skips_space = self._think, True
        return True

    def _think(self, is_last: bool) -> bool:
        before, found = self._until(self._thought_end, is_last)
        self._add(Reasoning, before)
        if found:
            self._state, self._skips_space = self._say, True
        return bool(found)

    def _say(self, is_last: bool) -> bool:
        found, form = self._next_call(is_last) if self._calls else (None, None)
        end = len(self._buffer) if found is None else found.start()
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        self._add(Content, text)
        if found is None or form is None or found.partial:
            return False
        return self._enter(form, found.group(0), found.groupdict())

    def _read_arguments(self, is_last: bool) -> bool:
        arguments, self._buffer, is_over = self._reader.read(self._buffer, is_last=is_last)
        self._add_arguments(arguments)
        if is_over:
            self._state = self._end_call
        return is_over

    def _read_object(self, is_last: bool) -> bool:
        self._buffer = self._object.take(self._buffer)
        if not (self._object.is_complete or self._buffer or is_last):
            return False
        name, arguments = _call_of(self._object)
        if name is None:
            self._add(Content, self._header + self._object.text)
            self._state = self._say
        else:
            self._announce(name)
            self._add_arguments(arguments)
            self._state = self._end_call
        return True

    def _end_call(self, is_last: bool) -> bool:
        end = self._form.end if self._form else None
        found = end.match(self._buffer, partial=not is_last) if end else None
        if found and found.partial:
            return False
        if found:
            self._buffer = self._buffer[found.end() :]
        is_enough = self._max_calls is not None and self._num_calls >= self._max_calls
        self._state = self._leave_out if is_enough else self._say
        self._skips_space = self._follows_call = True
        return True

    def _leave_out(self, is_last: bool) -> bool:  # noqa: ARG002
        self._buffer = ""
        return False

    # --- calls ------------------------------------------------------------------------------------------

    def _next_call(self, is_last: bool) -> tuple[regex.Match[str] | None, CallForm | None]:
        """Return where the next call begins or may begin, and its form; of several the first."""
        best: tuple[regex.Match[str] | None, CallForm | None] = (None, None)
        for form in self._calls.forms if self._calls else ():
            found = self._found(form, is_last)
            if found and (best[0] is None or found.start() < best[0].start()):
                best = (found, form)
        return best

    def _found(self, form: CallForm, is_last: bool) -> regex.Match[str] | None:
        if form.place is Place.ANYWHERE:
            return form.header.search(self._buffer, partial=not is_last)
        if not (self._follows_call if form.place is Place.AFTER_CALL else not self._says and not self._num_calls):
            return None
        found = form.header.match(self._buffer, partial=not is_last)
        if found and not found.partial and form.place is Place.START and found["name"] not in self._tools:
            return None
        return found

    def _enter(self, form: CallForm, header: str, groups: Mapping[str, str | None]) -> bool:
        rest = groups.get("rest") or ""
        self._form = form
        self._buffer = rest + self._buffer[len(header) :]
        self._header = header.removesuffix(rest)
        if form.arguments is Arguments.OBJECT:
            self._object = JsonText()
            self._state = self._read_object
        elif form.arguments is Arguments.NOTHING:
            self._skips_space = True
        else:
            self._announce(groups["name"] or "")
            self._reader = self._new_reader(form, groups["name"] or "")
            self._state = self._read_arguments
        return True

    def _new_reader(self, form: CallForm, name: str) -> JsonReader | TaggedReader:
        if form.arguments is Arguments.TAGS and self._calls and self._calls.tags and form.end:
            return TaggedReader(self._calls.tags, end=form.end, schema=self._tools.get(name))
        return JsonReader()

    def _announce(self, name: str) -> None:
        assert self._calls is not None
        self._pieces.append(CallStart(self._num_calls, _new_id(self._calls), name))
        self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        if text:
            self._pieces.append(CallArguments(self._num_calls - 1, text))

    # --- text -------------------------------------------------------------------------------------------

    def _until(self, pattern: regex.Pattern[str], is_last: bool) -> tuple[str, regex.Match[str] | None]:
        """Take the text before `pattern` or its possible beginning, and the pattern's match once it is complete."""
        found = pattern.search(self._buffer, partial=not is_last)
        if found is None:
            before, self._buffer = self._buffer, ""
            return before, None
        before = self._buffer[: found.start()]
        self._buffer = self._buffer[found.start() if found.partial else found.end() :]
        return before, None if found.partial else found

    def _add(self, kind: type[Content | Reasoning], text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
        if not text:
            return
        self._skips_space = self._follows_call = False
        self._says = self._says or (kind is Content and not text.isspace())
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, kind):
            self._pieces[-1] = kind(last.text + text)
        else:
            self._pieces.append(kind(text))


def _thought_patterns(form: AnswerFormat) -> tuple[regex.Pattern[str] | None, regex.Pattern[str]]:
    """Return patterns of a thought's beginning, if the model thinks, and of its end."""
    if form.thought is None:
        return None, regex.compile("(?!)")
    opening, closing = map(regex.escape, (form.thought.opening, form.thought.closing))
    return regex.compile(rf"\s{{0,8}}{opening}"), regex.compile(rf"\s{{0,8}}{closing}")


def _call_of(written: JsonText) -> tuple[str | None, str]:
    """Return name and arguments of a call that is a JSON object; no name if it is no call."""
    try:
        call = json.loads(written.text) if written.is_complete else None
    except (ValueError, RecursionError):
        call = None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None, ""
    arguments = call.get("arguments", call.get("parameters"))
    if arguments is None:
        arguments = {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return _sound(call["name"]), _sound(text)


def _sound(text: str) -> str:
    """Return text that was read from JSON, where halves of surrogate pairs may stand alone, without any."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _new_id(form: CallFormat) -> str:
    if form.id_chars is None:
        return f"call_{secrets.token_hex(_ID_CHARS // 2)}"
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(form.id_chars))

"""Structural tags: forms of answers that mix text with tagged parts, in the JSON that xgrammar defined for them.

Routers send them to force calls of tools in a model's own markup. They become llguidance's grammars here. A kind of
format that has no such counterpart is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.text.call_grammars import ANY_TEXT, LarkRules, json_rule

MAX_DEPTH: Final = 32
MAX_FORMATS: Final = 4096
"""Formats in one structural tag, those inside of others counted."""


def structural_grammar(text: str, special_ids: Mapping[str, int], *, field: str) -> str:
    """Return the Lark grammar of a structural tag, as JSON text. `special_ids`: the model's special tokens, by text.

    Raises InvalidRequest, which names `field`, if it is malformed, or of a kind that is not served.
    """
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"is no JSON: {error}") from error
    writer = _TagWriter(special_ids, field)
    if not isinstance(tag, dict):
        raise writer.malformed("must be a JSON object")
    if "structures" in tag:  # the older form: tags amid text
        tags = [{**each, "content": {"type": "json_schema", "json_schema": each.get("schema", {})}}
                for each in writer.objects(tag, "structures")]  # fmt: skip
        form = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    else:
        form = writer.object(tag, "format")
    return writer.text(writer.write(form, depth=0))


class _TagWriter(LarkRules):
    """Writer of one structural tag's rules."""

    def __init__(self, special_ids: Mapping[str, int], field: str) -> None:
        super().__init__(special_ids)
        self._field = field
        self._num_formats = 0
        self._writers: Mapping[str, Callable[[dict[str, Any], int], str]] = {
            "const_string": lambda form, _: self.literal(self.string(form, "value")),
            "any_text": self._any_text,
            "json_schema": self._json_schema,
            "regex": lambda form, _: f"/{_slashes_escaped(self.string(form, 'pattern'))}/",
            "sequence": lambda form, depth: " ".join(self._elements(form, depth)),
            "or": lambda form, depth: f"({' | '.join(self._elements(form, depth))})",
            "optional": lambda form, depth: f"({self._content(form, depth)})?",
            "plus": lambda form, depth: f"({self._content(form, depth)})+",
            "star": lambda form, depth: f"({self._content(form, depth)})*",
            "tag": lambda form, depth: f"{self.literal(self.string(form, 'begin'))} {self._rest(form, depth)}",
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def write(self, form: Mapping[str, Any], *, depth: int) -> str:
        """Return what matches a format. Raises InvalidRequest."""
        self._num_formats += 1
        if depth > MAX_DEPTH or self._num_formats > MAX_FORMATS:
            raise self.malformed(f"must have at most {MAX_FORMATS} formats, nested {MAX_DEPTH} levels deep")
        kind = form.get("type")
        writer = self._writers.get(kind) if isinstance(kind, str) else None
        if writer is None:
            served = ", ".join(self._writers)
            raise self.malformed(f"has a format of type {kind!r:.40}, which is not served; there is {served}")
        return self.rule(writer(dict(form), depth + 1) or '""')

    # --- kinds ------------------------------------------------------------------------------------------

    def _any_text(self, form: dict[str, Any], _: int) -> str:
        if form.get("excludes"):
            raise self.malformed("has any_text with excludes, which is not served")
        return ANY_TEXT

    def _json_schema(self, form: dict[str, Any], _: int) -> str:
        if form.get("style", "json") != "json":
            raise self.malformed(f"has a JSON schema in the style {form['style']!r:.40}, which is not served")
        return json_rule(form.get("json_schema", {}))

    def _elements(self, form: dict[str, Any], depth: int) -> list[str]:
        return [self.write(each, depth=depth) for each in self.objects(form, "elements")]

    def _content(self, form: dict[str, Any], depth: int) -> str:
        return self.write(self.object(form, "content"), depth=depth)

    def _rest(self, tag: dict[str, Any], depth: int) -> str:
        """Return what follows a tag's begin: its content and its end."""
        ends = tag.get("end", "")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            raise self.malformed("has a tag whose end is no text")
        content = self.object(tag, "content")
        if content.get("type") == "any_text" and not content.get("excludes") and all(ends):
            return f"({' | '.join(map(self.until, ends))})"
        written = self.write(content, depth=depth)
        return f"{written} ({' | '.join(self.literal(end) or self.rule(_NOTHING) for end in ends)})"

    def _triggered(self, form: dict[str, Any], depth: int) -> str:
        """Return text with tags, each of which begins with a trigger; text holds no trigger."""
        triggers = form.get("triggers")
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            raise self.malformed("has triggered_tags without triggers")
        first, later = [], []
        for tag in self.objects(form, "tags"):
            begin = self.string(tag, "begin")
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise self.malformed(f"has a tag {begin!r:.80} that begins with no trigger")
            rest = self._rest(tag, depth)
            first.append(f"{self.literal(begin)} {rest}")
            later.append(f"{self.until(trigger)} {self.literal(begin[len(trigger) :])} {rest}")
        alone, amid = f"({' | '.join(first)})", f"({' | '.join(later)})"
        if form.get("stop_after_first"):
            return alone if form.get("at_least_one") else f"({amid} | {self.rule(ANY_TEXT)})"
        tail = f"{amid}* {self.rule(ANY_TEXT)}"
        return f"{alone} {tail}" if form.get("at_least_one") else tail

    def _separated(self, form: dict[str, Any], depth: int) -> str:
        """Return tags with a separator between them."""
        tags = [{"type": "tag", **tag} for tag in self.objects(form, "tags")]
        tag = self.rule(" | ".join(self.write(each, depth=depth) for each in tags))
        more = "" if form.get("stop_after_first") else f" ({self.literal(self.string(form, 'separator'))} {tag})*"
        return f"{tag}{more}" if form.get("at_least_one") else f"({tag}{more})?"

    # --- fields -----------------------------------------------------------------------------------------

    def string(self, form: Mapping[str, Any], name: str) -> str:
        """Return a field that is text. Raises InvalidRequest."""
        value = form.get(name)
        if not isinstance(value, str):
            raise self.malformed(f"needs a text {name!r} in {form.get('type')!r:.40}")
        return value

    def object(self, form: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return a field that is an object. Raises InvalidRequest."""
        value = form.get(name)
        if not isinstance(value, dict):
            raise self.malformed(f"needs an object {name!r} in {form.get('type')!r:.40}")
        return value

    def objects(self, form: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
        """Return a field that is a list of at least one object. Raises InvalidRequest."""
        value = form.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
            raise self.malformed(f"needs a list of objects {name!r} in {form.get('type')!r:.40}")
        return value

    def malformed(self, problem: str) -> InvalidRequest:
        """Return the error of a structural tag."""
        return InvalidRequest(self._field, problem)


_NOTHING: Final = '""'


def _slashes_escaped(pattern: str) -> str:
    r"""Return a pattern as it may stand between slashes: / as \/, unless it is escaped."""
    parts = pattern.split("\\\\")
    return "\\\\".join(part.replace("\\/", "/").replace("/", "\\/") for part in parts)

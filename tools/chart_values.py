"""Makes the chart's values.schema.json, the table in its README and the versions in Chart.yaml.

The comments in values.yaml are the only source: a value's comment is its description in the schema and in the README,
and a line `# @schema {…}` (a YAML flow mapping) adds JSON Schema keywords. A line `## Title` begins a section of the
README. Types come from the values themselves. A mapping whose keys have comments of their own allows no other keys; a
mapping or list that is free in form must say so by `@schema`. A value without a comment is an error.

Draft 7 is what Helm 3 and Helm 4 both understand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from yaml.constructor import SafeConstructor

from hetero_api.contract import VERSION

ROOT: Final = Path(__file__).resolve().parent.parent
CHART: Final = Path("charts/heteroinference")
TABLE_BEGIN: Final = "<!-- values: made of values.yaml by `make chart` -->"
TABLE_END: Final = "<!-- end of values -->"
_SCHEMA_MARK: Final = "@schema "
_SECTION_MARK: Final = "## "
_TYPES: Final[Mapping[type, str]] = {bool: "boolean", int: "integer", float: "number", str: "string"}
# What Helm puts among a chart's values when the chart is a dependency of another.
_FROM_PARENT: Final = {
    "global": {"type": "object", "description": "Values that a parent chart shares; not used."},
    "enabled": {"type": "boolean", "description": "For the `condition` of a parent chart; not used."},
}
_DIALECT: Final = "http://json-schema.org/draft-07/schema#"


class ChartValuesError(Exception):
    """values.yaml, README.md or Chart.yaml is not as this program needs it; the message names the place."""


@dataclass(frozen=True, slots=True)
class Value:
    """One key of values.yaml. `fields` are the documented keys of a mapping."""

    path: str
    description: str
    default: Any
    keywords: Mapping[str, Any]
    fields: Sequence[Value] = ()
    section: str = ""

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]


@dataclass(slots=True)
class _Comments:
    """The lines of values.yaml, to look above a key."""

    lines: list[str]
    sections: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        marks = enumerate(self.lines)
        self.sections = {at: line[len(_SECTION_MARK) :] for at, line in marks if line.startswith(_SECTION_MARK)}

    def above(self, line: int) -> list[str]:
        """The comment lines right above a line, without their marks."""
        begin = line
        while begin > 0 and self.lines[begin - 1].lstrip().startswith("# "):
            begin -= 1
        return [text.strip()[2:].strip() for text in self.lines[begin:line]]

    def section(self, line: int) -> str:
        """Title of the section that a line is in."""
        return next((self.sections[at] for at in sorted(self.sections, reverse=True) if at < line), "")


def read_values(text: str) -> list[Value]:
    """The values of a values.yaml, with their comments. Raises ChartValuesError, naming the key."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise ChartValuesError("values.yaml must be a mapping")
    return list(_values_of(root, _Comments(text.splitlines()), prefix=""))


def schema_of(values: Sequence[Value]) -> dict[str, Any]:
    """The JSON Schema of all values; unknown keys are refused."""
    properties = {value.name: _schema(value) for value in values}
    return {
        "$schema": _DIALECT,
        "title": "Values of the chart heteroinference",
        "type": "object",
        "properties": {**properties, **_FROM_PARENT},
        "additionalProperties": False,
    }


def table_of(values: Sequence[Value]) -> str:
    """Markdown: a heading and a table for each section."""
    lines: list[str] = []
    section = None
    for value in values:
        if value.section != section:
            section = value.section
            lines += ["", f"### {section}", "", "| Value | Meaning | Default |", "|---|---|---|"]
        lines += [_row(one) for one in _flat(value)]
    return "\n".join(lines).strip() + "\n"


def generate_chart(root: Path) -> list[Path]:
    """Write the generated files of the chart under `root`; returns what was written, relative to `root`.

    Only their generated parts are new: README.md and Chart.yaml are copied around these from the checkout.
    Raises ChartValuesError.
    """
    values = read_values((ROOT / CHART / "values.yaml").read_text(encoding="utf-8"))
    readme = (ROOT / CHART / "README.md").read_text(encoding="utf-8")
    chart = (ROOT / CHART / "Chart.yaml").read_text(encoding="utf-8")
    contents = {
        CHART / "values.schema.json": json.dumps(schema_of(values), indent=2, ensure_ascii=False) + "\n",
        CHART / "README.md": with_table(readme, table_of(values)),
        CHART / "Chart.yaml": with_version(chart, VERSION),
    }
    (root / CHART).mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        (root / path).write_text(content, encoding="utf-8")
    return list(contents)


def with_table(readme: str, table: str) -> str:
    """README.md with another table between the marks. Raises ChartValuesError when the marks are not there."""
    before, begin, rest = readme.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not begin or not end:
        raise ChartValuesError(f"README.md of the chart needs the lines {TABLE_BEGIN} and {TABLE_END}")
    return f"{before}{begin}\n\n{table}\n{end}{after}"


def with_version(chart: str, version: str) -> str:
    """Chart.yaml with another version of the chart and the product, which are one. Raises ChartValuesError."""
    wanted = {"version:": f"version: {version}", "appVersion:": f'appVersion: "{version}"'}
    lines = [wanted.pop(line.split(" ", 1)[0], line) for line in chart.splitlines()]
    if wanted:
        raise ChartValuesError(f"Chart.yaml has no {' and no '.join(wanted)}")
    return "\n".join(lines) + "\n"


def _values_of(mapping: yaml.MappingNode, comments: _Comments, *, prefix: str) -> Iterator[Value]:
    for key, node in mapping.value:
        yield _value(f"{prefix}{key.value}", key.start_mark.line, node, comments)


def _value(path: str, line: int, node: yaml.Node, comments: _Comments) -> Value:
    above = comments.above(line)
    description = " ".join(text for text in above if not text.startswith(_SCHEMA_MARK))
    if not description:
        raise ChartValuesError(f"values.yaml, line {line + 1}: {path} has no comment")
    keywords: dict[str, Any] = {}
    for text in above:
        if text.startswith(_SCHEMA_MARK):
            keywords |= _keywords(path, text[len(_SCHEMA_MARK) :])
    documented = isinstance(node, yaml.MappingNode) and bool(node.value) and not keywords
    fields = tuple(_values_of(node, comments, prefix=f"{path}.")) if documented else ()  # type: ignore[arg-type]
    return Value(path, description, _plain(node), keywords, fields, comments.section(line))


def _keywords(path: str, text: str) -> dict[str, Any]:
    try:
        keywords = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ChartValuesError(f"values.yaml: @schema of {path} is not YAML: {error}") from error
    if not isinstance(keywords, dict):
        raise ChartValuesError(f"values.yaml: @schema of {path} is not a mapping")
    return keywords


def _plain(node: yaml.Node) -> Any:
    return SafeConstructor().construct_document(node)


def _schema(value: Value) -> dict[str, Any]:
    if value.fields:
        properties = {one.name: _schema(one) for one in value.fields}
        shape = {"type": "object", "properties": properties, "additionalProperties": False}
        return {"description": value.description, **shape}
    return {"description": value.description, "type": _type(value), **value.keywords, "default": value.default}


def _type(value: Value) -> str:
    if isinstance(value.default, dict | list):
        shape = ("items",) if isinstance(value.default, list) else ("type", "properties", "additionalProperties")
        if not any(keyword in value.keywords for keyword in shape):
            raise ChartValuesError(f"values.yaml: {value.path} needs @schema with {' or '.join(shape)}")
        return "array" if isinstance(value.default, list) else "object"
    if type(value.default) not in _TYPES:
        raise ChartValuesError(f"values.yaml: {value.path} has no type of JSON: {value.default!r}")
    return _TYPES[type(value.default)]


def _flat(value: Value) -> Iterator[Value]:
    yield value
    for one in value.fields:
        yield from _flat(one)


def _row(value: Value) -> str:
    default = "" if value.fields else f"`{json.dumps(value.default, ensure_ascii=False)}`".replace("|", r"\|")
    allowed = value.keywords.get("enum")
    choice = f" One of {', '.join(f'`{one}`' for one in allowed)}." if allowed else ""
    meaning = f"{value.description}{choice}".replace("|", r"\|")
    return f"| `{value.path}` | {meaning} | {default} |"

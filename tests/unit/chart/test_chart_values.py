"""values.schema.json, the README's table and Chart.yaml's versions are made of the comments in values.yaml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from hetero_api.contract import VERSION
from tools.chart_values import (
    CHART,
    ROOT,
    TABLE_BEGIN,
    TABLE_END,
    ChartValuesError,
    generate_chart,
    read_values,
    schema_of,
    table_of,
    with_table,
    with_version,
)

SAMPLE = """\
# Not a value's comment.

## First

# How many,
# in two lines.
# @schema {minimum: 0}
replicas: 2
# An image.
image:
  # Its name.
  name: a|b
  # When it is pulled.
  # @schema {enum: [Always, Never]}
  policy: Never

## Second

# Free in form.
# @schema {additionalProperties: {type: string}}
labels: {}
"""


def sample_schema() -> dict[str, Any]:
    return schema_of(read_values(SAMPLE))


def test_a_comment_is_the_description_and_the_value_gives_type_and_default() -> None:
    replicas = sample_schema()["properties"]["replicas"]
    assert replicas == {"description": "How many, in two lines.", "type": "integer", "minimum": 0, "default": 2}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"replica": 1}, "'replica' was unexpected"),
        ({"image": {"nam": "x"}}, "'nam' was unexpected"),
        ({"image": {"policy": "Sometimes"}}, "'Sometimes' is not one of"),
        ({"replicas": "2"}, "'2' is not of type 'integer'"),
        ({"labels": {"a": 1}}, "1 is not of type 'string'"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], problem: str) -> None:
    (error,) = Draft7Validator(sample_schema()).iter_errors(values)
    assert problem in error.message


def test_what_helm_adds_for_a_parent_chart_is_allowed() -> None:
    assert not list(Draft7Validator(sample_schema()).iter_errors({"global": {"any": 1}, "enabled": True}))


def test_the_table_has_a_heading_a_section_and_a_row_a_value() -> None:
    table = table_of(read_values(SAMPLE))
    assert [line for line in table.splitlines() if line.startswith("### ")] == ["### First", "### Second"]
    assert "| `replicas` | How many, in two lines. | `2` |" in table
    assert r'| `image.name` | Its name. | `"a\|b"` |' in table
    assert '| `image.policy` | When it is pulled. One of `Always`, `Never`. | `"Never"` |' in table


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\n", "line 1: a has no comment"),
        ("# A.\na:\n  b: 1\n", "line 3: a.b has no comment"),
        ("# A.\na: {}\n", "a needs @schema with type or properties or additionalProperties"),
        ("# A.\na: []\n", "a needs @schema with items"),
        ("# A.\na:\n", "a has no type of JSON: None"),
        ("# A.\n# @schema {minimum: 1\na: 1\n", "@schema of a is not YAML"),
        ("# A.\n# @schema minimum\na: 1\n", "@schema of a is not a mapping"),
        ("- 1\n", "must be a mapping"),
    ],
)
def test_what_cannot_be_documented_is_named(text: str, problem: str) -> None:
    with pytest.raises(ChartValuesError, match=r"^values\.yaml") as caught:
        schema_of(read_values(text))
    assert problem in str(caught.value)


def test_a_blank_line_parts_a_comment_from_a_value() -> None:
    with pytest.raises(ChartValuesError, match="a has no comment"):
        read_values("# Says nothing about a.\n\na: 1\n")


def test_only_the_table_of_the_readme_is_made_anew() -> None:
    readme = f"# Mine\n{TABLE_BEGIN}\nold\n{TABLE_END}\nmine too\n"
    assert with_table(readme, "new\n") == f"# Mine\n{TABLE_BEGIN}\n\nnew\n\n{TABLE_END}\nmine too\n"


def test_a_readme_without_marks_is_an_error() -> None:
    with pytest.raises(ChartValuesError, match=r"README\.md of the chart needs the lines"):
        with_table("# Mine\n", "new\n")


def test_both_versions_of_the_chart_are_written() -> None:
    chart = 'name: x\nversion: 0.0.1\nappVersion: "0.0.1"\nkeywords: [version]\n'
    assert with_version(chart, "2.0.0") == 'name: x\nversion: 2.0.0\nappVersion: "2.0.0"\nkeywords: [version]\n'


def test_a_chart_without_a_version_is_an_error() -> None:
    with pytest.raises(ChartValuesError, match="appVersion"):
        with_version("version: 1.0.0\n", "2.0.0")


def test_the_committed_files_are_what_would_be_made(tmp_path: Path) -> None:
    written = generate_chart(tmp_path)
    assert [path.name for path in written] == ["values.schema.json", "README.md", "Chart.yaml"]
    for path in written:
        assert (ROOT / path).read_text() == (tmp_path / path).read_text(), f"run make chart: {path}"


def test_the_chart_has_the_products_version() -> None:
    chart = yaml.safe_load((ROOT / CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_the_defaults_keep_the_schema_and_the_schema_is_one() -> None:
    schema = json.loads((ROOT / CHART / "values.schema.json").read_text())
    Draft7Validator.check_schema(schema)
    defaults = yaml.safe_load((ROOT / CHART / "values.yaml").read_text())
    assert not list(Draft7Validator(schema).iter_errors(defaults))


def test_no_documented_mapping_takes_unknown_keys() -> None:
    schema = json.loads((ROOT / CHART / "values.schema.json").read_text())
    open_ended = [path for path, node in _mappings(schema, "") if node.get("additionalProperties") is not False]
    assert open_ended == []


def _mappings(node: dict[str, Any], path: str) -> list[tuple[str, dict[str, Any]]]:
    """Mappings whose keys are named."""
    found = [(path, node)] if "properties" in node else []
    for name, child in node.get("properties", {}).items():
        found += _mappings(child, f"{path}.{name}")
    return found

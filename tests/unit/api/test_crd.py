"""The generated CRD is structural and says what the types say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from hetero_api.crd import crd, render_crd, structural_schema

pytestmark = pytest.mark.unit


def nodes(schema: dict[str, Any], path: str = "spec") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


def test_the_schema_is_structural() -> None:
    for path, node in nodes(structural_schema()):
        assert "type" in node, path
        assert not {"$ref", "$defs", "anyOf", "allOf", "const", "title"} & set(node), path
        assert isinstance(node.get("exclusiveMinimum", True), bool), path


def test_every_field_is_described() -> None:
    named = [(path, node) for path, node in nodes(structural_schema()) if not path.endswith("[]")]
    assert [path for path, node in named if not node.get("description")] == []


def test_every_list_is_bounded() -> None:
    lists = [(path, node) for path, node in nodes(structural_schema()) if node["type"] == "array"]
    assert lists
    assert [path for path, node in lists if "maxItems" not in node] == []


def test_rendering_is_plain_yaml_of_the_crd() -> None:
    text = render_crd()
    assert yaml.safe_load(text) == crd()
    assert "&id" not in text

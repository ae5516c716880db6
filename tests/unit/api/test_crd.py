"""The generated CRD is structural, bounded and says what the types say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from hetero_api.crd import COLUMNS, RULES_KEY, crd, render_crd
from hetero_api.status import ConditionType

pytestmark = pytest.mark.unit

VERSION: dict[str, Any] = crd()["spec"]["versions"][0]
SCHEMA: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]
KEYWORDS = {
    "description", "type", "enum", "default", "pattern", "minLength", "maxLength", "minimum", "exclusiveMinimum",
    "maximum", "exclusiveMaximum", "minItems", "maxItems", "maxProperties", "required", "properties", "items",
    "additionalProperties", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations",
    "x-kubernetes-map-type", "x-kubernetes-preserve-unknown-fields",
}  # fmt: skip
RULE_COST_LIMIT = 10_000_000
"""What API servers allow a rule to cost, by their estimate."""


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}".removeprefix("."))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


def ours() -> list[tuple[str, dict[str, Any]]]:
    return [(path, node) for path, node in nodes(SCHEMA) if path.split(".")[0] in ("spec", "status")]


def field(path: str) -> dict[str, Any]:
    return dict(nodes(SCHEMA))[path]


def test_the_schema_is_structural() -> None:
    for path, node in nodes(SCHEMA):
        assert "type" in node, path
        assert set(node) <= KEYWORDS, path
        assert isinstance(node.get("exclusiveMinimum", True), bool), path


def test_every_field_is_described_in_sentences() -> None:
    described = {path: node.get("description", "") for path, node in ours() if not path.endswith("[]")}
    assert [path for path, text in described.items() if not text.endswith(".")] == []


def test_every_list_map_and_text_is_bounded() -> None:
    bounds = {"array": "maxItems", "string": "maxLength"}
    unbounded = [
        path
        for path, node in ours()
        if (bound := bounds.get(node["type"])) and bound not in node and "enum" not in node
    ]
    maps = [path for path, node in ours() if "additionalProperties" in node and "maxProperties" not in node]
    assert unbounded + maps == []


def test_the_status_has_no_defaults() -> None:
    assert [path for path, node in nodes(field("status")) if "default" in node] == []


def test_defaults_are_what_the_api_server_stores() -> None:
    assert field("spec.pools[].sharedMemory")["default"] == "1Gi"
    assert field("spec.engine")["default"] == {}
    assert field("spec.scheduling.gang")["default"] == {"scheduler": "None"}


def test_pools_and_conditions_are_maps_by_their_key() -> None:
    for path, key in (("spec.pools", "name"), ("status.conditions", "type"), ("status.pools", "name")):
        node = field(path)
        assert (node["x-kubernetes-list-type"], node["x-kubernetes-list-map-keys"]) == ("map", [key])
        assert key in node["items"]["required"]


def test_every_rule_points_at_a_field_that_exists() -> None:
    known = dict(nodes(SCHEMA))
    for path, node in nodes(SCHEMA):
        for rule in node.get(RULES_KEY, ()):
            assert f"{path}{rule['fieldPath']}".removeprefix(".") in known
            assert rule["reason"].startswith("FieldValue")


def test_no_rule_is_asked_so_often_of_so_much_that_an_api_server_refuses_it() -> None:
    def largest(node: dict[str, Any]) -> int:
        """Characters and entries of the largest object that the node allows."""
        children = sum(largest(child) for child in node.get("properties", {}).values())
        each = sum(largest(node[key]) for key in ("items", "additionalProperties") if key in node)
        many: int = node.get("maxItems", node.get("maxProperties", 1))
        length: int = node.get("maxLength", 0)
        return 1 + length // 10 + children + many * each

    def walk(node: dict[str, Any], times: int) -> Iterator[int]:
        for rule in node.get(RULES_KEY, ()):
            words = len(re.findall(r"\w+", rule["rule"]))
            yield times * (words + len(rule["rule"]) // 4 * max(map(largest, node["properties"].values())))
        for child in node.get("properties", {}).values():
            yield from walk(child, times)
        if "items" in node:
            yield from walk(node["items"], times * node["maxItems"])

    pools = SCHEMA["properties"]["spec"]["properties"]["pools"]["items"]
    assert max(walk(pools, 16)) < RULE_COST_LIMIT


def test_printer_columns_and_scale_name_fields_that_exist() -> None:
    known = dict(nodes(SCHEMA))
    paths = [re.sub(r"\[.*?\]", "[]", path).removeprefix(".") for _, _, path, _, _ in COLUMNS]
    scale = [path.removeprefix(".") for path in VERSION["subresources"]["scale"].values()]
    assert [path for path in [*paths, *scale] if path not in known and not path.startswith("metadata.")] == []
    assert [name for name, *_, wide in COLUMNS if not wide] == ["Ready", "Ranks", "Epoch", "Restarts", "Reason", "Age"]
    assert [name for name, *_, wide in COLUMNS if wide] == ["Model", "Mode", "Tok/s"]


def test_conditions_fit_the_schema() -> None:
    conditions = field("status.conditions")
    assert len(ConditionType) <= conditions["maxItems"]
    assert {"type", "status", "reason", "lastTransitionTime"} <= set(conditions["items"]["required"])


def test_rendering_is_plain_yaml_of_the_crd() -> None:
    text = render_crd()
    assert yaml.safe_load(text) == crd()
    assert "&id" not in text

"""The CustomResourceDefinition, generated from `hetero_api.spec` and `hetero_api.status`.

Kubernetes takes a *structural* OpenAPI v3 schema: no $ref, no anyOf for optional fields, `exclusiveMinimum` as
a flag. This module turns pydantic's JSON schema into that form. Defaults of the spec are written into the schema, so
that the API server stores them and `kubectl get -o yaml` shows what is in force. The status has none: what nobody
wrote is not there. Every list, map and text is bounded, so that the cost of the CEL rules is bounded too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import yaml
from pydantic import BaseModel

from hetero_api.contract import API_VERSION, GROUP, KIND, PLURAL, SHORT_NAME
from hetero_api.quantity import format_bytes
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.spec_types import MAX_NAME_LENGTH, NAME_FORM, validation
from hetero_api.status import HeteroInferenceStatus

RULES_KEY: Final = "x-kubernetes-validations"
_KEPT: Final = (
    "description", "type", "enum", "default", "pattern", "minLength", "maxLength", "minimum", "exclusiveMinimum",
    "maximum", "exclusiveMaximum", "minItems", "maxItems", "maxProperties", "required", "properties", "items",
    "additionalProperties", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type",
    "x-kubernetes-preserve-unknown-fields", RULES_KEY,
)  # fmt: skip
"""Keywords that a structural schema knows, in the order in which they are written."""
_HEADER: Final = "# Generated from protos/hetero_api/spec.py and status.py by `make manifests`. Do not edit.\n"
_MAX_GENERATE_NAME_LENGTH: Final = 63

COLUMNS: Final = (
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', "Whether requests are served.", 0),
    ("Ranks", "string", ".status.ranks", "Ready ranks of all.", 0),
    ("Epoch", "integer", ".status.epoch", "Epoch of the group.", 0),
    ("Restarts", "integer", ".status.restarts.count", "Restarts of ranks within the window.", 0),
    ("Reason", "string", ".status.reason", "Why it is Ready or not.", 0),
    ("Model", "string", ".spec.model.uri", "Which model is served.", 1),
    ("Mode", "string", ".status.placement.mode", "How the model is spread.", 1),
    ("Tok/s", "number", ".status.placement.measuredTokensPerSecond", "Measured decode speed.", 1),
    ("Age", "date", ".metadata.creationTimestamp", "Time since its creation.", 0),
)
"""Columns of `kubectl get`: name, type, path, description, and 1 for those of `-o wide` only."""


def structural_schema(model: type[BaseModel] = HeteroInferenceSpec, *, defaults: bool = True) -> dict[str, Any]:
    """OpenAPI v3 schema of a model, structural: every reference inlined, optional fields without a null type."""
    schema = model.model_json_schema(by_alias=True)
    structural = _structural(schema, schema.get("$defs", {}), defaults=defaults)
    return {**structural, "description": (model.__doc__ or "").strip()}


def crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition as a Kubernetes object."""
    version = {
        "name": API_VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [_column(*column) for column in COLUMNS],
        "schema": {"openAPIV3Schema": _resource_schema()},
    }
    names = {
        "kind": KIND, "listKind": f"{KIND}List", "plural": PLURAL, "singular": KIND.lower(),
        "shortNames": [SHORT_NAME], "categories": ["all"],
    }  # fmt: skip
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def render_crd() -> str:
    """Return the CRD as YAML text, ending in a newline."""
    text: str = yaml.dump(crd(), Dumper=_PlainDumper, sort_keys=False, width=110, allow_unicode=True)
    return _HEADER + text


class _PlainDumper(yaml.SafeDumper):
    """Writes equal lists twice rather than as YAML aliases, which nobody reads well."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def _column(name: str, kind: str, path: str, description: str, priority: int) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return {**column, "priority": priority} if priority else column


def _resource_schema() -> dict[str, Any]:
    return {
        "description": "One LLM replica over GPU ranks and NUMA-pinned CPU ranks.",
        "type": "object",
        "required": ["metadata", "spec"],
        "properties": {
            "apiVersion": {"description": f"{GROUP}/{API_VERSION}", "type": "string"},
            "kind": {"description": KIND, "type": "string"},
            "metadata": _metadata_schema(),
            "spec": structural_schema(),
            "status": structural_schema(HeteroInferenceStatus, defaults=False),
        },
        RULES_KEY: [
            validation("metadata.name", f"self.metadata.name.matches('{NAME_FORM.pattern}')", NAME_FORM.message)
        ],
    }


def _metadata_schema() -> dict[str, Any]:
    # Of metadata only these two may be bounded. With both, CEL's cost is reckoned with the bounds.
    name = {"type": "string", "maxLength": MAX_NAME_LENGTH, "pattern": NAME_FORM.pattern}
    generate_name = {"type": "string", "maxLength": _MAX_GENERATE_NAME_LENGTH}
    return {"type": "object", "properties": {"name": name, "generateName": generate_name}}


def _structural(node: Mapping[str, Any], definitions: Mapping[str, Any], *, defaults: bool) -> dict[str, Any]:
    node = _resolve(node, definitions)
    result: dict[str, Any] = {key: node[key] for key in _KEPT if key in node}
    for key, as_flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if as_flag in node:
            result[key], result[as_flag] = node[as_flag], True
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), Mapping):
            result[key] = _structural(node[key], definitions, defaults=defaults)
        else:
            result.pop(key, None)
    if "properties" in node:
        fields = node["properties"].items()
        result["properties"] = {name: _structural(field, definitions, defaults=defaults) for name, field in fields}
    if result.get("type") == "array":
        result.setdefault("x-kubernetes-list-type", "atomic")
    return _with_default(result, wanted=defaults)


def _with_default(result: dict[str, Any], *, wanted: bool) -> dict[str, Any]:
    default = result.pop("default", None)
    if default is None or not wanted:
        return result
    if "properties" in result:
        default = _object_default(result)
    elif result["type"] == "string" and isinstance(default, int):
        default = format_bytes(default)  # pydantic shows defaults as Python has them
    return {key: value for key in _KEPT if (value := {**result, "default": default}.get(key)) is not None}


def _object_default(schema: Mapping[str, Any]) -> dict[str, Any]:
    """{}, which the API server fills from the fields' own defaults; whole where rules look at it before that."""
    if RULES_KEY not in schema:
        return {}
    return {name: field["default"] for name, field in schema["properties"].items() if "default" in field}


def _resolve(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node with its reference inlined, `anyOf: [X, null]` turned into X and a constant into an
    enumeration.
    """
    merged = dict(node)
    options = [option for option in merged.pop("anyOf", []) if option.get("type") != "null"]
    if options:
        merged = {**options[0], **merged}
    if "const" in merged:
        merged["enum"] = [merged.pop("const")]
    if "patternProperties" in merged:
        # Nor can a structural schema bound the keys of a map.
        (merged["additionalProperties"],) = merged.pop("patternProperties").values()
    reference = merged.pop("$ref", None)
    if reference is None:
        return merged
    target = _resolve(definitions[reference.rsplit("/", 1)[1]], definitions)
    return {**target, **merged}

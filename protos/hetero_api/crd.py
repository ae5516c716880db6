"""The CustomResourceDefinition, generated from `hetero_api.spec`.

Kubernetes takes a *structural* OpenAPI v3 schema: no $ref, no anyOf for optional fields, `exclusiveMinimum` as
a flag. This module turns pydantic's JSON schema into that form. Defaults are written into the schema, so that
the API server stores them and `kubectl get -o yaml` shows what is in force.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import yaml

from hetero_api.contract import API_VERSION, GROUP, KIND, PLURAL, SHORT_NAME
from hetero_api.spec import HeteroInferenceSpec

_DROPPED: Final = {"title", "additionalProperties", "$defs", "discriminator"}
_HEADER: Final = "# Generated from protos/hetero_api/spec.py by `make manifests`. Do not edit.\n"


def structural_schema() -> dict[str, Any]:
    """OpenAPI v3 schema of `spec`, structural: every reference inlined, optional fields without a null type."""
    schema = HeteroInferenceSpec.model_json_schema(by_alias=True)
    structural = _structural(schema, schema.get("$defs", {}))
    structural["description"] = (HeteroInferenceSpec.__doc__ or "").strip()
    return structural


def crd() -> dict[str, Any]:
    """The CustomResourceDefinition as a Kubernetes object."""
    version = {
        "name": API_VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}],
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "description": "One LLM replica over GPU ranks and NUMA-pinned CPU ranks.",
                "required": ["spec"],
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"type": "object"},
                    "spec": structural_schema(),
                    "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                },
            }
        },
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
    """The CRD as YAML text, ending in a newline."""
    text: str = yaml.dump(crd(), Dumper=_PlainDumper, sort_keys=False, width=110, allow_unicode=True)
    return _HEADER + text


class _PlainDumper(yaml.SafeDumper):
    """Writes equal lists twice rather than as YAML aliases, which nobody reads well."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def _structural(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    node = _resolve(node, definitions)
    result: dict[str, Any] = {}
    for key, value in node.items():
        if key in _DROPPED and not (key == "additionalProperties" and isinstance(value, dict)):
            continue
        if key in ("exclusiveMinimum", "exclusiveMaximum"):
            result["minimum" if key == "exclusiveMinimum" else "maximum"] = value
            result[key] = True
        elif key == "properties":
            result[key] = {name: _structural(field, definitions) for name, field in value.items()}
        elif key in ("items", "additionalProperties"):
            result[key] = _structural(value, definitions)
        elif key == "const":
            result["enum"] = [value]
        elif key == "default" and "properties" in node:
            result[key] = {}  # the API server fills in the fields' own defaults
        elif key == "default" and value is None:
            continue
        else:
            result[key] = value
    return result


def _resolve(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The node with its reference inlined and `anyOf: [X, null]` turned into X."""
    merged = dict(node)
    options = [option for option in merged.pop("anyOf", []) if option.get("type") != "null"]
    if options:
        merged = {**options[0], **merged}
    reference = merged.pop("$ref", None)
    if reference is None:
        return merged
    target = _resolve(definitions[reference.rsplit("/", 1)[1]], definitions)
    return {**target, **merged}

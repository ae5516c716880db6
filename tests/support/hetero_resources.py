"""HeteroInference manifests for tests: one small valid resource, and changes to it by path."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from hetero_api.contract import API_VERSION, GROUP, KIND

Object = dict[str, Any]

ABSENT: Final = object()
"""As a value of a change: the field is left out."""

SPEC: Final[Object] = {
    "model": {"uri": "hf://example/model"},
    "pools": [{"name": "cpu", "type": "CPU", "ranks": 2, "cpu": {"coresPerRank": 1, "memoryPerRank": "1Gi"}}],
}
"""Two rank pods and a gateway."""


def resource(name: str, namespace: str, changes: Mapping[str, Any] | None = None) -> Object:
    """A resource with SPEC, changed at paths below `spec` such as "pools.0.cpu.coresPerRank"."""
    return {
        "apiVersion": f"{GROUP}/{API_VERSION}",
        "kind": KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": changed(SPEC, changes or {}),
    }


def changed(spec: Object, changes: Mapping[str, Any]) -> Object:
    """A copy of a decoded spec with other values at some paths; sections on the way are made."""
    result = copy.deepcopy(spec)
    for path, value in changes.items():
        _set(result, path.split("."), value)
    return result


def _set(section: Any, path: list[str], value: Any) -> None:
    key: Any = int(path[0]) if isinstance(section, list) else path[0]
    if len(path) > 1:
        inner = section[key] if isinstance(section, list) else section.setdefault(key, {})
        _set(inner, path[1:], value)
    elif value is ABSENT:
        section.pop(key, None)
    else:
        section[key] = copy.deepcopy(value)

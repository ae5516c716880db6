"""APIs of other projects: their kinds exist and take any content. InferencePools are what they are elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.kube.client import Object
from tests.support.kube.versions import Version


def _crd(group: str, version: str, kind: str, plural: str) -> Object:
    anything: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": anything, "status": anything}}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [served],
        },
    }


POD_MONITOR: Final = _crd("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors")
"""Of the Prometheus operator."""
POD_GROUP: Final = _crd("scheduling.volcano.sh", "v1beta1", "PodGroup", "podgroups")
"""Of Volcano."""
RESOURCE_CLAIM_TEMPLATE: Final = _crd("resource.k8s.io", "v1", "ResourceClaimTemplate", "resourceclaimtemplates")
"""Of Kubernetes itself from 1.34 on; older servers take a stand-in, when it says that nobody approved of it."""
RESOURCE_CLAIM_TEMPLATE["metadata"]["annotations"] = {"api-approved.kubernetes.io": "unapproved, a stand-in for tests"}

INFERENCE_POOL: Final[Object] = yaml.safe_load(
    (Path(__file__).parents[1] / "data/crds/inferencepools.yaml").read_text(encoding="utf-8")
)
"""Of the Gateway API inference extension, unchanged."""
_EMPTY_DEFAULTS_SINCE: Final = Version(1, 25, 0)


def inference_pool(version: Version) -> Object:
    """INFERENCE_POOL for an API server: old ones read the empty text, a default of it, as null, which they refuse."""
    found = copy.deepcopy(INFERENCE_POOL)
    if version < _EMPTY_DEFAULTS_SINCE:
        spec = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        assert spec["endpointPickerRef"]["properties"]["group"].pop("default") == ""
    return found

"""APIs of other projects, as far as the operator asks for them: the kinds exist, and take any content."""

from __future__ import annotations

from typing import Any, Final

from tests.support.kube.client import Object


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

"""The kinds that the operator works with, and the paths of their objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from hetero_api.contract import API_VERSION, GROUP, KIND, PLURAL
from hetero_operator.reconcile.model import Capabilities, ObjectRef


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """A kind of namespaced object."""

    api_version: str
    kind: str
    plural: str

    @property
    def root(self) -> str:
        """Path of its API group and version."""
        return f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path of one object, or of all in a namespace, or (None) in all namespaces."""
        parts = [self.root]
        if namespace is not None:
            parts.append(f"namespaces/{quote(namespace, safe='')}")
        parts.append(self.plural)
        parts += [quote(part, safe="") for part in (name, subresource) if part is not None]
        return "/".join(parts)

    def manifest(self, namespace: str, name: str, **body: Any) -> dict[str, Any]:
        """Return an object of the kind with the fields of `body`."""
        metadata = {"name": name, "namespace": namespace}
        return {"apiVersion": self.api_version, "kind": self.kind, "metadata": metadata, **body}


RESOURCE: Final = ResourceKind(f"{GROUP}/{API_VERSION}", KIND, PLURAL)
POD: Final = ResourceKind("v1", "Pod", "pods")
SECRET: Final = ResourceKind("v1", "Secret", "secrets")
EVENT: Final = ResourceKind("v1", "Event", "events")
LEASE: Final = ResourceKind("coordination.k8s.io/v1", "Lease", "leases")

ALWAYS_WATCHED: Final = (
    POD,
    ResourceKind("v1", "Service", "services"),
    ResourceKind("v1", "ServiceAccount", "serviceaccounts"),
    ResourceKind("v1", "ConfigMap", "configmaps"),
    ResourceKind("apps/v1", "StatefulSet", "statefulsets"),
    ResourceKind("apps/v1", "Deployment", "deployments"),
    ResourceKind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    ResourceKind("rbac.authorization.k8s.io/v1", "Role", "roles"),
    ResourceKind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
)
"""Kinds that every server has. Secrets are never listed: whoever may list them may read all of them."""

OPTIONAL: Final = (
    ResourceKind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    ResourceKind("policy/v1beta1", "PodDisruptionBudget", "poddisruptionbudgets"),
    ResourceKind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
    ResourceKind("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups"),
    ResourceKind("inference.networking.k8s.io/v1", "InferencePool", "inferencepools"),
    ResourceKind("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates"),
)
"""Kinds that a server may lack; of two versions of one kind the first that exists is used."""

_BY_NAME: Final = {(kind.api_version, kind.kind): kind for kind in (*ALWAYS_WATCHED, *OPTIONAL, SECRET, RESOURCE)}


def kind_of(ref: ObjectRef) -> ResourceKind:
    """Return the kind of a referred object. Raises KeyError for a kind that the operator does not know."""
    return _BY_NAME[ref.api_version, ref.kind]


def watched_kinds(capabilities: Capabilities) -> tuple[ResourceKind, ...]:
    """Return the kinds to watch on a server with these capabilities, each once."""
    chosen = {kind.plural: kind for kind in reversed(OPTIONAL) if capabilities.has(kind.api_version, kind.kind)}
    return (*ALWAYS_WATCHED, *chosen.values())

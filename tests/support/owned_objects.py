"""What belongs to one HeteroInference on an API server, and when it has come to rest.

Objects are found by their label, as the operator finds them, but of kinds that are listed here: what a test expects
never comes from the operator's own code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from hetero_api.contract import (
    ANNOTATION_APPLIED,
    KIND,
    LABEL_GATEWAY_REVISION,
    LABEL_NAME,
    LABEL_REVISION,
    LABEL_ROLE,
    ROLE_GATEWAY,
    ROLE_RANK,
)
from tests.support.kube.client import Client, Object, condition
from tests.support.kube.polling import poll

KINDS: Final = (
    "Service",
    "ConfigMap",
    "Secret",
    "ServiceAccount",
    "StatefulSet",
    "Deployment",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "Role",
    "RoleBinding",
)
OPTIONAL_KINDS: Final = (
    "monitoring.coreos.com/v1/PodMonitor",
    "scheduling.volcano.sh/v1beta1/PodGroup",
    "resource.k8s.io/v1/ResourceClaimTemplate",
    "inference.networking.k8s.io/v1/InferencePool",
)
UNSEEN: Final = "the newest generation was not looked at"
SETTLE_TIMEOUT_S: Final = 30.0
FEW_INTERVAL_S: Final = 0.1
MANY_INTERVAL_S: Final = 0.5
"""Lists of everything in a namespace take the API server's time, which is the operator's too."""

_SERVERS_METADATA: Final = frozenset(
    {"uid", "resourceVersion", "creationTimestamp", "managedFields", "generation", "selfLink"}
)
_CONTROLLERS_ANNOTATION: Final = "deployment.kubernetes.io/revision"
_SERVERS_SPEC: Final = frozenset({"clusterIP", "clusterIPs"})


class Key(NamedTuple):
    """An object within a namespace; its group is left out, for no two of ours share a kind."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Owned:
    """All of one resource at one moment."""

    resource: Object
    objects: Mapping[Key, Object]
    pods: Sequence[Object]

    @property
    def name(self) -> str:
        return str(self.resource["metadata"]["name"])

    def of_kind(self, kind: str) -> list[Object]:
        return [item for key, item in self.objects.items() if key.kind == kind]

    def uids(self) -> dict[Key, str]:
        return {key: item["metadata"]["uid"] for key, item in self.objects.items()}

    def pod_uids(self, role: str) -> dict[str, str]:
        """Uid by name, of the rank pods or the gateway's."""
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.pods if _label(pod, LABEL_ROLE) == role}


class OwnedObjects:
    """Looks at what resources of a namespace own."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._kinds = [*KINDS, *(kind for kind in OPTIONAL_KINDS if client.discovery.has(kind))]

    def of(self, name: str) -> Owned:
        """Everything that one resource owns. Raises NotFound when there is no such resource."""
        found = self._client.get(KIND, name, self._namespace)
        return Owned(found, self.labelled(name), self.pods(name))

    def labelled(self, name: str) -> dict[Key, Object]:
        """Objects but pods that carry the resource's label, whether or not it exists."""
        return {
            Key(item["kind"], item["metadata"]["name"]): item
            for kind in self._kinds
            for item in self._client.list_all(kind, self._namespace, labels=f"{LABEL_NAME}={name}")
        }

    def pods(self, name: str) -> list[Object]:
        return self._client.list_all("Pod", self._namespace, labels=f"{LABEL_NAME}={name}")

    def every(self) -> dict[str, Owned]:
        """Everything of every resource of the namespace, by name, with one list call for each kind."""
        by_name: dict[str, tuple[dict[Key, Object], list[Object]]] = {}
        for kind in [*self._kinds, "Pod"]:
            for item in self._client.list_all(kind, self._namespace, labels=LABEL_NAME):
                objects, pods = by_name.setdefault(_label(item, LABEL_NAME), ({}, []))
                if kind == "Pod":
                    pods.append(item)
                else:
                    objects[Key(item["kind"], item["metadata"]["name"])] = item
        return {
            found["metadata"]["name"]: Owned(found, *by_name.get(found["metadata"]["name"], ({}, [])))
            for found in self._client.list_all(KIND, self._namespace)
        }

    def wait_settled(self, *names: str, timeout_s: float = SETTLE_TIMEOUT_S) -> dict[str, Owned]:
        """All of the named resources (of all, when none is named), once nothing is left to do for any of them."""
        reasons: dict[str, str] = {}

        def probe() -> dict[str, Owned] | None:
            unseen = [found for found in self._client.list_all(KIND, self._namespace) if not _is_seen(found)]
            if len(names) != 1 and unseen:  # a list of everything is not worth while yet
                reasons.clear()
                reasons.update({found["metadata"]["name"]: UNSEEN for found in unseen})
                return None
            found = self.every() if len(names) != 1 else {names[0]: self.of(names[0])}
            wanted = {name: found[name] for name in names or found}
            reasons.clear()
            reasons.update({name: why for name, owned in wanted.items() if (why := unsettled(owned))})
            return wanted if not reasons else None

        interval_s = FEW_INTERVAL_S if len(names) == 1 else MANY_INTERVAL_S
        return poll(probe, timeout_s=timeout_s, describe=lambda: _shown(reasons), interval_s=interval_s)

    def wait_gone(self, name: str, *, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Until nothing that carries the resource's label is left."""
        left: list[str] = []

        def probe() -> bool:
            left[:] = [str(key) for key in self.labelled(name)]
            left.extend(f"Pod/{pod['metadata']['name']}" for pod in self.pods(name))
            return not left

        poll(probe, timeout_s=timeout_s, describe=lambda: f"left of {name}: {left}")


def unsettled(owned: Owned) -> str:
    """Why a resource has not come to rest; "" when it has: its newest spec is in force, and pods are as it says.

    Pods need not run: in most tests there is no kubelet.
    """
    resource = owned.resource
    if not _is_seen(resource):
        return UNSEEN
    if is_refused(resource):
        return ""
    revision, gateway_revision = (resource["status"].get(key, "") for key in ("revision", "gatewayRevision"))
    replicas = resource["spec"].get("replicas", 1)
    groups = max(1, replicas)
    runs = replicas > 0 and not resource["spec"].get("suspend")
    pools = resource["spec"]["pools"]
    is_one_pod = resource["spec"].get("topology", {}).get("colocate") == "Pod"
    sets = 1 if is_one_pod else len(pools)
    pods = 1 if is_one_pod else sum(pool["ranks"] // pool.get("ranksPerPod", 1) for pool in pools)
    wanted_pods = pods * groups if runs else 0
    checks = (
        _wrong_workloads(owned, "StatefulSet", LABEL_REVISION, revision, count=sets * groups),
        _wrong_workloads(owned, "Deployment", LABEL_GATEWAY_REVISION, gateway_revision, count=groups),
        _wrong_revisions(owned.of_kind("ConfigMap"), LABEL_GATEWAY_REVISION, gateway_revision, count=groups),
        _wrong_revisions(owned.of_kind("Secret"), LABEL_REVISION, revision, count=groups),
        _wrong_pods(owned, ROLE_RANK, LABEL_REVISION, revision, count=wanted_pods),
        _wrong_pods(owned, ROLE_GATEWAY, LABEL_GATEWAY_REVISION, gateway_revision, count=groups * runs),
    )
    return "; ".join(check for check in checks if check)


def _is_seen(resource: Object) -> bool:
    observed = resource.get("status", {}).get("observedGeneration")
    return bool(observed == resource["metadata"]["generation"])


def is_refused(resource: Object) -> bool:
    """Whether the operator does not accept the resource's spec."""
    accepted = condition(resource, "Accepted")
    return accepted is not None and accepted["status"] == "False"


def normalised(item: Object, *, name: str) -> Object:
    """What an object says, without what differs from one making to the next: two runs can be compared.

    `name` is the resource's; it becomes NAME. A Secret's values become their lengths.
    """
    body = {key: value for key, value in item.items() if key != "status"}
    metadata = {key: value for key, value in item["metadata"].items() if key not in _SERVERS_METADATA}
    ours = (ANNOTATION_APPLIED, _CONTROLLERS_ANNOTATION)
    annotations = {key: value for key, value in (metadata.get("annotations") or {}).items() if key not in ours}
    owners = [{**owner, "uid": "UID"} for owner in metadata.get("ownerReferences") or ()]
    body["metadata"] = {**metadata, "annotations": annotations, "ownerReferences": owners}
    if item["kind"] == "Secret":
        body["data"] = {key: len(value) for key, value in item["data"].items()}
    if item["kind"] == "Service":
        body["spec"] = _without_server_choices(item["spec"])
    if item["kind"] == "ServiceAccount":
        body.pop("secrets", None)
    result: Object = json.loads(json.dumps(body).replace(name, "NAME"))
    return result


def normalised_all(owned: Owned) -> dict[str, Object]:
    """Every owned object but pods, normalised, by kind and name."""
    found = {str(key): normalised(item, name=owned.name) for key, item in owned.objects.items()}
    return {key.replace(owned.name, "NAME"): item for key, item in sorted(found.items())}


def _without_server_choices(spec: Object) -> Object:
    kept = {key: value for key, value in spec.items() if key not in _SERVERS_SPEC or value in ("None", ["None"])}
    kept["ports"] = [{k: v for k, v in port.items() if k != "nodePort"} for port in spec["ports"]]
    return kept


def _wrong_workloads(owned: Owned, kind: str, label: str, revision: str, *, count: int) -> str:
    workloads = owned.of_kind(kind)
    # A router's Deployment is of no revision.
    templates = [label_of for item in workloads if (label_of := _label(item["spec"]["template"], label))]
    if templates != [revision] * count:
        return f"{kind}s make pods of {templates}, {count} of {revision} wanted"
    return ""


def _wrong_revisions(items: list[Object], label: str, revision: str, *, count: int) -> str:
    found = [_label(item, label) for item in items]
    return "" if found == [revision] * count else f"revisions {found}, {count} of {revision} wanted"


def _wrong_pods(owned: Owned, role: str, label: str, revision: str, *, count: int) -> str:
    pods = [pod for pod in owned.pods if _label(pod, LABEL_ROLE) == role]
    leaving = [pod["metadata"]["name"] for pod in pods if pod["metadata"].get("deletionTimestamp")]
    if leaving:
        return f"{role} pods are leaving: {leaving}"
    return _wrong_revisions(pods, label, revision, count=count) and f"{role} pods: " + _wrong_revisions(
        pods, label, revision, count=count
    )


def _label(item: Mapping[str, Any], label: str) -> str:
    return str((item["metadata"].get("labels") or {}).get(label, ""))


def _shown(reasons: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {why}" for name, why in sorted(reasons.items()))

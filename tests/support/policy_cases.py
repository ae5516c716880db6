"""Names that a policy may forbid, field by field: what unit tests, the chart's admission policy and a cluster judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hetero_operator.reconcile.model import Policy
from tests.support.hetero_resources import ABSENT

STRICT: Final = Policy(
    allowed_host_paths=("/srv/models", "/dev/shm"),
    allowed_images=("registry.example/team/*",),
    allowed_secrets=("team-*", "hub"),
    allowed_priority_classes=("batch",),
    allowed_schedulers=("numa-*",),
    allowed_runtime_classes=("nvidia",),
)
"""What whoever runs the operator allows, in the tests."""
_GPU: Final[Mapping[str, Any]] = {"pools.0.type": "GPU", "pools.0.cpu": ABSENT}


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """A field with a name that STRICT allows, and one that it does not. Changes are of hetero_resources.SPEC."""

    field: str
    setting: str
    chart_value: str
    allowed: Mapping[str, Any]
    forbidden: Mapping[str, Any]


def _case(field: str, setting: str, chart_value: str, path: str, allowed: Any, forbidden: Any) -> PolicyCase:
    return PolicyCase(field, f"allowed_{setting}", f"policy.{chart_value}", {path: allowed}, {path: forbidden})


def _folder(field: str, path: str, allowed: Any, forbidden: Any) -> PolicyCase:
    return _case(field, "host_paths", "hostPaths", path, allowed, forbidden)


def _image(field: str, path: str, allowed: Any, forbidden: Any) -> PolicyCase:
    return _case(field, "images", "images", path, allowed, forbidden)


def _secret(field: str, path: str, of: Any = lambda name: {"name": name}) -> PolicyCase:
    return _case(field, "secrets", "secrets", path, of("team-x"), of("root-ca"))


_RESTRICTED: Final = {
    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
}  # fmt: skip
_OWN: Final = {"name": "own", "image": "registry.example/team/own:1", "securityContext": _RESTRICTED}
"""A container of the user's."""
_PATCHES: Final[tuple[tuple[str, str, str, Callable[[str], Any], str, str], ...]] = (
    (
        "volumes[0].hostPath.path", "host_paths", "hostPaths",
        lambda name: {"volumes": [{"name": "own", "hostPath": {"path": name}}]}, "/srv/models/a", "/etc",
    ),
    (
        "initContainers[0].image", "images", "images",
        lambda name: {"initContainers": [{**_OWN, "image": name}]}, "registry.example/team/own:1", "evil",
    ),
    (
        "containers[0].image", "images", "images",
        lambda name: {"containers": [{**_OWN, "image": name}]}, "registry.example/team/own:1", "evil",
    ),
    (
        "volumes[0].image.reference", "images", "images",
        lambda name: {"volumes": [{"name": "own", "image": {"reference": name}}]}, "registry.example/team/a", "evil",
    ),
    (
        "volumes[0].secret.secretName", "secrets", "secrets",
        lambda name: {"volumes": [{"name": "own", "secret": {"secretName": name}}]}, "team-x", "root-ca",
    ),
    (
        "volumes[0].csi.nodePublishSecretRef.name", "secrets", "secrets",
        lambda name: {"volumes": [{"name": "own", "csi": {"driver": "d", "nodePublishSecretRef": {"name": name}}}]},
        "team-x", "root-ca",
    ),
    (
        "volumes[0].projected.sources[0].secret.name", "secrets", "secrets",
        lambda name: {"volumes": [{"name": "own", "projected": {"sources": [{"secret": {"name": name}}]}}]},
        "team-x", "root-ca",
    ),
    (
        "imagePullSecrets[0].name", "secrets", "secrets",
        lambda name: {"imagePullSecrets": [{"name": name}]}, "team-x", "root-ca",
    ),
    *(
        (
            f"{kind}[0].{field}[0].{path}", "secrets", "secrets",
            lambda name, kind=kind, field=field, make=make: {kind: [{**_OWN, field: [make(name)]}]},
            "team-x", "root-ca",
        )
        for kind in ("containers", "initContainers")
        for field, path, make in (
            (
                "env", "valueFrom.secretKeyRef.name",
                lambda name: {"name": "A", "valueFrom": {"secretKeyRef": {"name": name, "key": "a"}}},
            ),
            ("envFrom", "secretRef.name", lambda name: {"secretRef": {"name": name}}),
        )
    ),
    (
        "priorityClassName", "priority_classes", "priorityClasses",
        lambda name: {"priorityClassName": name}, "batch", "system-node-critical",
    ),
    ("schedulerName", "schedulers", "schedulers", lambda name: {"schedulerName": name}, "numa-aware", "evil"),
    (
        "runtimeClassName", "runtime_classes", "runtimeClasses",
        lambda name: {"runtimeClassName": name}, "nvidia", "runc-privileged",
    ),
)  # fmt: skip
"""Field in a patch of a pod, setting, the chart's value, the patch's spec with a name, an allowed name, and another."""


def _patched(part: str, path: str) -> Iterator[PolicyCase]:
    """Yield the cases of a part's patch."""
    for field, setting, chart_value, make, allowed, forbidden in _PATCHES:
        yield _case(
            f"{part}.podTemplate.spec.{field}", setting, chart_value, f"{path}.podTemplate",
            {"spec": make(allowed)}, {"spec": make(forbidden)},
        )  # fmt: skip


def _router_keys(name: str) -> Mapping[str, Any]:
    return {"type": "SMG", "cacheIsolation": "Shared", "keysSecretRef": {"name": name}}


def _volumes(name: str) -> list[Mapping[str, str]]:
    return [{"name": "own", "mountPath": "/own", "secretName": name}]


CASES: Final = (
    _folder("spec.model.uri", "model.uri", "file:///srv/models/a", "file:///srv/models2/a"),
    *(
        case
        for field, path, of in (
            (
                "spec.engine.speculative.draft.uri", "engine.speculative",
                lambda uri: {"kind": "Draft", "draft": {"uri": uri}},
            ),
            (
                "spec.engine.adapters.load[0].uri", "engine.adapters",
                lambda uri: {"maxLoaded": 1, "load": [{"name": "one", "uri": uri}]},
            ),
        )
        for case in (
            _folder(field, path, of("file:///srv/models/a"), of("file:///srv/models2/a")),
            _image(field, path, of("oci://registry.example/team/m:1#/a"), of("oci://registry.example/other/m")),
        )
    ),
    _folder("spec.model.cache.hostPath", "model.cache.hostPath", "/srv/models/cache/", "/var/lib/kubelet"),
    _folder("spec.exchange.hostPath", "exchange.hostPath", "/dev/shm", "/dev"),
    _folder("spec.exchange.hostPath", "exchange.hostPath", "/dev/shm/a", "/dev/shm/../mem"),
    _image("spec.model.uri", "model.uri", "oci://registry.example/team/m:1#/weights", "oci://registry.example/other/m"),
    _image("spec.images.cpuWorker", "images.cpuWorker", "registry.example/team/cpu:1", "registry.example.evil/team/a"),
    _image("spec.images.gpuWorker", "images.gpuWorker", "registry.example/team/gpu:1", "other/registry.example/team/a"),
    _image("spec.images.gateway", "images.gateway", "registry.example/team/gateway:1", "registryxexample/team/a"),
    _image("spec.images.router", "images.router", "registry.example/team/router:1", "registry.example/other/router"),
    _secret("spec.model.tokenSecretRef.name", "model.tokenSecretRef"),
    _secret("spec.gateway.tls.secretName", "gateway.tls", lambda name: {"secretName": name}),
    _secret(
        "spec.gateway.tls.clientCASecretName",
        "gateway.tls",
        lambda name: {"secretName": "team-tls", "clientCASecretName": name},
    ),
    _secret("spec.gateway.auth.keysSecretRef.name", "gateway.auth", lambda name: {"keysSecretRef": {"name": name}}),
    _secret("spec.monitoring.keySecretRef.name", "monitoring.keySecretRef"),
    _secret("spec.router.keysSecretRef.name", "router", _router_keys),
    _secret("spec.router.tlsSecretName", "router", lambda name: {"type": "SMG", "tlsSecretName": name}),
    _secret("spec.images.pullSecrets", "images.pullSecrets", lambda name: ["hub", name]),
    _case(
        "spec.scheduling.priorityClassName", "priority_classes", "priorityClasses",
        "scheduling.priorityClassName", "batch", "system-node-critical",
    ),
    _case(
        "spec.scheduling.schedulerName", "schedulers", "schedulers",
        "scheduling.schedulerName", "numa-aware", "default-scheduler",
    ),
    PolicyCase(
        "spec.scheduling.gang.scheduler", "allowed_schedulers", "policy.schedulers",
        {"scheduling.gang": {"scheduler": "Volcano"}, "scheduling.schedulerName": "numa-aware"},
        {"scheduling.gang": {"scheduler": "Volcano"}},
    ),
    PolicyCase(
        "spec.pools[0].gpu.runtimeClassName", "allowed_runtime_classes", "policy.runtimeClasses",
        {**_GPU, "pools.0.gpu.runtimeClassName": "nvidia"}, {**_GPU, "pools.0.gpu.runtimeClassName": "runc-privileged"},
    ),
    _secret("spec.gateway.volumes[0].secretName", "gateway.volumes", _volumes),
    _secret("spec.pools[0].volumes[0].secretName", "pools.0.volumes", _volumes),
    *_patched("spec.gateway", "gateway"),
    *_patched("spec.pools[0]", "pools.0"),
)  # fmt: skip

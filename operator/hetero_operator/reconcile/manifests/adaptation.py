"""Adapts pods to what users add: variables and volumes in every container of theirs, then a patch, merged last.

The patch is merged as `kubectl patch` does it by default: maps by key, lists of named things by their names, other
lists replaced, null takes away. What comes out must still be a pod of ours: `broken_promises` says what is not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hetero_api.spec import GatewaySpec
from hetero_api.spec_cluster import OWN_PREFIXES
from hetero_api.spec_pods import VolumeSpec, is_our_variable
from hetero_api.spec_pools import PoolSpec
from hetero_operator.reconcile.differences import MERGE_KEYS
from hetero_operator.reconcile.model import Object

_VOLUME_PREFIX: Final = "user-"
_PRIVATE: Final = ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace")
_VOLUME_SOURCES: Final = frozenset(
    {
        "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "hostPath", "image", "persistentVolumeClaim",
        "projected", "secret",
    }
)  # fmt: skip
"""Those of Pod Security level Restricted, and folders of nodes, which the policy allows one by one."""
_PROFILES: Final = ("RuntimeDefault", "Localhost")
_SECURITY: Final[Mapping[str, Sequence[Any]]] = {
    "runAsNonRoot": (True,), "privileged": (False,), "procMount": ("Default",), "windowsOptions.hostProcess": (False,),
    "seccompProfile.type": _PROFILES, "appArmorProfile.type": _PROFILES,
    "seLinuxOptions.type": ("container_t", "container_init_t", "container_kvm_t", "container_engine_t"),
    "seLinuxOptions.user": (), "seLinuxOptions.role": (),
}  # fmt: skip
"""Fields of a securityContext, and what Restricted lets them be, if they are not left out."""
_PROFILE_ANNOTATIONS: Final = (
    "container.apparmor.security.beta.kubernetes.io/", "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
)  # fmt: skip
"""Where old clusters read profiles."""
_KEPT_OF_POD: Final = ("serviceAccountName", "automountServiceAccountToken", "enableServiceLinks")
_KEPT_OF_CONTAINER: Final = ("image", "command", "args", "ports", "startupProbe", "livenessProbe", "readinessProbe")


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Additions of a pool or of the gateway to its pods."""

    path: str
    """Field of the spec, e.g. spec.gateway."""
    env: Mapping[str, str]
    volumes: Sequence[VolumeSpec]
    patch: Mapping[str, Any]
    containers: Collection[str] | None = None
    """Containers that get the variables and volumes; None: all."""

    @classmethod
    def of(cls, path: str, part: PoolSpec | GatewaySpec, containers: Collection[str] | None = None) -> Adaptation:
        """Return what a part of the spec adds."""
        return cls(path, part.env or {}, part.volumes or (), part.pod_template or {}, containers)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is added."""
        return not (self.env or self.volumes or self.patch)


def adapted(template: Object, additions: Sequence[Adaptation]) -> dict[str, Any]:
    """Return a pod template with additions."""
    result = dict(template)
    for item in additions:
        if not item.is_empty:
            result = merged(_with_files(result, item), item.patch)
    return result


def broken_promises(template: Object, additions: Sequence[Adaptation]) -> Iterator[str]:
    """Yield `path: message` of each addition that makes a pod another than ours."""
    for number, item in enumerate(additions, start=1):
        if item.patch:
            before = adapted(template, [replace(item, patch={})])
            try:
                problems = list(_problems(before, merged(before, item.patch)))
                adapted(template, additions[:number])  # patches of pools that share a pod have to fit together
            except (AttributeError, TypeError) as error:
                yield f"{item.path}.podTemplate: is no patch of a pod: {error}"
            else:
                yield from (f"{item.path}.podTemplate.{problem}" for problem in problems)


def merged(below: Mapping[str, Any], patch: Mapping[str, Any], *, path: str = "") -> dict[str, Any]:
    """Return an object with a patch merged into it. Raises TypeError where the patch has another kind of value."""
    result = dict(below)
    for key, value in patch.items():
        at, known = f"{path}{key}", result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            result[key] = merged(_of_kind(known, Mapping, at) or {}, value, path=f"{at}.")
        elif isinstance(value, list):
            result[key] = _merged_list(_of_kind(known, list, at) or [], value, key, at)
        else:
            result[key] = value
    return result


def _of_kind(known: Any, kind: type[Any], at: str) -> Any:
    if known is not None and not isinstance(known, kind):
        raise TypeError(f"{at} is of another type in a pod")
    return known


def _merged_list(below: Sequence[Any], patch: Sequence[Any], field: str, at: str) -> list[Any]:
    keys = MERGE_KEYS.get(field)
    if keys is None or not all(isinstance(item, Mapping) for item in patch):
        return list(patch)
    key = keys[0]
    result = {item.get(key): item for item in below}
    for item in patch:
        name = item.get(key)
        result[name] = merged(result.get(name, {}), item, path=f"{at}[{name}].")
    return list(result.values())


def _with_files(template: Mapping[str, Any], item: Adaptation) -> dict[str, Any]:
    """Return a template with an addition's variables and volumes."""
    spec = dict(template["spec"])
    mounts = [
        {"name": _VOLUME_PREFIX + volume.name, "mountPath": volume.mount_path, "readOnly": True}
        for volume in item.volumes
    ]
    for kind in ("initContainers", "containers"):
        if kind in spec:
            spec[kind] = [_with_extras(one, item, mounts) for one in spec[kind]]
    known = {volume["name"] for volume in spec["volumes"]}
    added = [_volume(volume) for volume in item.volumes if _VOLUME_PREFIX + volume.name not in known]
    return {**template, "spec": {**spec, "volumes": [*spec["volumes"], *added]}}


def _with_extras(container: Mapping[str, Any], item: Adaptation, mounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if item.containers is not None and container["name"] not in item.containers:
        return dict(container)
    known = {variable["name"] for variable in container.get("env", ())}
    added = [{"name": name, "value": value} for name, value in item.env.items() if name not in known]
    env = [*container.get("env", ()), *added]
    taken = {mount["mountPath"] for mount in container.get("volumeMounts", ())}
    more = [mount for mount in mounts if mount["mountPath"] not in taken]
    result = {**container, "volumeMounts": [*container.get("volumeMounts", ()), *more]}
    return {**result, "env": env} if env else result


def _volume(volume: VolumeSpec) -> dict[str, Any]:
    name = _VOLUME_PREFIX + volume.name
    if volume.secret_name is not None:
        return {"name": name, "secret": {"secretName": volume.secret_name, "defaultMode": 0o440}}
    if volume.config_map_name is not None:
        return {"name": name, "configMap": {"name": volume.config_map_name}}
    return {"name": name, "persistentVolumeClaim": {"claimName": volume.claim_name, "readOnly": True}}


def _problems(before: Object, after: Object) -> Iterator[str]:
    if others := sorted({*after} - {"metadata", "spec"}):
        yield f"{others[0]}: is no part of a pod template; it has metadata and spec"
        return
    yield from _metadata_problems(before["metadata"], after.get("metadata") or {})
    spec = after.get("spec") or {}
    for field in _KEPT_OF_POD:
        if spec.get(field) != before["spec"].get(field):
            yield f"spec.{field}: is the operator's"
    for field in _PRIVATE:
        if spec.get(field):
            yield f"spec.{field}: Pod Security level Restricted forbids it"
    yield from _security_problems("spec", before["spec"]["securityContext"], spec.get("securityContext") or {})
    for kind in ("initContainers", "containers"):
        yield from _container_problems(f"spec.{kind}", before["spec"].get(kind) or [], spec.get(kind) or [])
    yield from _volume_problems(before["spec"]["volumes"], spec.get("volumes") or [])


def _metadata_problems(before: Object, after: Object) -> Iterator[str]:
    for field in ("labels", "annotations"):
        ours, theirs = before.get(field) or {}, after.get(field) or {}
        for key in sorted({*ours, *theirs}):
            if key.startswith(OWN_PREFIXES) and ours.get(key) != theirs.get(key):
                yield f"metadata.{field}.{key}: is the operator's"
    yield from (f"metadata.{problem}" for problem in unconfined(after.get("annotations") or {}))


def unconfined(annotations: Mapping[str, str]) -> Iterator[str]:
    """Yield `annotations.KEY: message` of each that takes a profile of Restricted away from a container."""
    for key, value in annotations.items():
        if key.startswith(_PROFILE_ANNOTATIONS) and not value.startswith(("runtime/default", "localhost/")):
            yield f"annotations.{key}: Pod Security level Restricted forbids {value!r}"


def _security_problems(path: str, before: Object, after: Object) -> Iterator[str]:
    """Yield fields of a securityContext that leave the Restricted profile."""
    for field, value in before.items():
        if field not in ("runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy") and after.get(field) != value:
            yield f"{path}.securityContext.{field}: must stay {value!r}, as Pod Security level Restricted has it"
    if after.get("runAsUser") == 0:
        yield f"{path}.securityContext.runAsUser: must not be 0"
    if (after.get("capabilities") or {}).get("add"):
        yield f"{path}.securityContext: Pod Security level Restricted forbids privileges"
    if after.get("sysctls"):
        yield f"{path}.securityContext.sysctls: are parameters of the kernel, which a pod leaves alone"
    for field, allowed in _SECURITY.items():
        section, _, leaf = field.partition(".")
        found = (after.get(section) or {}).get(leaf) if leaf else after.get(section)
        if found not in (None, "", *allowed):
            yield f"{path}.securityContext.{field}: Pod Security level Restricted forbids {found!r}"


def _container_problems(path: str, before: Sequence[Object], after: Sequence[Object]) -> Iterator[str]:
    found = {item.get("name"): item for item in after}
    ours = {item["name"]: item for item in before}
    for name, item in ours.items():
        for field in _KEPT_OF_CONTAINER:
            if name not in found or found[name].get(field) != item.get(field):
                yield f"{path}[{name}].{field}: is the operator's"
                break
        else:
            yield from _lost_parts(f"{path}[{name}]", item, found[name])
    own = next(iter(ours.values()), {}).get("securityContext") or _RESTRICTED
    for name, item in found.items():
        yield from _security_problems(f"{path}[{name}]", own, item.get("securityContext") or {})
        if any(port.get("hostPort") for port in item.get("ports") or ()):
            yield f"{path}[{name}].ports: Pod Security level Restricted forbids ports of the node"


def _lost_parts(path: str, ours: Object, theirs: Object) -> Iterator[str]:
    """Yield mounts and variables of ours that a container no longer has as they were."""
    for field, key in (("volumeMounts", "mountPath"), ("env", "name")):
        found = {item.get(key): item for item in theirs.get(field) or ()}
        for item in ours.get(field) or ():
            is_ours = field == "volumeMounts" or is_our_variable(item["name"])
            if is_ours and found.get(item[key]) != item:
                yield f"{path}.{field}[{item[key]}]: is the operator's"


_RESTRICTED: Final[Object] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _volume_problems(before: Sequence[Object], after: Sequence[Object]) -> Iterator[str]:
    kept = {item["name"]: item for item in before}
    for item in after:
        name = item.get("name")
        for source in sorted({*item} - {"name"}):
            if name not in kept and source not in _VOLUME_SOURCES:
                yield f"spec.volumes[{name}].{source}: Pod Security level Restricted forbids it"
    theirs = {item.get("name"): item for item in after}
    for name, item in kept.items():
        if theirs.get(name) != item:
            yield f"spec.volumes[{name}]: is the operator's"

"""Judges a spec by the policy of whoever runs the operator.

Who may write a HeteroInference decides what its pods mount, run and are preferred to, without a right of their own to
make pods or read Secrets. So each kind of name has a list of what is allowed. Folders of nodes are refused unless they
are listed; other names are allowed unless a list says otherwise. The chart's ValidatingAdmissionPolicy tells API
servers that have such the same, so that they refuse at once what the operator refuses later.

Where files of several namespaces lie in one folder of a node, only their owner keeps them apart: each namespace may
have a uid of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

from hetero_api.spec import GatewaySpec, HeteroInferenceSpec
from hetero_api.spec_pools import PoolSpec
from hetero_operator.reconcile.manifests.model_volumes import IMAGE, NODE, model_uris
from hetero_operator.reconcile.manifests.optional_kinds import rank_scheduler
from hetero_operator.reconcile.model import Policy, RenderOptions

_FOLDERS: Final = "allowed_host_paths"
CHART_VALUES: Final = {
    _FOLDERS: "policy.hostPaths",
    "allowed_images": "policy.images",
    "allowed_secrets": "policy.secrets",
    "allowed_priority_classes": "policy.priorityClasses",
    "allowed_schedulers": "policy.schedulers",
    "allowed_runtime_classes": "policy.runtimeClasses",
}
"""The chart's value of each setting that lists allowed names."""


_PATCHED_NAMES: Final = {
    "image": "allowed_images",
    "reference": "allowed_images",
    "secretName": "allowed_secrets",
    "priorityClassName": "allowed_priority_classes",
    "schedulerName": "allowed_schedulers",
    "runtimeClassName": "allowed_runtime_classes",
}
"""Fields of a pod that hold such a name, and the setting of each."""
_REFERENCES: Final = ("secretKeyRef", "secretRef", "secret", "nodePublishSecretRef")
"""Fields of a pod that name a Secret by `name`."""

_USERS: Final = "namespace_users"
_OWNERS: Final = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups")
"""Fields of a pod that say whose files it reaches; null leaves that to the image."""


class Use(NamedTuple):
    """A name that a spec uses, and the setting that has to allow it."""

    setting: str
    path: str
    """Field, as in YAML."""
    name: str | None
    """None: the field is left out."""


def violations(spec: HeteroInferenceSpec, policy: Policy) -> Iterator[str]:
    """Yield `path: message` of each field whose name the policy does not allow; it names the setting, too."""
    for setting, path, name in uses(spec):
        if setting == _USERS:
            if policy.namespace_users is not None:
                yield (
                    f"{path}: is not allowed here; whoever runs the operator gives each namespace a user of its own by "
                    f"the setting {_USERS} (chart value namespaceUsers)"
                )
            continue
        allowed: tuple[str, ...] = getattr(policy, setting)
        allows = _holds_folder if setting == _FOLDERS else fnmatchcase
        if name and not any(allows(name, entry) for entry in allowed):
            yield (
                f"{path}: {name!r} is not allowed here; whoever runs the operator allows names by its setting "
                f"{setting} (chart value {CHART_VALUES[setting]}), which is {', '.join(allowed) or 'empty'}"
            )


def uses(spec: HeteroInferenceSpec) -> Iterator[Use]:
    """Yield every name in a spec that a policy may forbid."""
    yield from _folders(spec)
    yield from _images(spec)
    yield from _secrets(spec)
    yield from _additions(spec)
    scheduling = spec.scheduling
    yield Use("allowed_priority_classes", "spec.scheduling.priorityClassName", scheduling.priority_class_name)
    field = "schedulerName" if scheduling.scheduler_name else "gang.scheduler"
    yield Use("allowed_schedulers", f"spec.scheduling.{field}", rank_scheduler(spec))
    for index, pool in enumerate(spec.pools):
        name = pool.gpu_or_default.runtime_class_name
        yield Use("allowed_runtime_classes", f"spec.pools[{index}].gpu.runtimeClassName", name)


def _additions(spec: HeteroInferenceSpec) -> Iterator[Use]:
    """Yield the names in what users add to pods, those in patches included."""
    parts: list[tuple[str, PoolSpec | GatewaySpec]] = [("spec.gateway", spec.gateway)]
    parts += [(f"spec.pools[{index}]", pool) for index, pool in enumerate(spec.pools)]
    for path, part in parts:
        for index, volume in enumerate(part.volumes or ()):
            yield Use("allowed_secrets", f"{path}.volumes[{index}].secretName", volume.secret_name)
        yield from _names_in(part.pod_template, f"{path}.podTemplate")


def _names_in(patch: Any, path: str) -> Iterator[Use]:
    """Yield the names in a patch of pods, wherever they stand in it."""
    items = enumerate(patch) if isinstance(patch, list) else patch.items() if isinstance(patch, Mapping) else ()
    for key, value in items:
        at = f"{path}[{key}]" if isinstance(patch, list) else f"{path}.{key}"
        if key in _OWNERS:
            yield Use(_USERS, at, str(value))
        elif isinstance(value, str) and key in _PATCHED_NAMES:
            yield Use(_PATCHED_NAMES[key], at, value)
        elif key == "hostPath" and isinstance(value, Mapping) and "path" in value:
            yield Use(_FOLDERS, f"{at}.path", str(value["path"]))
        elif key in _REFERENCES and isinstance(value, Mapping) and "name" in value:
            yield Use("allowed_secrets", f"{at}.name", str(value["name"]))
        elif key == "imagePullSecrets" and isinstance(value, list):
            names = enumerate(item.get("name") for item in value if isinstance(item, Mapping))
            yield from (Use("allowed_secrets", f"{at}[{index}].name", str(name)) for index, name in names)
        else:
            yield from _names_in(value, at)


def _folders(spec: HeteroInferenceSpec) -> Iterator[Use]:
    for path, uri in model_uris(spec).items():
        yield Use(_FOLDERS, path, uri.path if uri.scheme == NODE else None)
    yield Use(_FOLDERS, "spec.model.cache.hostPath", spec.model.cache.host_path)
    yield Use(_FOLDERS, "spec.exchange.hostPath", spec.exchange.host_path)


def _images(spec: HeteroInferenceSpec) -> Iterator[Use]:
    images, setting = spec.images, "allowed_images"
    for path, uri in model_uris(spec).items():
        yield Use(setting, path, uri.source if uri.scheme == IMAGE else None)
    yield Use(setting, "spec.images.gpuWorker", images.gpu_worker)
    yield Use(setting, "spec.images.cpuWorker", images.cpu_worker)
    yield Use(setting, "spec.images.gateway", images.gateway)
    yield Use(setting, "spec.images.router", images.router)


def _secrets(spec: HeteroInferenceSpec) -> Iterator[Use]:
    tls, setting = spec.gateway.tls, "allowed_secrets"
    if tls is not None:
        yield Use(setting, "spec.gateway.tls.secretName", tls.secret_name)
        yield Use(setting, "spec.gateway.tls.clientCASecretName", tls.client_ca_secret_name)
    yield Use(setting, "spec.router.tlsSecretName", spec.router.tls_secret_name)
    for field, reference in (
        ("model.tokenSecretRef", spec.model.token_secret_ref),
        ("gateway.auth.keysSecretRef", spec.gateway.keys_secret),
        ("monitoring.keySecretRef", spec.monitoring.key_secret_ref),
        ("router.keysSecretRef", spec.router.keys_secret_ref),
    ):
        if reference is not None:
            yield Use(setting, f"spec.{field}.name", reference.name)
    for index, name in enumerate(spec.images.pull_secrets):
        yield Use(setting, f"spec.images.pullSecrets[{index}]", name)


def _holds_folder(path: str, folder: str) -> bool:
    """Return whether a path is a folder or below it; one with `..` is below none."""
    found = PurePosixPath(path)
    return ".." not in found.parts and found.is_relative_to(folder)


def options_in(namespace: str, options: RenderOptions, policy: Policy) -> RenderOptions:
    """Return the options for a namespace's pods, with its own uid where the policy gives each one.

    The uid is a hash of the namespace's name: nothing has to be remembered. Two of n namespaces have the same with a
    chance of about n² in twice the size of the range.
    """
    if policy.namespace_users is None:
        return options
    first, last = policy.namespace_users
    number = int.from_bytes(hashlib.sha256(namespace.encode()).digest()[:8])
    return replace(options, run_as_user=first + number % (last - first + 1))

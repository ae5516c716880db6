"""Differences between wanted and live objects: why a second reconcile writes nothing.

An object is applied when it does not exist, when it differs from our last write (a hash in an annotation shows that),
or when somebody changed a field that we want. Further fields of the live object are not ours: defaults of the API
server, and fields of others. Only in selectors and NetworkPolicies may nobody add any, for these would select other
pods, or open a door. Nothing is compared as text, so a server that orders a list-map differently causes no
write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hetero_api.contract import ANNOTATION_APPLIED
from hetero_operator.reconcile.model import Object
from hetero_operator.reconcile.revision import digest

_HASH_LENGTH: Final = 16

MERGE_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "claims": ("name", "request"),
    "ownerReferences": ("uid",),
}
"""Lists whose items the API server tells apart by keys and lets several writers share. Others belong to one writer."""

_PORT_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "Service": ("port", "protocol"),
    "StatefulSet": ("containerPort", "protocol"),
    "Deployment": ("containerPort", "protocol"),
}
"""Keys of `ports` by kind; a NetworkPolicy's are compared as a whole, for one more would open a door."""


def stamped(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with the hash of itself in ANNOTATION_APPLIED."""
    metadata = dict(item["metadata"])
    annotations = dict(metadata.get("annotations") or {})
    metadata["annotations"] = {**annotations, ANNOTATION_APPLIED: digest(item, _HASH_LENGTH)}
    return {**item, "metadata": metadata}


def needs_apply(wanted: Object, live: Object | None) -> bool:
    """Return whether a stamped object has to be applied, given the live one; None: there is none of that name."""
    return live is None or not _holds(live, wanted, field="", kind=wanted["kind"])


def _holds(live: Any, wanted: Any, *, field: str, kind: str, exact: bool = False) -> bool:
    """Return whether `live` has all of `wanted`, and (`exact`) no field more."""
    exact = exact or field == "selector" or (kind, field) == ("NetworkPolicy", "spec")
    if isinstance(wanted, Mapping):
        return (
            isinstance(live, Mapping)
            and not (exact and live.keys() - wanted.keys())
            and all(_holds(live.get(key), value, field=key, kind=kind, exact=exact) for key, value in wanted.items())
        )
    if isinstance(wanted, list | tuple):
        return _holds_list(live or (), wanted, field=field, kind=kind, exact=exact)
    return type(live) is type(wanted) and bool(live == wanted)


def _holds_list(live: Any, wanted: Sequence[Any], *, field: str, kind: str, exact: bool) -> bool:
    keys = _PORT_KEYS.get(kind) if field == "ports" else MERGE_KEYS.get(field)
    if keys is None:
        return len(live) == len(wanted) and all(
            _holds(a, b, field=field, kind=kind, exact=exact) for a, b in zip(live, wanted, strict=True)
        )
    by_key = {tuple(item.get(key) for key in keys): item for item in live}
    return all(_holds(by_key.get(tuple(item.get(k) for k in keys)), item, field=field, kind=kind) for item in wanted)

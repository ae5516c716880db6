"""Observed objects, ordered by what they are: the resource's own, and those of others in their place.

Old ConfigMaps and workloads are the operator's memory: which spec is in force, and from which templates the pods of a
revision were created. Nothing else is remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from hetero_api.contract import API_VERSION, GROUP, KIND, LABEL_GATEWAY_REVISION, LABEL_REPLICA, LABEL_REVISION
from hetero_operator.reconcile.model import Object, ObjectRef, Observed
from hetero_operator.reconcile.names import Names

CONFIG_MAP: Final = "ConfigMap"
SECRET: Final = "Secret"
CLAIM_TEMPLATE: Final = "ResourceClaimTemplate"
STATEFUL_SET: Final = "StatefulSet"
DEPLOYMENT: Final = "Deployment"


class ObjectKey(NamedTuple):
    """Identity of an object, whichever version of its API shows it: policy/v1 and v1beta1 show the same one."""

    group: str
    kind: str
    name: str

    @classmethod
    def from_object(cls, item: Object) -> ObjectKey:
        """Return the key of an object."""
        group, slash, _ = item["apiVersion"].partition("/")
        return cls(group if slash else "", item["kind"], item["metadata"]["name"])


def owner_reference(name: str, uid: str) -> dict[str, Any]:
    """Return the owner reference of all that a resource owns.

    `blockOwnerDeletion` is false: true would need the right to write the resource's finalizers, for nothing.
    """
    return {
        "apiVersion": f"{GROUP}/{API_VERSION}",
        "kind": KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def is_owned_by(item: Object, uid: str) -> bool:
    """Return whether the resource of that uid controls an object. An earlier one of the same name had another uid."""
    references = item["metadata"].get("ownerReferences") or ()
    return any(reference["uid"] == uid and reference.get("controller") for reference in references)


def label_of(item: Object, label: str) -> str:
    """Return the value of an object's label, "" when it has none."""
    return str((item["metadata"].get("labels") or {}).get(label, ""))


def ordinal_of(item: Object) -> int:
    """Return the ordinal of the replica that an object is of."""
    text = label_of(item, LABEL_REPLICA)
    return int(text) if text.isdecimal() else 0


def template_label_of(item: Object, label: str) -> str:
    """Return the value of a label of the pods that a StatefulSet or Deployment creates, "" when they get none."""
    metadata = item["spec"]["template"].get("metadata") or {}
    return str((metadata.get("labels") or {}).get(label, ""))


def taken_by_others(item: ObjectKey | ObjectRef) -> str:
    """Return the message about an object whose name a resource needs and cannot have."""
    return f"{item.kind} {item.name} exists and does not belong to this resource"


def is_leaving(item: Object) -> bool:
    """Return whether an object is deleted already and only waits to be gone."""
    return bool(item["metadata"].get("deletionTimestamp"))


@dataclass(frozen=True, slots=True)
class Inventory:
    """Observed objects but pods, by key."""

    own: Mapping[ObjectKey, Object]
    """Objects that the resource controls."""
    foreign: Mapping[ObjectKey, Object]
    """Objects with its label that nobody, somebody else, or an earlier resource of its name controls."""

    @classmethod
    def from_observed(cls, observed: Observed) -> Inventory:
        """Sort observed objects by whether the resource controls them."""
        uid = observed.resource["metadata"]["uid"]
        by_key = {ObjectKey.from_object(item): item for item in observed.owned}
        return cls(
            own={key: item for key, item in by_key.items() if is_owned_by(item, uid)},
            foreign={key: item for key, item in by_key.items() if not is_owned_by(item, uid)},
        )

    def of_kind(self, kind: str) -> Iterator[Object]:
        """Return the resource's own objects of a kind, by name."""
        return (item for key, item in sorted(self.own.items()) if key.kind == kind)

    def named(self, kind: str, name: str, *, group: str = "") -> Object | None:
        """Return one of the resource's own objects, None if there is none of that name."""
        return self.own.get(ObjectKey(group, kind, name))

    def workloads(self) -> Iterator[Object]:
        """Yield the resource's StatefulSets and its Deployment."""
        yield from self.of_kind(STATEFUL_SET)
        yield from self.of_kind(DEPLOYMENT)

    def configs_newest_first(self) -> list[Object]:
        """Return the resource's ConfigMaps, the youngest first; equal ages by name, so that the order is stable."""
        configs = list(self.of_kind(CONFIG_MAP))
        return sorted(configs, key=lambda item: str(item["metadata"].get("creationTimestamp", "")), reverse=True)

    def config_in_force(self, names: Names) -> Object | None:
        """Return the ConfigMap that the gateway was started from, else the youngest, None: nothing ran yet."""
        gateway = self.named(DEPLOYMENT, names.gateway, group="apps")
        if gateway is not None:
            revision = template_label_of(gateway, LABEL_GATEWAY_REVISION)
            config = self.named(CONFIG_MAP, names.config(revision))
            if config is not None:
                return config
        return next(iter(self.configs_newest_first()), None)

    def config_of_ranks(self, revision: str) -> Object | None:
        """Return the youngest ConfigMap of any gateway revision that has the templates of these ranks."""
        return next((item for item in self.configs_newest_first() if label_of(item, LABEL_REVISION) == revision), None)

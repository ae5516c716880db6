"""Whose an object is: what we made, and what we must keep our hands off."""

from __future__ import annotations

from typing import Any, NamedTuple

from hetero_api.contract import API_VERSION, GROUP, KIND
from hetero_operator.reconcile.model import Object, ObjectRef


class ObjectKey(NamedTuple):
    """What an object is, whichever version of its API it is shown in: policy/v1 and v1beta1 show one and the same."""

    group: str
    kind: str
    name: str

    @classmethod
    def of(cls, item: Object) -> ObjectKey:
        group, slash, _ = item["apiVersion"].partition("/")
        return cls(group if slash else "", item["kind"], item["metadata"]["name"])


def owner_reference(name: str, uid: str) -> dict[str, Any]:
    """The owner reference of all that a resource owns.

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
    """Whether the resource of that uid controls an object. An earlier resource of the same name had another uid."""
    references = item["metadata"].get("ownerReferences") or ()
    return any(reference["uid"] == uid and reference.get("controller") for reference in references)


def label_of(item: Object, label: str) -> str:
    """Value of an object's label; "" when it has none."""
    return str((item["metadata"].get("labels") or {}).get(label, ""))


def template_label_of(item: Object, label: str) -> str:
    """Value of a label of the pods that a StatefulSet or Deployment makes; "" when they get none."""
    metadata = item["spec"]["template"].get("metadata") or {}
    return str((metadata.get("labels") or {}).get(label, ""))


def taken_by_others(item: ObjectKey | ObjectRef) -> str:
    """What to say of an object whose name a resource needs and cannot have."""
    return f"{item.kind} {item.name} exists and does not belong to this resource"


def is_leaving(item: Object) -> bool:
    """Whether an object is deleted already and only waits to be gone."""
    return bool(item["metadata"].get("deletionTimestamp"))

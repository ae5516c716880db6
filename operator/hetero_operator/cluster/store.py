"""The last seen state of the objects of one kind: compact JSON bytes, found by namespace and owner.

A decoded object takes ten times the memory of its text, and most are not looked at for hours: 1,000 resources with a
dozen objects each take 40 MB here. An object is decoded when its resource is reconciled, which costs 30 µs.

Anybody may put our label on an object. Of an object that none of our resources controls, only metadata are kept (of a
pod, its node and status too), and a namespace has a budget for the rest: past it, bodies are left out, and are read
for each look at their resource.

Three sources write here: lists and watches, which lag behind, and answers to our own writes, which do not. So versions
are compared: an older version changes nothing, and an object that we deleted does not come back with an old event. The
versions of one server are numbers that grow (KEP-5504 makes that official); any other version counts as newer.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from sys import intern
from typing import Any, Final, NamedTuple

from hetero_api.contract import GROUP, KIND, LABEL_NAME
from hetero_operator.cluster.kinds import POD, ResourceKind
from hetero_operator.cluster.transport import Object

MAX_TOMBSTONES: Final = 10_000
MAX_FAILED_PODS: Final = 1_000
NAMESPACE_BYTES: Final = 64 * 2**20
"""Bytes of objects to keep of one namespace: 1,000 resources, each with all it owns, take 40 MiB."""
_KEPT_METADATA: Final = (
    "namespace", "name", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp",
    "ownerReferences",
)  # fmt: skip


class Key(NamedTuple):
    """A HeteroInference: the unit that is queued and reconciled."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One object."""

    text: bytes
    uid: str
    version: str
    owner: str
    """Name of the resource in its label."""
    left_out: int = 0
    """Bytes of the body of one of our objects, which is not kept because its namespace is over its budget."""

    def decode(self) -> Object:
        """Return the object as decoded JSON."""
        found: Object = json.loads(self.text)
        return found


class NamespaceBudget:
    """Bytes that several stores keep together of each namespace."""

    def __init__(self, limit: int = NAMESPACE_BYTES) -> None:
        self.limit = limit
        self._used: defaultdict[str, int] = defaultdict(int)

    def has_room(self, namespace: str, size: int) -> bool:
        """Return whether so many bytes more fit."""
        return self._used.get(namespace, 0) + size <= self.limit

    def add(self, namespace: str, size: int) -> None:
        """Count bytes that are kept, or (negative) no longer kept."""
        self._used[namespace] += size
        if not self._used[namespace]:
            del self._used[namespace]


class ObjectStore:
    """Objects of one kind. `kind` and apiVersion are added, which lists leave out; managedFields are dropped."""

    def __init__(
        self,
        kind: ResourceKind,
        *,
        owner_label: str | None = LABEL_NAME,
        budget: NamespaceBudget | None = None,
        secret_fields: Collection[str] = (),
    ) -> None:
        """`owner_label` None: objects own themselves, as HeteroInference resources do. `secret_fields` are not kept."""
        self.kind = kind
        self._owner_label = owner_label
        self._budget = budget or NamespaceBudget()
        self._dropped = {*secret_fields, "apiVersion", "kind", "metadata"}
        self._entries: dict[Key, Entry] = {}
        self._by_owner: defaultdict[Key, set[str]] = defaultdict(set)
        self._dead: OrderedDict[str, str] = OrderedDict()
        self._failed_pods: OrderedDict[Key, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, namespace: str, name: str) -> Object | None:
        """Return an object, None if it is not known."""
        entry = self._entries.get(Key(namespace, name))
        return None if entry is None else entry.decode()

    def entry(self, namespace: str, name: str) -> Entry | None:
        """Return an object as it is kept, None if it is not known."""
        return self._entries.get(Key(namespace, name))

    def keys(self) -> Iterator[Key]:
        """Iterate over the namespaces and names of all objects."""
        return iter(self._entries)

    def owned_by(self, owner: Key) -> list[Object]:
        """Return the objects with the owner's label, by name."""
        return [self._entries[key].decode() for key in self._names(owner)]

    def failed_pods(self, owner: Key) -> list[Object]:
        """Return the owner's pods that had failed when they were deleted, the last of each name."""
        found = self._failed_pods.items()
        return [pod.decode() for key, pod in found if owner == Key(key.namespace, pod.owner)]

    def incomplete(self, owner: Key) -> dict[str, int]:
        """Return the names of the owner's objects whose bodies were left out, and how many bytes that were."""
        entries = {key.name: self._entries[key] for key in self._names(owner)}
        return {name: entry.left_out for name, entry in entries.items() if entry.left_out}

    def shown(self, item: Mapping[str, Any]) -> Object:
        """Return an object that the server sent in the form that this store returns objects in."""
        found: Object = json.loads(self._text(item, whole=True))
        return found

    def put(self, item: Mapping[str, Any]) -> Key | None:
        """Take in an object from a watch, a get or a write. Return its owner, None if it is nothing new."""
        key, entry = self._encode(item)
        known = self._entries.get(key)
        if self._is_dead(entry) or (known is not None and not self._is_news(entry, known)):
            return None
        self._set(key, entry)
        return Key(key.namespace, entry.owner)

    def drop(self, item: Mapping[str, Any]) -> Key | None:
        """Remove an object that a watch reports deleted, and ignore older news of it, as a late answer to our deletion.

        Return its owner, None if it was not known.
        """
        key, uid = key_of(item), item["metadata"]["uid"]
        # A label that was taken away is reported like a deletion, and may come back later.
        self._mark_dead(uid, until=item["metadata"]["resourceVersion"])
        known = self._entries.get(key)
        if known is None or known.uid != uid:
            return None
        self._remove(key)
        self._remember_failure(key, item, known.owner)
        return Key(key.namespace, known.owner)

    def _remember_failure(self, key: Key, item: Mapping[str, Any], owner: str) -> None:
        """Keep a failed pod: its StatefulSet replaces it at once, often before anybody could look at it."""
        if self.kind != POD or (item.get("status") or {}).get("phase") != "Failed":
            return
        metadata = item["metadata"]
        text = self._text(item, whole=False)
        self._failed_pods[key] = Entry(text, metadata["uid"], metadata["resourceVersion"], owner)
        while len(self._failed_pods) > MAX_FAILED_PODS:
            self._failed_pods.popitem(last=False)

    def bury(self, namespace: str, name: str, uid: str) -> None:
        """Remove an object that we deleted, and ignore older news of it."""
        known = self._entries.get(Key(namespace, name))
        self._mark_dead(uid)
        if known is not None and known.uid == uid:
            self._remove(Key(namespace, name))

    def _mark_dead(self, uid: str, *, until: str = "") -> None:
        """Ignore news of an object up to a version; "": of every version."""
        self._dead[uid] = until
        while len(self._dead) > MAX_TOMBSTONES:
            self._dead.popitem(last=False)

    def _is_dead(self, entry: Entry) -> bool:
        until = self._dead.get(entry.uid)
        return until is not None and (not until or not _exceeds(entry.version, until))

    def discard(self, namespace: str, name: str) -> None:
        """Remove an object of that name, if there is one."""
        if Key(namespace, name) in self._entries:
            self._remove(Key(namespace, name))

    def retain(self, listed: Collection[Key], version: str, *, namespace: str | None = None) -> set[Key]:
        """Remove what a whole list of that version lacks, of one namespace or of all. Return the owners.

        Such objects were deleted while nobody watched, unless we wrote them after the list was made.
        """
        gone = [
            key
            for key, entry in self._entries.items()
            if key not in listed and namespace in (None, key.namespace) and not _exceeds(entry.version, version)
        ]
        return self._remove_all(gone)

    def clear(self, *, namespace: str | None = None) -> set[Key]:
        """Remove all objects of one namespace or of all, because their kind is gone. Return the owners."""
        return self._remove_all([key for key in self._entries if namespace in (None, key.namespace)])

    def _names(self, owner: Key) -> list[Key]:
        return [Key(owner.namespace, name) for name in sorted(self._by_owner.get(owner, ()))]

    def _is_news(self, entry: Entry, known: Entry) -> bool:
        is_completed = entry.version == known.version and known.left_out > entry.left_out
        return is_completed or _exceeds(entry.version, known.version)

    def _encode(self, item: Mapping[str, Any]) -> tuple[Key, Entry]:
        """Return an object as it is kept."""
        key, metadata = key_of(item), item["metadata"]
        labels = metadata.get("labels") or {}
        owner = intern(metadata["name"] if self._owner_label is None else labels[self._owner_label])
        is_ours = self._owner_label is None or _is_controlled_by_us(item)
        text = self._text(item, whole=is_ours)
        known = self._entries.get(key)
        left_out = 0
        if is_ours and not self._budget.has_room(key.namespace, len(text) - (len(known.text) if known else 0)):
            left_out, text = len(text), self._text(item, whole=False)
        return key, Entry(text, metadata["uid"], metadata["resourceVersion"], owner, left_out)

    def _text(self, item: Mapping[str, Any], *, whole: bool) -> bytes:
        metadata = item["metadata"]
        if whole:
            kept = {name: value for name, value in metadata.items() if name != "managedFields"}
            if self._owner_label is None and "annotations" in kept:
                kept["annotations"] = _only_ours(kept["annotations"])
            body = {name: value for name, value in item.items() if name not in self._dropped}
        else:
            kept = {name: metadata[name] for name in _KEPT_METADATA if name in metadata}
            kept["labels"] = _only_ours(metadata.get("labels") or {})
            body = _pod_body(item) if self.kind == POD else {}
        found = {"apiVersion": self.kind.api_version, "kind": self.kind.kind, "metadata": kept, **body}
        return json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()

    def _set(self, key: Key, entry: Entry) -> None:
        known = self._entries.get(key)
        if known is not None and known.owner != entry.owner:
            self._disown(key, known.owner)
        self._budget.add(key.namespace, len(entry.text) - (len(known.text) if known else 0))
        self._entries[key] = entry
        self._by_owner[Key(key.namespace, entry.owner)].add(key.name)

    def _remove_all(self, keys: Iterable[Key]) -> set[Key]:
        owners = set()
        for key in keys:
            owners.add(Key(key.namespace, self._entries[key].owner))
            self._remove(key)
        return owners

    def _remove(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self._failed_pods.pop(key, None)
        self._budget.add(key.namespace, -len(entry.text))
        self._disown(key, entry.owner)

    def _disown(self, key: Key, owner: str) -> None:
        names = self._by_owner[Key(key.namespace, owner)]
        names.discard(key.name)
        if not names:
            del self._by_owner[Key(key.namespace, owner)]


def _only_ours(named: Mapping[str, str]) -> dict[str, str]:
    """Return the labels or annotations that begin with our API group."""
    return {name: value for name, value in named.items() if name.startswith(f"{GROUP}/")}


def _pod_body(pod: Mapping[str, Any]) -> Object:
    """Return the parts of a pod that decide anything here: where it runs, and what its kubelet reports."""
    node = (pod.get("spec") or {}).get("nodeName")
    return {"spec": {"nodeName": node} if node else {}, "status": pod.get("status") or {}}


def _is_controlled_by_us(item: Mapping[str, Any]) -> bool:
    """Return whether a HeteroInference controls an object."""
    references = item["metadata"].get("ownerReferences") or ()
    return any(reference.get("controller") and reference.get("kind") == KIND for reference in references)


def key_of(item: Mapping[str, Any]) -> Key:
    """Return the namespace and name of an object."""
    metadata = item["metadata"]
    return Key(intern(metadata["namespace"]), metadata["name"])


def _exceeds(version: str, other: str) -> bool:
    """Return whether a resource version is later; where they are no numbers, whether it is another."""
    try:
        return int(version) > int(other)
    except ValueError:
        return version != other

"""What was last seen of the objects of one kind: compact JSON bytes, found by namespace and owner.

A decoded object takes ten times the memory of its text, and most are not looked at for hours: 1,000 resources with a
dozen objects each take 40 MB here. An object is decoded when its resource is reconciled, which costs 30 µs.

Three things write here: lists and watches, which lag behind, and answers to our own writes, which do not. So versions
are compared: what is older than what is known changes nothing, and what was deleted by us does not rise again from an
old event. The versions of one server are numbers that grow (KEP-5504 makes that official); one that is none is taken
as new.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from sys import intern
from typing import Any, Final, NamedTuple

from hetero_api.contract import LABEL_NAME
from hetero_operator.cluster.kinds import ResourceKind

MAX_TOMBSTONES: Final = 10_000

Object = dict[str, Any]


class Key(NamedTuple):
    """A HeteroInference: what is queued and reconciled."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One object."""

    text: bytes
    uid: str
    version: str
    owner: str
    """Name of the resource that its label tells."""

    def decode(self) -> Object:
        found: Object = json.loads(self.text)
        return found


class ObjectStore:
    """Objects of one kind. `kind` and apiVersion are added, which lists leave out; managedFields are dropped."""

    def __init__(self, kind: ResourceKind, *, owner_label: str | None = LABEL_NAME) -> None:
        """`owner_label` None: objects own themselves, as HeteroInference resources do."""
        self.kind = kind
        self._owner_label = owner_label
        self._entries: dict[Key, Entry] = {}
        self._by_owner: defaultdict[Key, set[str]] = defaultdict(set)
        self._dead: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, namespace: str, name: str) -> Object | None:
        entry = self._entries.get(Key(namespace, name))
        return None if entry is None else entry.decode()

    def entry(self, namespace: str, name: str) -> Entry | None:
        return self._entries.get(Key(namespace, name))

    def keys(self) -> Iterator[Key]:
        return iter(self._entries)

    def owned_by(self, owner: Key) -> list[Object]:
        """Objects with the owner's label, by name."""
        names = sorted(self._by_owner.get(owner, ()))
        return [self._entries[Key(owner.namespace, name)].decode() for name in names]

    def put(self, item: Mapping[str, Any]) -> Key | None:
        """Take in what a watch, a get or a write told; the owner of what changed, None if that was nothing new."""
        return self._take(*self.encode(item))

    def drop(self, item: Mapping[str, Any]) -> Key | None:
        """It is deleted, says a watch; the owner, None if that was known."""
        key, uid = _key_of(item), item["metadata"]["uid"]
        known = self._entries.get(key)
        if known is None or known.uid != uid:
            return None
        self._remove(key)
        return Key(key.namespace, known.owner)

    def bury(self, namespace: str, name: str, uid: str) -> None:
        """It is deleted, says the answer to our own call: older news of it must not bring it back."""
        known = self._entries.get(Key(namespace, name))
        self._dead[uid] = None
        while len(self._dead) > MAX_TOMBSTONES:
            self._dead.popitem(last=False)
        if known is not None and known.uid == uid:
            self._remove(Key(namespace, name))

    def forget(self, namespace: str, name: str) -> None:
        """It is not there, whatever it was."""
        if Key(namespace, name) in self._entries:
            self._remove(Key(namespace, name))

    def replace(self, listed: Iterable[tuple[Key, Entry]], version: str, *, namespace: str | None = None) -> set[Key]:
        """Take in a whole list of that version, of one namespace or of all; owners of what is changed by it.

        What the list lacks was deleted while nobody watched, unless we wrote it after the list was made.
        """
        found = dict(listed)
        changed = {self._take(key, entry) for key, entry in found.items()}
        for key in [key for key in self._entries if key not in found and namespace in (None, key.namespace)]:
            if not _exceeds(self._entries[key].version, version):
                changed.add(Key(key.namespace, self._entries[key].owner))
                self._remove(key)
        return {owner for owner in changed if owner is not None}

    def clear(self, *, namespace: str | None = None) -> set[Key]:
        """There are none any more, in one namespace or in all: their kind is gone. Owners of those that were there."""
        gone = [key for key in self._entries if namespace in (None, key.namespace)]
        owners = {Key(key.namespace, self._entries[key].owner) for key in gone}
        for key in gone:
            self._remove(key)
        return owners

    def encode(self, item: Mapping[str, Any]) -> tuple[Key, Entry]:
        """As it is kept."""
        metadata = {name: value for name, value in item["metadata"].items() if name != "managedFields"}
        kept = {**item, "apiVersion": self.kind.api_version, "kind": self.kind.kind, "metadata": metadata}
        owner = metadata["name"] if self._owner_label is None else (metadata.get("labels") or {})[self._owner_label]
        text = json.dumps(kept, separators=(",", ":"), ensure_ascii=False).encode()
        return _key_of(item), Entry(text, metadata["uid"], metadata["resourceVersion"], intern(owner))

    def _take(self, key: Key, entry: Entry) -> Key | None:
        known = self._entries.get(key)
        if entry.uid in self._dead or (known is not None and not _exceeds(entry.version, known.version)):
            return None
        self._set(key, entry)
        return Key(key.namespace, entry.owner)

    def _set(self, key: Key, entry: Entry) -> None:
        known = self._entries.get(key)
        if known is not None and known.owner != entry.owner:
            self._disown(key, known.owner)
        self._entries[key] = entry
        self._by_owner[Key(key.namespace, entry.owner)].add(key.name)

    def _remove(self, key: Key) -> None:
        self._disown(key, self._entries.pop(key).owner)

    def _disown(self, key: Key, owner: str) -> None:
        names = self._by_owner[Key(key.namespace, owner)]
        names.discard(key.name)
        if not names:
            del self._by_owner[Key(key.namespace, owner)]


def _key_of(item: Mapping[str, Any]) -> Key:
    metadata = item["metadata"]
    return Key(intern(metadata["namespace"]), metadata["name"])


def _exceeds(version: str, other: str) -> bool:
    """Whether a resource version is later; where they are no numbers, whether it is another."""
    try:
        return int(version) > int(other)
    except ValueError:
        return version != other

"""Which resources an API server has: from a kind to its path.

A kind is named as in a manifest: "Pod", or with its apiVersion before it where it is ambiguous or a certain version is
meant: "apps/v1/StatefulSet", "events.k8s.io/v1/Event". A bare kind means the core API's, else the one of the first
group that has it, in the group's preferred version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.kube.errors import KubeHarnessError, NotFound

Fetch = Callable[[str], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ResourceType:
    """A kind and how its URLs look."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """The path of a collection, an object or its subresource."""
        parts = ["/api" if "/" not in self.api_version else "/apis", self.api_version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part is not None]
        return "/".join(parts)


class Discovery:
    """Asks the server once for each API version, and again when a kind is unknown."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._versions: dict[str, dict[str, ResourceType]] = {}

    def resolve(self, kind: str) -> ResourceType:
        """Raises KubeHarnessError when the server does not know the kind."""
        for _ in range(2):
            found = self._search(kind)
            if found is not None:
                return found
            self._versions.clear()
        raise KubeHarnessError(f"the API server has no kind {kind}")

    def has(self, kind: str) -> bool:
        """Whether the server has the kind now."""
        self._versions.clear()
        return self._search(kind) is not None

    def _search(self, kind: str) -> ResourceType | None:
        api_version, _, bare = kind.rpartition("/")
        for candidate in [api_version] if api_version else self._preferred_versions():
            found = self._resources(candidate).get(bare)
            if found is not None:
                return found
        return None

    def _preferred_versions(self) -> Iterator[str]:
        yield "v1"
        for group in self._fetch("/apis")["groups"]:
            yield group["preferredVersion"]["groupVersion"]

    def _resources(self, api_version: str) -> dict[str, ResourceType]:
        known = self._versions.get(api_version)
        if known is None:
            known = self._versions[api_version] = self._ask(api_version)
        return known

    def _ask(self, api_version: str) -> dict[str, ResourceType]:
        prefix = "/api" if "/" not in api_version else "/apis"
        try:
            listing = self._fetch(f"{prefix}/{api_version}")
        except NotFound:  # no kind of this group and version
            return {}
        return {
            entry["kind"]: ResourceType(api_version, entry["kind"], entry["name"], entry["namespaced"])
            for entry in listing.get("resources", [])
            if "/" not in entry["name"]
        }

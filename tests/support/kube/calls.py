"""What an HTTP request to an API server means: verb, resource, name. As RBAC and the audit log name them, but that
server-side apply is "apply" here and not "patch".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

WRITE_VERBS = frozenset({"create", "update", "patch", "apply", "delete", "deletecollection"})
NAMESPACE_SUBRESOURCES = frozenset({"status", "finalize"})
APPLY_CONTENT = "application/apply-patch"


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names. `resource` is "" for what is no resource, as /version or discovery."""

    group: str = ""
    version: str = ""
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        resource = ".".join(part for part in (self.resource, self.group) if part)
        name = "/".join(part for part in (self.namespace, self.name) if part)
        return " ".join(part for part in (resource, self.subresource, name) if part)


@dataclass(slots=True, eq=False)
class ProxiedCall:
    """One call that came to the proxy; `code` and `ended` are filled in as it goes on."""

    number: int
    verb: str
    path: str
    target: Target
    agent: str
    started: float = field(default_factory=time.monotonic)
    """On the monotonic clock, in seconds."""
    ended: float | None = None
    code: int | None = None
    """What the caller was answered; None when it was cut off, or is still waiting."""
    upstream_code: int | None = None
    """What the API server answered; None when it was not asked."""

    @property
    def is_write(self) -> bool:
        return self.verb in WRITE_VERBS and bool(self.target.resource)

    def __str__(self) -> str:
        return f"#{self.number} {self.verb} {self.target or self.path} -> {self.code}"


CallFilter = Callable[[ProxiedCall], bool]


def writes(call: ProxiedCall) -> bool:
    """Create, update, patch, apply and delete."""
    return call.is_write


def of(verb: str | None = None, resource: str | None = None, **more: str) -> CallFilter:
    """Calls with this verb, resource (plural) and any other field of Target."""

    def matches(call: ProxiedCall) -> bool:
        target = call.target
        named = all(getattr(target, key) == value for key, value in more.items())
        return named and verb in (None, call.verb) and resource in (None, target.resource)

    return matches


def parse_path(path: str) -> Target:
    """The target of a URL's path."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"] and len(parts) >= 3:
        return _target("", parts[1], parts[2:])
    if parts[:1] == ["apis"] and len(parts) >= 4:
        return _target(parts[1], parts[2], parts[3:])
    return Target()


def verb_of(method: str, target: Target, query: Mapping[str, str], content_type: str) -> str:
    """RBAC's verb for a request, or "apply"."""
    if method == "GET":
        if query.get("watch") in ("1", "true"):
            return "watch"
        return "get" if target.name or not target.resource else "list"
    if method == "PATCH":
        return "apply" if content_type.startswith(APPLY_CONTENT) else "patch"
    if method == "DELETE":
        return "delete" if target.name else "deletecollection"
    return {"POST": "create", "PUT": "update"}.get(method, method.lower())


def _target(group: str, version: str, rest: list[str]) -> Target:
    namespace = ""
    inside = len(rest) >= 3 and rest[0] == "namespaces" and not (len(rest) == 3 and rest[2] in NAMESPACE_SUBRESOURCES)
    if inside:
        namespace, rest = rest[1], rest[2:]
    resource, name, subresource = [*rest, "", ""][:3]
    return Target(group, version, resource, subresource, namespace, name)

"""The API server's own record of who asked it what: the judge of "a second reconcile writes nothing".

The server writes an event before it ends its answer, one after another, so what a caller has an answer to is in the
log. Reading still begins with a call of its own whose event must show up, for calls that were cut off.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.kube.client import Client
from tests.support.kube.polling import poll

READ_VERBS = frozenset({"get", "list", "watch"})
SYNC_TIMEOUT_S = 10.0
# A watch is one call: its beginning is logged as ResponseStarted, its end as ResponseComplete.
POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  users: [system:apiserver, system:kube-controller-manager, system:kube-scheduler]
  verbs: [get, list, watch]
- level: None
  nonResourceURLs: [/readyz*, /livez*, /metrics]
- level: Metadata
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the API server answered. `verb` as RBAC names it; server-side apply is "patch"."""

    user: str
    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int
    agent: str
    received: str

    @property
    def is_write(self) -> bool:
        return self.verb not in READ_VERBS and bool(self.resource)

    def __str__(self) -> str:
        target = "/".join(part for part in (self.resource, self.subresource) if part)
        if self.group:
            target = f"{target}.{self.group}"
        return f"{self.user}: {self.verb} {target} {self.namespace}/{self.name} {self.code}"


class AuditLog:
    """Calls in the order in which they ended."""

    def __init__(self, path: Path, connect: Callable[[], Client]) -> None:
        self._path = path
        self._connect = connect

    def mark(self) -> int:
        """Now, to count from: an offset in the log. What was answered before lies before it."""
        name = f"audit-mark-{uuid.uuid4().hex}"
        start = self._path.stat().st_size
        with self._connect() as client:
            client.find("ConfigMap", name, "default")
        needle = name.encode()
        return poll(
            lambda: self._position_after(needle, start),
            timeout_s=SYNC_TIMEOUT_S,
            describe=lambda: f"{name} is not in {self._path}",
        )

    def calls(self, *, since: int = 0, user: str | None = None, namespace: str | None = None) -> list[Call]:
        """Calls that ended after the mark, of one user (as the server names it) and namespace where given."""
        self.mark()
        return [
            call
            for call in self._read(since)
            if (user is None or call.user == user) and (namespace is None or call.namespace == namespace)
        ]

    def writes_of(self, user: str, *, since: int = 0, namespace: str | None = None) -> list[Call]:
        """The user's creates, updates, patches and deletes, refused ones too."""
        return [call for call in self.calls(since=since, user=user, namespace=namespace) if call.is_write]

    def _position_after(self, needle: bytes, start: int) -> int | None:
        with self._path.open("rb") as log:
            log.seek(start)
            content = log.read()
        end = content.find(b"\n", content.find(needle))
        return start + end + 1 if needle in content and end >= 0 else None

    def _read(self, since: int) -> Iterator[Call]:
        with self._path.open("rb") as log:
            log.seek(since)
            for line in log:
                if not line.endswith(b"\n"):
                    return
                event = json.loads(line)
                if event["verb"] != "watch" or event["stage"] == "ResponseStarted":
                    yield _call(event)


def _call(event: dict[str, Any]) -> Call:
    target = event.get("objectRef", {})
    return Call(
        user=event["user"].get("username", ""),
        verb=event["verb"],
        group=target.get("apiGroup", ""),
        resource=target.get("resource", ""),
        subresource=target.get("subresource", ""),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=event.get("responseStatus", {}).get("code", 0),
        agent=event.get("userAgent", ""),
        received=event["requestReceivedTimestamp"],
    )

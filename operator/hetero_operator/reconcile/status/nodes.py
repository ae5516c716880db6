"""Which nodes answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from hetero_operator.reconcile.model import Object
from hetero_operator.reconcile.status.text import parsed_time, steady


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """A node that is gone or not ready."""

    node: str
    since: datetime | None
    """None: there is no such node."""
    words: str

    def __str__(self) -> str:
        return f"node {self.node} {self.words}"


def node_loss(name: str, nodes: Mapping[str, Object | None]) -> NodeLoss | None:
    """What is wrong with a node; None when it is ready, or when nothing is known about it."""
    if not name or name not in nodes:
        return None
    node = nodes[name]
    if node is None:
        return NodeLoss(name, None, "does not exist")
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = next((item for item in conditions if item.get("type") == "Ready"), None)
    since = parsed_time(ready.get("lastTransitionTime")) if ready else None
    if ready is None or since is None or ready.get("status") == "True":
        return None
    said = steady(str(ready.get("message") or ready.get("reason") or ""))
    state = "does not answer" if ready.get("status") == "Unknown" else "is not ready"
    return NodeLoss(name, since, f"{state}: {said}" if said else state)

"""Lost nodes: those that do not answer, and since when.

A kubelet that has just been started says for some seconds that its node is not ready, and the control plane then takes
its pods out of Services, while all of them run on. So a node's own word is believed at once about pods that nobody
hears from, and about a pod that the gateway talks to only when it stands for longer than such a start takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from hetero_operator.reconcile.model import Object
from hetero_operator.reconcile.status.text import parsed_time, steady

PASSING: Final = timedelta(seconds=40)
"""As long as the control plane waits, by default, for a node that says nothing."""


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """A node that is gone or not ready."""

    node: str
    since: datetime | None
    """None: there is no such node."""
    words: str
    by_itself: bool = False
    """Whether its kubelet says so, and runs."""

    @property
    def certain_at(self) -> datetime | None:
        """From when on it is no start of a kubelet any more; None: it never was one."""
        return self.since + PASSING if self.by_itself and self.since is not None else None

    def may_pass(self, now: datetime) -> bool:
        """Return whether it may be no more than the start of a kubelet."""
        return self.certain_at is not None and now < self.certain_at

    def __str__(self) -> str:
        return f"node {self.node} {self.words}"


def node_loss(name: str, nodes: Mapping[str, Object | None]) -> NodeLoss | None:
    """Return the problem of a node, None when it is ready or nothing is known about it."""
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
    by_itself = ready.get("status") != "Unknown"
    state = "is not ready" if by_itself else "does not answer"
    return NodeLoss(name, since, f"{state}: {said}" if said else state, by_itself)

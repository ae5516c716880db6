"""The condition RouterReady, as the router's Deployment has it.

The router's pod is no part of a replica and is not observed, so its Deployment is all that is known of it. What keeps
it from being ready is told by `kubectl describe`, and by Degraded where the Deployment's controller gave up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_operator.reconcile.inventory import DEPLOYMENT
from hetero_operator.reconcile.model import Object
from hetero_operator.reconcile.status.findings import FALSE, TRUE, Blockers, Finding
from hetero_operator.reconcile.status.pods import condition
from hetero_operator.reconcile.status.reasons import Reason
from hetero_operator.reconcile.status.situation import Situation
from hetero_operator.reconcile.status.text import bounded, steady


def router_ready(situation: Situation, blockers: Blockers) -> Finding:
    """Return whether a router that is asked for takes calls."""
    if situation.basis is None or blockers.idle is not None:
        return blockers.idle or Finding(FALSE, Reason.STARTING, "Nothing is in force yet.")
    if not situation.basis.spec.has_router:
        return Finding(FALSE, Reason.NOT_REQUESTED, "spec.router.type is None.")
    name = situation.names.router
    live = situation.inventory.named(DEPLOYMENT, name, group="apps")
    trouble = router_trouble(situation)
    if trouble is not None:
        return Finding(FALSE, trouble.reason, trouble.message)
    if live is None or not _is_seen(live):
        return Finding(FALSE, Reason.STARTING, f"Deployment {name} is being created or changed.")
    if _status(live).get("readyReplicas", 0) > 0:
        return Finding(TRUE, Reason.SERVING, "The router takes calls.")
    return Finding(FALSE, Reason.ROUTER_NOT_READY, f"The pod of Deployment {name} is not ready, or knows no gateway.")


def router_trouble(situation: Situation) -> Finding | None:
    """Return what is broken about a router that is asked for; None: nothing, as far as is known."""
    basis, name = situation.basis, situation.names.router
    live = situation.inventory.named(DEPLOYMENT, name, group="apps")
    if basis is None or not basis.runs or not basis.spec.has_router or live is None or not _is_seen(live):
        return None
    failure, progress = condition(live, "ReplicaFailure"), condition(live, "Progressing")
    if failure.get("status") == "True":
        said = steady(str(failure.get("message", "")))
        return Finding(TRUE, Reason.POD_CREATION_FAILED, bounded(f"Deployment {name}: {said}"))
    if progress.get("reason") == "ProgressDeadlineExceeded":
        message = f"Deployment {name} got no pod ready in time; kubectl describe its pods."
        return Finding(TRUE, Reason.ROUTER_NOT_READY, message)
    return None


def _status(live: Object) -> Mapping[str, Any]:
    found: Mapping[str, Any] = live.get("status") or {}
    return found


def _is_seen(live: Object) -> bool:
    """Return whether the Deployment's controller has seen the wanted one."""
    return bool(_status(live).get("observedGeneration", 0) >= live["metadata"].get("generation", 0))

"""The condition RouterReady, as the router's Deployment has it, or the InferencePool's status.

The router's pods are no part of a replica and are not observed, so their Deployment is all that is known of them. What
keeps them from being ready is told by `kubectl describe`, and by Degraded where the Deployment's controller gave up.

An InferencePool routes nothing by itself: controllers of Gateways tell in its status whether they do. So it is ready
once every Gateway that refers to it accepts it, and there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_operator.reconcile.inventory import DEPLOYMENT
from hetero_operator.reconcile.manifests.optional_kinds import INFERENCE_POOL
from hetero_operator.reconcile.model import Object
from hetero_operator.reconcile.status.findings import FALSE, TRUE, Blockers, Finding
from hetero_operator.reconcile.status.pods import condition
from hetero_operator.reconcile.status.reasons import Reason
from hetero_operator.reconcile.status.situation import Situation
from hetero_operator.reconcile.status.text import bounded, steady


def router_ready(situation: Situation, blockers: Blockers) -> Finding:
    """Return whether a router that is asked for takes calls, or a Gateway routes to the InferencePool."""
    if situation.basis is None or blockers.idle is not None:
        return blockers.idle or Finding(FALSE, Reason.STARTING, "Nothing is in force yet.")
    if situation.basis.spec.has_inference_pool:
        return _pool_ready(situation)
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
    return Finding(FALSE, Reason.ROUTER_NOT_READY, f"No pod of Deployment {name} is ready, or none knows a gateway.")


def router_trouble(situation: Situation) -> Finding | None:
    """Return what is broken about a router that is asked for; None: nothing, as far as is known."""
    basis, name = situation.basis, situation.names.router
    if basis is not None and basis.runs and basis.spec.has_inference_pool:
        return _pool_trouble(situation)
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


def _pool_ready(situation: Situation) -> Finding:
    trouble, name = _pool_trouble(situation), situation.names.resource
    if trouble is not None:
        return Finding(FALSE, trouble.reason, trouble.message)
    live = _pool(situation)
    parents = _parents(live) if live is not None else []
    if live is None or not all(_is_about(item, live) for parent in parents for item in _told(parent)):
        return Finding(FALSE, Reason.STARTING, f"InferencePool {name} is being created or changed.")
    accepting = [_gateway(parent) for parent in parents if _accepts(parent)]
    if not accepting:
        message = f"No Gateway routes to InferencePool {name}; make an HTTPRoute with it as a backend."
        return Finding(FALSE, Reason.NOT_ROUTED, message)
    message = f"{' and '.join(accepting)} routes to InferencePool {name}."
    if situation.basis is not None and situation.basis.spec.gateway.keys_secret is not None:
        message += " Its endpoint picker reads no metrics: it shows no key, and spec.gateway.auth asks for one."
    return Finding(TRUE, Reason.SERVING, bounded(message))


def _pool_trouble(situation: Situation) -> Finding | None:
    """Return why no Gateway can route to the InferencePool; None: nothing is broken, as far as is known."""
    if not situation.observed.capabilities.has(*INFERENCE_POOL):
        major, minor = situation.observed.capabilities.version
        message = (
            f"spec.router.type: InferencePool needs the API {INFERENCE_POOL[0]} InferencePool, which this cluster "
            f"(Kubernetes {major}.{minor}) does not have; install the Gateway API inference extension."
        )
        return Finding(TRUE, Reason.INFERENCE_POOL_UNKNOWN, message)
    live = _pool(situation)
    for parent in _parents(live) if live is not None else []:
        for item in _told(parent):
            if live is not None and item.get("status") == "False" and _is_about(item, live):
                said = steady(f"{item.get('reason', '')}: {item.get('message', '')}")
                message = f"{_gateway(parent)} and InferencePool {situation.names.resource}: {item['type']} is False: "
                return Finding(TRUE, Reason.POOL_REFUSED, bounded(message + said))
    return None


def _pool(situation: Situation) -> Object | None:
    group = INFERENCE_POOL[0].partition("/")[0]
    return situation.inventory.named(INFERENCE_POOL[1], situation.names.resource, group=group)


def _parents(live: Object) -> Sequence[Object]:
    """Return what controllers say of the pool, one entry for each Gateway that refers to it."""
    found: Sequence[Object] = _status(live).get("parents") or ()
    return found


def _told(parent: Object) -> list[Mapping[str, Any]]:
    """Return the conditions about a pool that decide whether its Gateway routes to it."""
    found = (condition({"status": parent}, kind) for kind in ("Accepted", "ResolvedRefs"))
    return [item for item in found if item]


def _accepts(parent: Object) -> bool:
    return condition({"status": parent}, "Accepted").get("status") == "True"


def _gateway(parent: Object) -> str:
    reference: Mapping[str, Any] = parent.get("parentRef") or {}
    return f"{reference.get('kind', 'Gateway')} {reference.get('name', '')}"


def _is_about(item: Mapping[str, Any], live: Object) -> bool:
    """Return whether a condition is about the pool as it is now, as far as it says."""
    generation: int = live["metadata"].get("generation", 0)
    return bool(item.get("observedGeneration", generation) >= generation)


def _status(live: Object) -> Mapping[str, Any]:
    found: Mapping[str, Any] = live.get("status") or {}
    return found


def _is_seen(live: Object) -> bool:
    """Return whether the Deployment's controller has seen the wanted one."""
    return bool(_status(live).get("observedGeneration", 0) >= live["metadata"].get("generation", 0))

"""Refusals of a spec: it is invalid, cannot be served, may not follow the last one, or needs what the cluster lacks.

A refused spec changes nothing at all: no object of it is applied, and what runs is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetero_api.contract import LABEL_REVISION
from hetero_api.errors import ManifestError
from hetero_api.manifest import parse_resource
from hetero_api.spec import ExchangeKind, HeteroInferenceSpec
from hetero_api.spec_cluster import GangScheduler
from hetero_api.validation import check_transition, find_unserved
from hetero_operator.reconcile.inventory import Inventory, ObjectKey, label_of, taken_by_others
from hetero_operator.reconcile.manifests.config import stored_resource
from hetero_operator.reconcile.manifests.optional_kinds import POD_GROUP, RESOURCE_CLAIM_TEMPLATE, device_class
from hetero_operator.reconcile.model import Capabilities, Object
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.status.reasons import Reason


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason for which nothing is put in force."""

    reason: Reason
    problems: tuple[str, ...]
    """`path: message` each."""


def read_spec(resource: Object) -> HeteroInferenceSpec | Refusal:
    """Return the typed spec of a stored resource, or what is wrong with it."""
    try:
        return parse_resource(resource).spec
    except ManifestError as error:
        return Refusal(Reason.INVALID_SPEC, tuple(error.problems))


def unserved_refusal(spec: HeteroInferenceSpec) -> Refusal | None:
    """Return the refusal of a spec that no gateway of this version starts with."""
    problems = find_unserved(spec)
    return Refusal(Reason.INVALID_SPEC, tuple(problems)) if problems else None


def transition_refusal(
    spec: HeteroInferenceSpec, names: Names, inventory: Inventory, *, revision: str
) -> Refusal | None:
    """Refuse a spec, of that revision, that the one in force cannot become, e.g. for another type of a pool."""
    config = inventory.config_in_force(names)
    if config is None or label_of(config, LABEL_REVISION) == revision:
        return None  # what a transition may not change has Effect.RANKS; reading the stored spec costs much
    in_force = read_spec(stored_resource(config))
    if isinstance(in_force, Refusal):
        # A spec in force that this version calls invalid forbids nothing: any valid one is the way out.
        return None
    problems = check_transition(in_force, spec)
    return Refusal(Reason.INVALID_SPEC, tuple(problems)) if problems else None


def capability_refusal(spec: HeteroInferenceSpec, capabilities: Capabilities) -> Refusal | None:
    """Refuse a spec that needs what the cluster lacks, where leaving it out would not be what the user asked for."""
    problems = tuple(_lacking(spec, capabilities))
    return Refusal(Reason.NOT_SUPPORTED, problems) if problems else None


def conflict_refusal(wanted: Iterator[Object], inventory: Inventory) -> Refusal | None:
    """Refuse a spec because a name that it needs is taken."""
    taken = [key for key in map(ObjectKey.from_object, wanted) if key in inventory.foreign]
    problems = tuple(f"metadata.name: {taken_by_others(key)}" for key in taken)
    return Refusal(Reason.NAME_CONFLICT, problems) if problems else None


def _lacking(spec: HeteroInferenceSpec, capabilities: Capabilities) -> Iterator[str]:
    if not capabilities.has(*RESOURCE_CLAIM_TEMPLATE):
        for index, pool in enumerate(spec.pools):
            if device_class(pool):
                yield f"spec.pools[{index}].cpu.numa.claim: {_missing(RESOURCE_CLAIM_TEMPLATE, capabilities)}"
    num_pods = sum(pool.pods for pool in spec.pools)
    if spec.exchange.kind == ExchangeKind.SHARED_MEMORY and spec.exchange.host_path is None and num_pods > 1:
        yield (
            f"spec.exchange.hostPath: is required where kind is SharedMemory: the ranks are in {num_pods} pods, each "
            "with a /dev/shm of its own; put them into one pod, or use kind Auto"
        )
    if spec.scheduling.gang.scheduler == GangScheduler.VOLCANO and not capabilities.has(*POD_GROUP):
        yield f"spec.scheduling.gang.scheduler: {_missing(POD_GROUP, capabilities)}"


def _missing(kind: tuple[str, str], capabilities: Capabilities) -> str:
    major, minor = capabilities.version
    return f"needs the API {kind[0]} {kind[1]}, which this cluster (Kubernetes {major}.{minor}) does not have"

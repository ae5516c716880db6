"""Refusals of a spec: it is invalid, may not follow the last one, is not allowed, or needs what the cluster lacks.

A refused spec changes nothing at all: no object of it is applied, and what runs is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetero_api.contract import LABEL_REVISION
from hetero_api.errors import ManifestError
from hetero_api.manifest import check_transition, find_unserved, parse_resource
from hetero_api.spec import ExchangeKind, HeteroInferenceSpec
from hetero_api.spec_cluster import GangScheduler
from hetero_api.spec_types import MAX_WORKLOAD_NAME_LENGTH
from hetero_operator.reconcile.exposure import exposing_fields, unguarded_router
from hetero_operator.reconcile.inventory import Inventory, ObjectKey, label_of, taken_by_others
from hetero_operator.reconcile.manifests.adaptation import broken_promises, unconfined
from hetero_operator.reconcile.manifests.config import stored_resource
from hetero_operator.reconcile.manifests.gateway import gateway_additions, plain_gateway_template
from hetero_operator.reconcile.manifests.optional_kinds import POD_GROUP, RESOURCE_CLAIM_TEMPLATE, device_class
from hetero_operator.reconcile.manifests.rank_pod import plain_rank_template, rank_additions
from hetero_operator.reconcile.manifests.rendering import Rendering
from hetero_operator.reconcile.model import Capabilities, Object
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.policy import violations
from hetero_operator.reconcile.rank_sets import num_rank_pods, rank_sets
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


def refusal_of(rendering: Rendering, inventory: Inventory) -> Refusal | None:
    """Refuse a valid spec that cannot be put in force, None: it can.

    No gateway of this version starts with it, the one in force cannot become it, the policy forbids it, or it needs
    what the cluster lacks, where leaving that out would not be what the user asked for.
    """
    for reason, problems in _objections(rendering, inventory):
        if problems:
            return Refusal(reason, tuple(problems))
    return None


def _objections(rendering: Rendering, inventory: Inventory) -> Iterator[tuple[Reason, Sequence[str]]]:
    yield Reason.INVALID_SPEC, find_unserved(rendering.spec)
    yield Reason.INVALID_SPEC, list(_crowded_names(rendering.spec, rendering.names))
    yield Reason.INVALID_SPEC, _transition_problems(rendering, inventory)
    yield Reason.INVALID_SPEC, _exposing(rendering, inventory)
    yield Reason.INVALID_SPEC, list(unguarded_router(rendering.spec))
    annotations = rendering.spec.pod_metadata.annotations
    yield Reason.INVALID_SPEC, [f"spec.podMetadata.{problem}" for problem in unconfined(annotations)]
    yield Reason.NOT_ALLOWED, list(violations(rendering.spec, rendering.policy))
    if rendering.spec.gateway.pod_template or any(pool.pod_template for pool in rendering.spec.pools):
        yield Reason.INVALID_SPEC, list(_changed_pods(rendering))
    yield Reason.NOT_SUPPORTED, list(_lacking(rendering.spec, rendering.capabilities))


def _crowded_names(spec: HeteroInferenceSpec, names: Names) -> Iterator[str]:
    """Yield why replicas cannot be named: too long for labels of their pods, or like another replica's."""
    ordinals = range(spec.replicas + spec.rollout.surge)
    sets = [replace(names, ordinal=ordinal).rank_set(ranks.name) for ordinal in ordinals for ranks in rank_sets(spec)]
    excess = max(map(len, sets), default=0) - MAX_WORKLOAD_NAME_LENGTH
    if excess > 0:
        yield f"metadata.name: must be shorter by {excess} characters for {len(ordinals)} replicas"
    if len(set(sets)) < len(sets):
        yield "spec.pools: a pool is named like another replica's; make a resource with another name for it"


def _changed_pods(rendering: Rendering) -> Iterator[str]:
    """Yield why patches of pods cannot be applied."""
    spec = rendering.spec
    for ranks in rank_sets(spec):
        yield from broken_promises(plain_rank_template(rendering, ranks), rank_additions(spec, ranks))
    yield from broken_promises(plain_gateway_template(rendering), gateway_additions(spec))


def _exposing(rendering: Rendering, inventory: Inventory) -> Sequence[str]:
    """Return why the spec would expose the gateway, although the one in force does not."""
    problems = tuple(exposing_fields(rendering.spec, service_type=None))
    config, service = inventory.config_in_force(rendering.names), inventory.named("Service", rendering.names.resource)
    if not problems or config is None or service is None:
        return problems
    # Only now, since reading the stored spec costs much.
    in_force = read_spec(stored_resource(config))
    asked = not isinstance(in_force, Refusal) and in_force.gateway.asks_for_proof
    return tuple(exposing_fields(rendering.spec, service_type=None if asked else service["spec"].get("type")))


def _transition_problems(rendering: Rendering, inventory: Inventory) -> Sequence[str]:
    """Return why the spec in force cannot become the wanted one, e.g. for another type of a pool."""
    config = inventory.config_in_force(rendering.names)
    if config is None or label_of(config, LABEL_REVISION) == rendering.revisions.ranks:
        return ()  # what a transition may not change has Effect.RANKS; reading the stored spec costs much
    in_force = read_spec(stored_resource(config))
    # A spec in force that this version calls invalid forbids nothing: any valid one is the way out.
    return () if isinstance(in_force, Refusal) else check_transition(in_force, rendering.spec)


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
    num_pods = num_rank_pods(spec)
    if spec.exchange.kind == ExchangeKind.SHARED_MEMORY and spec.exchange.host_path is None and num_pods > 1:
        yield (
            f"spec.exchange.hostPath: is required where kind is SharedMemory: the ranks are in {num_pods} pods, each "
            "with a /dev/shm of its own; put them into one pod (spec.topology.colocate: Pod), or use kind Auto"
        )
    if spec.scheduling.gang.scheduler == GangScheduler.VOLCANO and not capabilities.has(*POD_GROUP):
        yield f"spec.scheduling.gang.scheduler: {_missing(POD_GROUP, capabilities)}"


def _missing(kind: tuple[str, str], capabilities: Capabilities) -> str:
    major, minor = capabilities.version
    return f"needs the API {kind[0]} {kind[1]}, which this cluster (Kubernetes {major}.{minor}) does not have"

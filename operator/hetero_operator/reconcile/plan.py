"""What to do about one resource: the whole of the operator's will, as one pure function.

Order of the questions: is the resource leaving; does its spec make sense, may it follow the one in force, can the
cluster do it, are its names free. Only then: what shall be, what of it is not so, what is too much.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

from hetero_api.spec import HeteroInferenceSpec
from hetero_operator.reconcile import budget, lost_nodes
from hetero_operator.reconcile.desired import desired_objects
from hetero_operator.reconcile.differences import needs_apply, stamped
from hetero_operator.reconcile.inventory import Inventory
from hetero_operator.reconcile.manifests.rendering import Rendering
from hetero_operator.reconcile.manifests.secrets import group_secret
from hetero_operator.reconcile.model import Deletion, NewSecret, Object, Observed, Plan
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.ownership import ObjectKey, is_leaving
from hetero_operator.reconcile.refusals import (
    Refusal,
    capability_refusal,
    conflict_refusal,
    read_spec,
    transition_refusal,
    unserved_refusal,
)
from hetero_operator.reconcile.revision import revisions_of
from hetero_operator.reconcile.rollout import outdated_ranks
from hetero_operator.reconcile.superseded import superseded


def plan(observed: Observed) -> Plan:
    """What to apply and delete, so that what is becomes what the resource asks for."""
    if is_leaving(observed.resource):
        # Its objects follow by their owner references; writing now would only make more to collect.
        return Plan()
    spec = read_spec(observed.resource)
    if isinstance(spec, Refusal):
        return _refused(spec)
    inventory = Inventory.of(observed)
    rendering = rendering_of(observed, spec)
    refusal = (
        unserved_refusal(spec)
        or transition_refusal(spec, rendering.names, inventory, revision=rendering.revisions.ranks)
        or capability_refusal(spec, observed.capabilities)
    )
    if refusal:
        return _refused(refusal)
    return _accepted(observed, rendering, inventory)


def rendering_of(observed: Observed, spec: HeteroInferenceSpec) -> Rendering:
    """What the manifests of an observed resource are made from."""
    metadata = observed.resource["metadata"]
    return Rendering(
        names=Names(metadata["name"]),
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        spec=spec,
        revisions=revisions_of(observed.resource, spec),
        capabilities=observed.capabilities,
        options=observed.options,
    )


def _refused(refusal: Refusal) -> Plan:
    return Plan(refusal=refusal.problems, refusal_reason=refusal.reason)


def _accepted(observed: Observed, rendering: Rendering, inventory: Inventory) -> Plan:
    secret = group_secret(rendering)
    held = budget.held_pools(observed, rendering.spec, inventory, revision=rendering.revisions.ranks)
    wanted = [stamped(item) for item in desired_objects(rendering, inventory, held=held)]
    refusal = conflict_refusal(chain([secret.manifest], wanted), inventory)
    if refusal:
        return _refused(refusal)
    return Plan(
        create=_missing(secret, inventory),
        apply=tuple(item for item in wanted if needs_apply(item, inventory.own.get(ObjectKey.of(item)))),
        delete=tuple(_deletions(observed, rendering, inventory, wanted=[secret.manifest, *wanted])),
    )


def _missing(secret: NewSecret, inventory: Inventory) -> tuple[NewSecret, ...]:
    return () if ObjectKey.of(secret.manifest) in inventory.own else (secret,)


def _deletions(
    observed: Observed, rendering: Rendering, inventory: Inventory, *, wanted: Collection[Object]
) -> Iterator[Deletion]:
    """Every deletion once: a pod on a dead node goes at once, be it outdated or not."""
    outdated = outdated_ranks(
        rendering.spec, rendering.names, rendering.revisions.ranks, inventory=inventory, pods=observed.pods
    )
    done: set[str] = set()
    too_much = superseded(inventory, {ObjectKey.of(item) for item in wanted}, observed.pods)
    for deletion in chain(lost_nodes.deletions(observed, rendering.spec), outdated, too_much):
        if deletion.uid not in done:
            done.add(deletion.uid)
            yield deletion

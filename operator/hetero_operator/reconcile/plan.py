"""The plan for one resource: all decisions of the operator, as one pure function.

The order of the questions: is the resource being deleted; is its spec valid, may it follow the one in force, can the
cluster do it, are its names free. Only then: which objects it wants, which of them differ, which are too many. Objects
are created in the order in which they are needed: what a pod needs is there before the pod.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

from hetero_api.spec import HeteroInferenceSpec
from hetero_operator.reconcile import budget
from hetero_operator.reconcile.deletions import lost_pods, outdated_ranks, superseded
from hetero_operator.reconcile.differences import needs_apply, stamped
from hetero_operator.reconcile.exposure import clients_of
from hetero_operator.reconcile.inventory import CLAIM_TEMPLATE, CONFIG_MAP, Inventory, ObjectKey, is_leaving
from hetero_operator.reconcile.manifests.config import accounts, config_map, group_secret, templates_in_force
from hetero_operator.reconcile.manifests.gateway import deployment
from hetero_operator.reconcile.manifests.network import network_policies, services
from hetero_operator.reconcile.manifests.optional_kinds import (
    claim_templates,
    disruption_budgets,
    pod_groups,
    pod_monitors,
)
from hetero_operator.reconcile.manifests.rank_pod import statefulset
from hetero_operator.reconcile.manifests.rendering import Rendering
from hetero_operator.reconcile.model import Deletion, NewSecret, Object, Observed, Plan
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.rank_sets import rank_sets
from hetero_operator.reconcile.refusals import Refusal, conflict_refusal, read_spec, refusal_of
from hetero_operator.reconcile.revision import revisions_of


def desired_objects(rendering: Rendering, inventory: Inventory, *, held: Collection[str]) -> list[dict[str, Any]]:
    """Return all objects but the group's Secret; the sets of rank pods named in `held` get no pods."""
    templates = templates_in_force(rendering, inventory)
    stored = inventory.named(CONFIG_MAP, rendering.names.config(rendering.revisions.gateway))
    return [
        *accounts(rendering),
        config_map(rendering, templates, stored),
        *network_policies(rendering, clients=clients_of(rendering.spec, rendering.names, inventory)),
        *services(rendering),
        *disruption_budgets(rendering),
        *claim_templates(rendering, {item["metadata"]["name"]: item for item in inventory.of_kind(CLAIM_TEMPLATE)}),
        *pod_groups(rendering),
        *(
            statefulset(rendering, ranks, templates.ranks[ranks.name], held=ranks.name in held)
            for ranks in rank_sets(rendering.spec)
        ),
        deployment(rendering, templates.gateway),
        *pod_monitors(rendering),
    ]


def plan(observed: Observed) -> Plan:
    """Decide what to apply and delete, so that the cluster becomes what the resource asks for."""
    if is_leaving(observed.resource):
        # Its objects follow by their owner references; writing now would only make more to collect.
        return Plan()
    spec = read_spec(observed.resource)
    if isinstance(spec, Refusal):
        return _refused(spec)
    inventory = Inventory.from_observed(observed)
    rendering = rendering_of(observed, spec)
    refusal = refusal_of(rendering, inventory)
    if refusal:
        return _refused(refusal)
    return _accepted(observed, rendering, inventory)


def rendering_of(observed: Observed, spec: HeteroInferenceSpec) -> Rendering:
    """Return the input of the manifests of an observed resource."""
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
        apply=tuple(item for item in wanted if needs_apply(item, inventory.own.get(ObjectKey.from_object(item)))),
        delete=tuple(_deletions(observed, rendering, inventory, wanted=[secret.manifest, *wanted])),
    )


def _missing(secret: NewSecret, inventory: Inventory) -> tuple[NewSecret, ...]:
    return () if ObjectKey.from_object(secret.manifest) in inventory.own else (secret,)


def _deletions(
    observed: Observed, rendering: Rendering, inventory: Inventory, *, wanted: Collection[Object]
) -> Iterator[Deletion]:
    """Yield every deletion once: a pod on a dead node goes at once, whether outdated or not."""
    outdated = outdated_ranks(
        rendering.spec, rendering.names, rendering.revisions.ranks, inventory=inventory, pods=observed.pods
    )
    done: set[str] = set()
    too_much = superseded(inventory, {ObjectKey.from_object(item) for item in wanted}, observed.pods)
    for deletion in chain(lost_pods(observed, rendering.spec), outdated, too_much):
        if deletion.uid not in done:
            done.add(deletion.uid)
            yield deletion

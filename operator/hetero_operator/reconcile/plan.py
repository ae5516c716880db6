"""The plan for one resource: all decisions of the operator, as one pure function.

The order of the questions: is the resource being deleted; is its spec valid, may it follow the one in force, does the
policy allow it, can the cluster do it, are its names free. Then, for each replica: which objects it wants, which of
them differ, which are too many. Objects are created in the order in which they are needed: what a pod needs is there
before the pod.
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
from hetero_operator.reconcile.manifests.config import (
    PodTemplates,
    accounts,
    config_map,
    group_secrets,
    templates_in_force,
)
from hetero_operator.reconcile.manifests.gateway import deployment
from hetero_operator.reconcile.manifests.network import client_service, group_services, network_policies
from hetero_operator.reconcile.manifests.optional_kinds import (
    claim_templates,
    disruption_budgets,
    inference_pools,
    pod_groups,
    pod_monitors,
)
from hetero_operator.reconcile.manifests.rank_pod import statefulset
from hetero_operator.reconcile.manifests.rendering import Rendering
from hetero_operator.reconcile.manifests.responder import responder_objects, responds, responds_for_router
from hetero_operator.reconcile.manifests.router import router_objects
from hetero_operator.reconcile.model import Deletion, NewSecret, Object, Observed, Plan
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.policy import options_in
from hetero_operator.reconcile.rank_sets import rank_sets
from hetero_operator.reconcile.refusals import Refusal, conflict_refusal, read_spec, refusal_of
from hetero_operator.reconcile.replicas import Course, Replica, replicas_of, view_of
from hetero_operator.reconcile.revision import revisions_in


def desired_objects(
    rendering: Rendering,
    inventory: Inventory,
    templates: PodTemplates,
    *,
    held: Collection[str],
    others_serve: bool | None,
    responds: bool,
) -> list[dict[str, Any]]:
    """Return all objects of a replica but its Secrets; replica 0 has those that all share, as the router's.

    The sets of rank pods named in `held` get no pods. `others_serve` is None where there is no other replica.
    """
    is_first = rendering.names.ordinal == 0
    stored = inventory.named(CONFIG_MAP, rendering.names.config(rendering.revisions.gateway))
    clients = clients_of(rendering.spec, rendering.names, inventory)
    for_router = responds_for_router(rendering, inventory, responds=responds)
    return [
        *(accounts(rendering) if is_first else ()),
        config_map(rendering, templates, stored),
        *(network_policies(rendering, clients=clients) if is_first else ()),
        *group_services(rendering),
        *(responder_objects(rendering, inventory, clients) if is_first and (responds or for_router) else ()),
        *([client_service(rendering, responds=responds)] if is_first else ()),
        *(router_objects(rendering, templates.options, clients, responds=for_router) if is_first else ()),
        *disruption_budgets(rendering, others_serve=others_serve),
        *claim_templates(rendering, {item["metadata"]["name"]: item for item in inventory.of_kind(CLAIM_TEMPLATE)}),
        *pod_groups(rendering),
        *(
            statefulset(rendering, ranks, templates.ranks[ranks.name], held=ranks.name in held)
            for ranks in rank_sets(rendering.spec)
        ),
        deployment(rendering, templates.gateway),
        *((*inference_pools(rendering), *pod_monitors(rendering)) if is_first else ()),
    ]


def plan(observed: Observed) -> Plan:
    """Decide what to apply and delete, so that the cluster becomes what the resource asks for."""
    if is_leaving(observed.resource):
        # Its objects follow by their owner references; writing now would only make more to collect.
        return Plan()
    spec = read_spec(observed.resource)
    if isinstance(spec, Refusal):
        return _refused(spec)
    first = view_of(observed, 0)
    rendering = rendering_of(first, spec, has_gateway=True, has_ranks=True)
    refusal = refusal_of(rendering, Inventory.from_observed(first))
    if refusal:
        return _refused(refusal)
    answers_callers = responds(rendering, Inventory.from_observed(first), observed.pods)
    parts = [_of_replica(replica, answers_callers=answers_callers) for replica in replicas_of(observed, spec)]
    refused = next((part for part in parts if part.refusal), None)
    return refused or Plan(
        create=tuple(item for part in parts for item in part.create),
        apply=tuple(item for part in parts for item in part.apply),
        delete=tuple(item for part in parts for item in part.delete),
    )


def rendering_of(view: Observed, spec: HeteroInferenceSpec, *, has_gateway: bool, has_ranks: bool) -> Rendering:
    """Return the input of the manifests of a replica."""
    metadata = view.resource["metadata"]
    return Rendering(
        names=Names.of(view),
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        spec=spec,
        revisions=revisions_in(view, spec),
        capabilities=view.capabilities,
        options=options_in(metadata["namespace"], view.options, view.policy),
        policy=view.policy,
        has_gateway=has_gateway,
        has_ranks=has_ranks,
    )


def _refused(refusal: Refusal) -> Plan:
    return Plan(refusal=refusal.problems, refusal_reason=refusal.reason)


def _of_replica(replica: Replica, *, answers_callers: bool) -> Plan:
    view = replica.view
    rendering = rendering_of(view, replica.spec, has_gateway=replica.has_gateway, has_ranks=replica.has_ranks)
    inventory = Inventory.from_observed(view)
    if replica.course is Course.LEAVING and not replica.is_busy:
        return Plan(delete=tuple(_deletions(view, rendering, inventory, wanted=())))
    templates = templates_in_force(rendering, inventory)
    secrets = group_secrets(rendering, templates, inventory, view.now)
    held = budget.held_pools(view, rendering.spec, inventory, revision=rendering.revisions.ranks)
    objects = desired_objects(
        rendering, inventory, templates, held=held, others_serve=replica.others_serve, responds=answers_callers
    )
    wanted = [stamped(item) for item in objects]
    needed = [*(secret.manifest for secret in secrets), *wanted]
    refusal = conflict_refusal(iter(needed), inventory)
    if refusal:
        return _refused(refusal)
    return Plan(
        create=tuple(secret for secret in secrets if secret.renews or _is_missing(secret, inventory)),
        apply=tuple(item for item in wanted if needs_apply(item, inventory.own.get(ObjectKey.from_object(item)))),
        delete=tuple(_deletions(view, rendering, inventory, wanted=needed)),
    )


def _is_missing(secret: NewSecret, inventory: Inventory) -> bool:
    return ObjectKey.from_object(secret.manifest) not in inventory.own


def _deletions(
    view: Observed, rendering: Rendering, inventory: Inventory, *, wanted: Collection[Object]
) -> Iterator[Deletion]:
    """Yield every deletion once: a pod on a dead node goes at once, whether outdated or not."""
    outdated = outdated_ranks(
        rendering.spec, rendering.names, rendering.revisions.ranks, inventory=inventory, pods=view.pods
    )
    done: set[str] = set()
    too_much = superseded(inventory, {ObjectKey.from_object(item) for item in wanted}, view.pods)
    for deletion in chain(lost_pods(view, rendering.spec), outdated, too_much):
        if deletion.uid not in done:
            done.add(deletion.uid)
            yield deletion

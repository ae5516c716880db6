"""One look at one resource: observe, plan, apply, report.

Level-triggered: actions follow from the present state, not from what brought the key here. So a look too many does no
harm, and a missed one is made up for by the next. A resource that is gone needs nothing: the garbage collector takes
its objects by their owner references. Writes show in the stores at once, so a plan is made again until nothing is left
to do, and only then is the status reported.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from hetero_api.contract import LABEL_POOL, LABEL_REVISION, LABEL_ROLE, ROLE_GATEWAY
from hetero_operator.cluster.cache import ClusterCache
from hetero_operator.cluster.executor import PlanExecution, any_transient
from hetero_operator.cluster.inquiries import PATIENCE_S, NodeBook, SecretBook, WarningBook
from hetero_operator.cluster.kinds import RESOURCE
from hetero_operator.cluster.reporting import EventRecorder, StatusWriter
from hetero_operator.cluster.resources import Resources
from hetero_operator.cluster.store import Key
from hetero_operator.errors import Conflict, NotFound, OverBudget
from hetero_operator.gateway_probe import GatewayProbe, InsideTls
from hetero_operator.reconcile.inventory import DEPLOYMENT, STATEFUL_SET, is_leaving, is_owned_by, label_of, ordinal_of
from hetero_operator.reconcile.manifests.containers import INSIDE_VOLUME
from hetero_operator.reconcile.model import (
    FailureKind,
    GatewayReport,
    Object,
    ObjectRef,
    Observed,
    Outcome,
    Plan,
    Policy,
    RenderOptions,
    Report,
    Transition,
    WriteFailure,
)
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.status.pods import condition, node_of, status_of
from hetero_operator.reconcile.status.text import parsed_time
from hetero_operator.timing import now_utc

logger = logging.getLogger(__name__)

MAX_ROUNDS: Final = 5
"""Plans in one look. More would mean that what is applied never is as it was asked to be."""

_FRESH_S: Final = 1.0
"""Seconds after which a view is taken again: a gateway may take longer to answer, and the view is reported."""

Planner = Callable[[Observed], Plan]
Reporter = Callable[[Observed, Plan, Outcome], Report]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a look at a resource."""

    exists: bool = True
    failures: tuple[WriteFailure, ...] = ()
    unsettled: bool = False
    """Plans did not come to an end."""
    look_again_s: float | None = None
    retry_after_s: float = 0.0

    @property
    def reasons(self) -> frozenset[str]:
        """Reasons for which it did not do everything, in a word each."""
        kinds = {failure.kind.value for failure in self.failures}
        return frozenset(kinds | {"Unsettled"} if self.unsettled else kinds)

    @property
    def transient(self) -> bool:
        """Whether trying again soon may help."""
        return self.unsettled or any_transient(self.failures)


@dataclass(frozen=True, slots=True)
class Collaborators:
    """Parts that a reconciler works with."""

    resources: Resources
    cache: ClusterCache
    secrets: SecretBook
    nodes: NodeBook
    warnings: WarningBook
    gateways: GatewayProbe
    execution: Callable[[Key], PlanExecution]
    """Makes the execution of a resource's plan."""
    statuses: StatusWriter
    events: EventRecorder


@dataclass(frozen=True, slots=True)
class _View:
    """A resource, its objects, Secrets too, and its pods, as they were at a moment."""

    resource: Object
    owned: Sequence[Object]
    pods: Sequence[Object]
    waiting: Mapping[str, float]
    """Ages, in seconds, of what should have gone on by now, by uid."""
    at: datetime


class Reconciler:
    """One look at a resource, by key."""

    def __init__(
        self,
        parts: Collaborators,
        options: RenderOptions,
        policy: Policy,
        *,
        plan: Planner,
        report: Reporter,
        clock: Callable[[], datetime] = now_utc,
    ) -> None:
        self._parts = parts
        self._options = options
        self._policy = policy
        self._plan = plan
        self._report = report
        self._clock = clock

    async def reconcile(self, key: Key) -> Verdict:
        """Do all that there is to do about a resource. Raises ApiError, NotLeading, OverBudget."""
        observed, plan, outcome = None, Plan(), Outcome()
        for _ in range(MAX_ROUNDS):
            observed = await self._observe(key)
            if observed is None:
                return self._absent(key)
            plan = self._parts.cache.without_admitted(self._plan(observed), observed.owned)
            if plan.idle:
                break
            if await self._parts.resources.confirm(key) == observed.resource:
                outcome = await self._parts.execution(key).carry_out(plan)
            if outcome.failures:
                break
        assert observed is not None
        return await self._tell(key, observed, plan, outcome)

    def _absent(self, key: Key) -> Verdict:
        self._parts.resources.forget_resource(key)
        self._parts.statuses.forget_resource(key)
        self._parts.secrets.forget_resource(key)
        self._parts.warnings.forget_resource(key)
        return Verdict(exists=False)

    async def _tell(self, key: Key, observed: Observed, plan: Plan, outcome: Outcome) -> Verdict:
        unsettled = not plan.idle and not outcome.failures
        if unsettled:
            logger.warning("%s/%s does not settle: %s", *key, ", ".join(_names(plan)))
        report = self._report(observed, plan, outcome)
        try:
            rest_s = await self._parts.statuses.write(key, observed.resource, report.status)
        except (Conflict, NotFound) as error:
            # Changed, or gone, since it was looked at. Should the watch be late, this look at it is not.
            if await self._parts.resources.refresh(key) is None:
                return self._absent(key)
            if isinstance(error, NotFound):
                raise
            ref = ObjectRef(RESOURCE.api_version, RESOURCE.kind, key.name)
            return Verdict(failures=(*outcome.failures, WriteFailure(ref, FailureKind.TRANSIENT, error.message)))
        if not rest_s:
            for transition in report.events:
                self._parts.events.record(observed.resource, transition, observed.now)
        moments = [report.look_again_s, rest_s or None]
        return Verdict(
            failures=outcome.failures,
            unsettled=unsettled,
            look_again_s=min((moment for moment in moments if moment is not None), default=None),
            retry_after_s=outcome.retry_after_s,
        )

    async def _observe(self, key: Key) -> Observed | None:
        """Return what there is to know about a resource, None if it is gone. Raises ApiError, OverBudget."""
        parts, view = self._parts, await self._view(key)
        gateways = {} if view is None else await self._ask_gateways(key, view)
        if view is not None and (self._clock() - view.at).total_seconds() > _FRESH_S:
            view = await self._view(key)
        if view is None:
            return None
        return Observed(
            resource=view.resource,
            owned=view.owned,
            pods=view.pods,
            failed_pods=parts.cache.failed_pods(key),
            now=view.at,
            capabilities=parts.cache.capabilities,
            options=self._options,
            policy=self._policy,
            nodes=await parts.nodes.named(_nodes_in_question(view.pods, view.at)),
            pod_events=parts.warnings.about(key, view.waiting),
            gateway=gateways.pop(0, None),
            gateways=gateways,
        )

    async def _view(self, key: Key) -> _View | None:
        parts, at, resource = self._parts, self._clock(), self._parts.resources.get(key)
        if resource is None:
            return None
        try:
            owned, pods = await parts.cache.owned_by(key)
        except OverBudget as error:
            parts.events.record(resource, Transition("Warning", "TooManyObjects", str(error)), self._clock())
            raise
        pods = [pod for pod in pods if _is_made_for(pod, key.name)]
        own = [item for item in owned if is_owned_by(item, resource["metadata"]["uid"])]
        waiting = {item["metadata"]["uid"]: _age_s(item, at) for item in [*_silent(pods), *_incomplete(own, pods)]}
        doubt = any(age_s > PATIENCE_S for age_s in waiting.values())
        secrets = await parts.secrets.secrets_of(key, [*owned, *pods], doubt=doubt)
        return _View(resource, [*owned, *secrets], pods, waiting, at)

    async def _ask_gateways(self, key: Key, view: _View) -> dict[int, GatewayReport]:
        """Return the reports of the replicas' gateways that have an address, by ordinal."""
        deployments = _gateway_deployments(view.resource, view.owned)
        asked = {
            ordinal: self._ask_gateway(key, deployment, gateway)
            for ordinal, deployment in deployments.items()
            if (gateway := _serving_gateway(view.pods, deployment)) is not None
        }
        return dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))

    async def _ask_gateway(self, key: Key, deployment: Object, gateway: Object) -> GatewayReport:
        name, address = gateway["metadata"]["name"], gateway["status"]["podIP"]
        revision, secrets, inside = label_of(gateway, LABEL_REVISION), self._parts.secrets, None
        names = Names(key.name, ordinal_of(deployment))
        if _has_volume(deployment, INSIDE_VOLUME):
            found = await secrets.operator_certificate(key, revision, ordinal=names.ordinal)
            if found is None:
                return GatewayReport(name, error=f"Secret {names.inside_secret(revision)} is not there yet")
            inside = InsideTls(*found, server_name=f"{names.gateway}.{key.namespace}.svc")
        token = await secrets.admin_token(key, revision, ordinal=names.ordinal)
        uses_tls = _has_volume(deployment, "tls")
        return await self._parts.gateways.ask(name, address, token, uses_tls=uses_tls, inside=inside)


def _gateway_deployments(resource: Object, owned: Sequence[Object]) -> dict[int, Object]:
    """Return the Deployments of its own that make the resource's gateways, by the ordinals of replicas.

    Router and responder have Deployments too, of no replica: names tell them apart.
    """
    name, uid = resource["metadata"]["name"], resource["metadata"]["uid"]
    own = ((ordinal_of(item), item) for item in owned if item["kind"] == DEPLOYMENT and is_owned_by(item, uid))
    return {ordinal: item for ordinal, item in own if item["metadata"]["name"] == Names(name, ordinal).gateway}


def _has_volume(deployment: Object, name: str) -> bool:
    """Return whether pods of a Deployment have a volume; the spec as written may be one that they do not have yet."""
    volumes = deployment["spec"]["template"]["spec"].get("volumes") or ()
    return any(volume["name"] == name for volume in volumes)


def _is_made_by(pod: Object, deployment: Object) -> bool:
    """Return whether a ReplicaSet of a Deployment controls a pod, as its name says: NAME-HASH.

    Anybody may label a pod as a gateway; the token is for gateways that the operator had made.
    """
    references = pod["metadata"].get("ownerReferences") or ()
    names = [item["name"] for item in references if item.get("controller") and item["kind"] == "ReplicaSet"]
    return [name.rpartition("-")[0] for name in names] == [deployment["metadata"]["name"]]


def _is_made_for(pod: Object, name: str) -> bool:
    """Return whether a pod is of a StatefulSet or Deployment that is named after a resource: anybody may label one."""
    references = pod["metadata"].get("ownerReferences") or ()
    makers = [item for item in references if item.get("controller") and item["kind"] in (STATEFUL_SET, "ReplicaSet")]
    return any(item["name"].startswith(f"{name}-") for item in makers)


def _serving_gateway(pods: Sequence[Object], deployment: Object) -> Object | None:
    """Return the youngest gateway pod of a Deployment that has an address and runs, None if there is none."""
    found = [
        pod
        for pod in pods
        if label_of(pod, LABEL_ROLE) == ROLE_GATEWAY
        and _is_made_by(pod, deployment)
        and not is_leaving(pod)
        and status_of(pod).get("podIP")
        and status_of(pod).get("phase") == "Running"
    ]
    return max(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), default=None)


def _nodes_in_question(pods: Sequence[Object], now: datetime) -> Iterator[str]:
    """Yield nodes of pods that are not ready, or that should have been gone by now."""
    for pod in pods:
        due = parsed_time(pod["metadata"].get("deletionTimestamp"))
        is_overdue = due is not None and due < now
        is_ready = condition(pod, "Ready").get("status") == "True"
        if node_of(pod) and (is_overdue or not is_ready):
            yield node_of(pod)


def _silent(pods: Sequence[Object]) -> Iterator[Object]:
    """Return pods that wait and do not say for what."""
    return (pod for pod in pods if status_of(pod).get("phase", "Pending") == "Pending" and not _says_why(pod))


def _says_why(pod: Object) -> bool:
    status, scheduled = status_of(pod), condition(pod, "PodScheduled")
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    words = [(container.get("state") or {}).get("waiting") or {} for container in containers]
    if scheduled.get("status") == "False":
        words.append(scheduled)
    return any(word.get("message") for word in words)


def _incomplete(own: Sequence[Object], pods: Sequence[Object]) -> Iterator[Object]:
    """Yield StatefulSets of a resource that have fewer pods than they should; of strangers' no bodies are kept."""
    for item in own:
        if item["kind"] == STATEFUL_SET:
            there = sum(_pool_of(pod) == _pool_of(item) for pod in pods)
            if there < int(item["spec"].get("replicas", 1)):
                yield item


def _pool_of(item: Object) -> tuple[int, str]:
    return ordinal_of(item), label_of(item, LABEL_POOL)


def _age_s(item: Object, now: datetime) -> float:
    return (now - datetime.fromisoformat(item["metadata"]["creationTimestamp"])).total_seconds()


def _names(plan: Plan) -> list[str]:
    applied = [f"{item['kind']} {item['metadata']['name']}" for item in plan.apply]
    return [*applied, *(f"delete {one.ref.kind} {one.ref.name}" for one in plan.delete)]

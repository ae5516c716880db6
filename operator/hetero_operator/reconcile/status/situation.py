"""One look at a resource, put in order: the spec in force, the pods that should be there and those that are.

Whether ranks serve is the gateway's answer in this very look, about ranks that it talks to in one epoch. Kubelets probe
every few seconds, so their word counts only for ranks that no gateway speaks of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

from hetero_api.contract import LABEL_GATEWAY_REVISION, LABEL_REVISION, LABEL_ROLE, ROLE_GATEWAY
from hetero_api.group_state import GroupState
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.status import HeteroInferenceStatus, RestartsStatus
from hetero_api.v1.admin_pb2 import RankStatus
from hetero_operator.reconcile import budget
from hetero_operator.reconcile.inventory import DEPLOYMENT, STATEFUL_SET, Inventory, is_leaving, label_of
from hetero_operator.reconcile.manifests.config import stored_resource
from hetero_operator.reconcile.model import GatewayReport, Object, Observed, Outcome, Plan
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.refusals import Refusal, read_spec
from hetero_operator.reconcile.revision import Revisions, revisions_in
from hetero_operator.reconcile.status.pods import (
    ExpectedPod,
    condition,
    expected_pods,
    has_ended,
    is_ready,
    is_up,
    rank_pods,
)
from hetero_operator.reconcile.status.text import parsed_time, stored_status

logger = logging.getLogger(__name__)

T = TypeVar("T")

TO_BE_KNOWN: Final = timedelta(seconds=5)
"""Time in which every node and router learns of a gateway that has become ready, and sends it calls."""
FORMED_STATES = frozenset({GroupState.LOADING, GroupState.READY, GroupState.ASLEEP})


@dataclass(frozen=True, slots=True)
class Basis:
    """The spec and revisions that pods are measured by."""

    spec: HeteroInferenceSpec
    revisions: Revisions
    runs: bool
    """Whether pods are wanted."""


@dataclass(frozen=True, slots=True)
class Situation:
    """One look at a resource, put in order."""

    observed: Observed
    plan: Plan
    outcome: Outcome
    stored: HeteroInferenceStatus
    """The status as it was last reported."""
    inventory: Inventory
    names: Names
    basis: Basis | None
    """Basis of the spec in force; None: nothing was ever put in force."""
    expected: tuple[ExpectedPod, ...]
    """Rank pods, in rank order."""
    rank_pods: Mapping[str, Object]
    """Pods of ranks by name."""
    gateway_pod: Object | None
    """The gateway in force, or the one that is leaving when there is no other."""
    answer: GatewayReport | None
    """Answer of the gateway in force; None when it did not answer."""
    restarts: RestartsStatus
    """Restarts of ranks, this look's included."""

    @classmethod
    def from_look(cls, observed: Observed, plan: Plan, outcome: Outcome) -> Situation:
        """Put an observation in order."""
        names = Names.of(observed)
        inventory = Inventory.from_observed(observed)
        basis = _basis(observed, plan, inventory, names)
        gateway_pod, stored = _gateway_pod(observed), stored_status(observed.resource)
        return cls(
            observed=observed,
            plan=plan,
            outcome=outcome,
            stored=stored,
            inventory=inventory,
            names=names,
            basis=basis,
            expected=expected_pods(names, basis.spec) if basis else (),
            rank_pods=rank_pods(observed),
            gateway_pod=gateway_pod,
            answer=_answer(observed.gateway, gateway_pod, basis),
            restarts=_restarts(observed, basis, stored, inventory),
        )

    @property
    def generation(self) -> int:
        """Generation of the observed resource."""
        return int(self.observed.resource["metadata"].get("generation", 0))

    @property
    def runs(self) -> bool:
        """Whether pods are wanted."""
        return self.basis is not None and self.basis.runs

    @property
    def live_pods(self) -> list[Object]:
        """Pods that have not ended: a ReplicaSet keeps a gateway's that was evicted, for ever."""
        return [pod for pod in self.observed.pods if not has_ended(pod)]

    @property
    def is_gateway_in_service(self) -> bool:
        """Whether clients are sent to the gateway in force, because its kubelet calls it ready."""
        pod = self.gateway_pod
        return pod is not None and is_ready(pod) and not self.is_outdated(pod)

    @property
    def known_from(self) -> datetime | None:
        """Moment from which all callers know the gateway in force; None: it is not in service."""
        ready = condition(self.gateway_pod, "Ready") if self.gateway_pod is not None else {}
        since = parsed_time(str(ready.get("lastTransitionTime", ""))) if self.is_gateway_in_service else None
        return None if since is None else since + TO_BE_KNOWN

    @property
    def probe_error(self) -> str:
        """Reason for which the gateway in force did not answer; "" when it did, or could not be asked."""
        report = self.observed.gateway
        pod = self.gateway_pod
        return report.error if report is not None and pod is not None and report.pod == pod["metadata"]["name"] else ""

    def is_outdated(self, pod: Object) -> bool:
        """Return whether a pod is of another spec than the one in force."""
        return self.basis is not None and _is_outdated(pod, self.basis.revisions)

    def from_answer(self, read: Callable[[GatewayReport], T]) -> T | None:
        """Return what `read` makes of the gateway's answer; None without one, or if it says what cannot be so.

        Its numbers may be any: the gateway may be of another version, or broken.
        """
        if self.answer is None:
            return None
        try:
            return read(self.answer)
        except (ValueError, OverflowError) as error:
            name = self.names.resource
            logger.warning("%s: the status leaves out what the gateway answers, which cannot be so: %s", name, error)
            return None

    def reported(self, pod: ExpectedPod) -> tuple[RankStatus, ...]:
        """Return the gateway's report about a pod's ranks; empty when it does not answer."""
        return tuple(item for item in self.answer.group.ranks if item.place.rank in pod.ranks) if self.answer else ()

    def has_joined(self, pod: ExpectedPod) -> bool:
        """Return whether the gateway talks to all ranks of a pod."""
        reported = self.reported(pod)
        return len(reported) == pod.num_ranks and all(
            item.joined and item.place.pod_name == pod.name for item in reported
        )

    def has_loaded(self, pod: ExpectedPod) -> bool:
        """Return whether all ranks of a pod hold their weights; a group is READY only then, even if that is nothing."""
        is_group_ready = self.answer is not None and self.answer.takes_requests
        return self.has_joined(pod) and (is_group_ready or all(item.weight_bytes > 0 for item in self.reported(pod)))

    def statefulset(self, rank_set: str) -> Object | None:
        """Return the StatefulSet of a set of rank pods, None if there is none."""
        return self.inventory.named(STATEFUL_SET, self.names.rank_set(rank_set), group="apps")

    def deployment(self) -> Object | None:
        """Return the gateway's Deployment, None if there is none."""
        return self.inventory.named(DEPLOYMENT, self.names.gateway, group="apps")


def _basis(observed: Observed, plan: Plan, inventory: Inventory, names: Names) -> Basis | None:
    spec = read_spec(observed.resource)
    if not plan.refusal and not isinstance(spec, Refusal):
        runs = spec.replicas > 0 and not spec.suspend
        return Basis(spec, revisions_in(observed, spec), runs)
    return _basis_in_force(inventory, names)


def _basis_in_force(inventory: Inventory, names: Names) -> Basis | None:
    """Return what an earlier spec, not the refused one, put in force."""
    config = inventory.config_in_force(names)
    spec = read_spec(stored_resource(config)) if config is not None else None
    if config is None or spec is None or isinstance(spec, Refusal):
        return None
    deployment: Mapping[str, Any] = inventory.named(DEPLOYMENT, names.gateway, group="apps") or {"spec": {}}
    revisions = Revisions(label_of(config, LABEL_REVISION), label_of(config, LABEL_GATEWAY_REVISION))
    return Basis(spec, revisions, runs=deployment["spec"].get("replicas", 0) > 0)


def _restarts(
    observed: Observed, basis: Basis | None, stored: HeteroInferenceStatus, inventory: Inventory
) -> RestartsStatus:
    if basis is None:
        return stored.restarts
    return budget.account(observed, basis.spec, inventory, revision=basis.revisions.ranks, runs=basis.runs)


def _gateway_pod(observed: Observed) -> Object | None:
    """Return the youngest that is not being deleted and has not ended; Recreate leaves no two."""
    pods = [pod for pod in observed.pods if label_of(pod, LABEL_ROLE) == ROLE_GATEWAY]
    pods.sort(
        key=lambda pod: (not has_ended(pod), not is_leaving(pod), str(pod["metadata"].get("creationTimestamp", "")))
    )
    return pods[-1] if pods else None


def _answer(report: GatewayReport | None, pod: Object | None, basis: Basis | None) -> GatewayReport | None:
    """Return the report, when it is an answer of the gateway that runs the spec in force."""
    if report is None or report.error or pod is None or basis is None or is_leaving(pod):
        return None
    of_this_pod = report.pod == pod["metadata"]["name"]
    return report if of_this_pod and not _is_outdated(pod, basis.revisions) else None


def _is_outdated(pod: Object, revisions: Revisions) -> bool:
    """Return whether a pod has another spec; a gateway also other fields of its own."""
    is_gateway = label_of(pod, LABEL_ROLE) == ROLE_GATEWAY
    label, wanted = (LABEL_GATEWAY_REVISION, revisions.gateway) if is_gateway else (LABEL_REVISION, revisions.ranks)
    return label_of(pod, label) != wanted


def is_serving(situation: Situation) -> bool:
    """Return whether requests are served: the gateway says so of every rank, and all pods run."""
    answer, basis = situation.answer, situation.basis
    if answer is None or basis is None or not situation.runs or not situation.is_gateway_in_service:
        return False
    if not (answer.takes_requests and answer.serving and not answer.group.failed and is_formed(situation)):
        return False
    pods = [(situation.rank_pods.get(item.name), item.container) for item in situation.expected]
    all_run = all(pod is not None and is_up(pod, name) and not situation.is_outdated(pod) for pod, name in pods)
    return all_run and answer.group.stalled_s <= basis.spec.recovery.step_timeout_seconds


def is_formed(situation: Situation) -> bool:
    """Return whether the gateway reports all expected ranks in one epoch."""
    answer = situation.answer
    if answer is None or answer.state not in FORMED_STATES or not is_complete(situation, answer.group.ranks):
        return False
    return all(situation.has_joined(pod) for pod in situation.expected)


def is_rank_ready(situation: Situation, expected: ExpectedPod) -> bool:
    """Return whether a pod's ranks are ready: by the gateway's answer in this look, without it by the last probe."""
    pod = situation.rank_pods.get(expected.name)
    if pod is None or situation.is_outdated(pod):
        return False
    if situation.answer is None:
        return is_ready(pod)
    return situation.has_joined(expected) and (computes(situation, expected) or is_ready(pod))


def computes(situation: Situation, expected: ExpectedPod) -> bool:
    """Return whether a pod's ranks run in a group that is ready: nobody waits for them, whatever was probed last."""
    pod, answer = situation.rank_pods.get(expected.name), situation.answer
    if pod is None or answer is None or not answer.takes_requests:
        return False
    return is_up(pod, expected.container) and situation.has_joined(expected)


def is_complete(situation: Situation, ranks: Sequence[RankStatus]) -> bool:
    """Return whether the gateway reports exactly the ranks that we expect."""
    return len(ranks) == sum(pod.num_ranks for pod in situation.expected)

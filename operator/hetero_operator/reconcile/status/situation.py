"""One look at a resource, put in order: which spec is in force, which pods should be there, which are, who answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_api.contract import LABEL_GATEWAY_REVISION, LABEL_REVISION, LABEL_ROLE, ROLE_GATEWAY
from hetero_api.group_state import GroupState
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.status import HeteroInferenceStatus, RestartsStatus
from hetero_operator.reconcile import budget
from hetero_operator.reconcile.inventory import DEPLOYMENT, STATEFUL_SET, Inventory
from hetero_operator.reconcile.manifests.config import stored_resource
from hetero_operator.reconcile.model import GatewayReport, Object, Observed, ObservedRank, Outcome, Plan
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.ownership import is_leaving, label_of
from hetero_operator.reconcile.refusals import Refusal, read_spec
from hetero_operator.reconcile.revision import Revisions, revisions_of
from hetero_operator.reconcile.status.expected import ExpectedPod, expected_pods, rank_pods
from hetero_operator.reconcile.status.pods import is_ready
from hetero_operator.reconcile.status.stored import stored_status

FORMED_STATES = frozenset({GroupState.LOADING, GroupState.READY, GroupState.ASLEEP})


@dataclass(frozen=True, slots=True)
class Basis:
    """What pods are measured by."""

    spec: HeteroInferenceSpec
    revisions: Revisions
    runs: bool
    """Whether pods are wanted."""


@dataclass(frozen=True, slots=True)
class Situation:
    """See the module."""

    observed: Observed
    plan: Plan
    outcome: Outcome
    stored: HeteroInferenceStatus
    """What was told last."""
    inventory: Inventory
    names: Names
    basis: Basis | None
    """Of the spec in force; None: nothing was ever put in force."""
    expected: tuple[ExpectedPod, ...]
    """Rank pods, in rank order."""
    rank_pods: Mapping[str, Object]
    """Pods of ranks by name."""
    gateway_pod: Object | None
    """The gateway in force, or the one that is leaving when there is no other."""
    answer: GatewayReport | None
    """What the gateway in force said; None when it did not answer."""
    restarts: RestartsStatus
    """Restarts of ranks, this look's included."""

    @classmethod
    def of(cls, observed: Observed, plan: Plan, outcome: Outcome) -> Situation:
        names = Names(observed.resource["metadata"]["name"])
        inventory = Inventory.of(observed)
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
        return int(self.observed.resource["metadata"].get("generation", 0))

    @property
    def runs(self) -> bool:
        """Whether pods are wanted."""
        return self.basis is not None and self.basis.runs

    @property
    def is_gateway_in_service(self) -> bool:
        """Whether clients are sent to the gateway in force, because its kubelet calls it ready."""
        pod = self.gateway_pod
        return pod is not None and is_ready(pod) and not self.is_outdated(pod)

    @property
    def probe_error(self) -> str:
        """Why the gateway in force did not answer; "" when it did, or could not be asked."""
        report = self.observed.gateway
        pod = self.gateway_pod
        return report.error if report is not None and pod is not None and report.pod == pod["metadata"]["name"] else ""

    def is_outdated(self, pod: Object) -> bool:
        """Whether a pod is of another spec than the one in force."""
        return self.basis is not None and _is_outdated(pod, self.basis.revisions)

    def told(self, pod: ExpectedPod) -> tuple[ObservedRank, ...]:
        """What the gateway says of a pod's ranks; empty when it does not answer."""
        return tuple(item for item in self.answer.ranks if item.rank in pod.ranks) if self.answer else ()

    def has_joined(self, pod: ExpectedPod) -> bool:
        """Whether the gateway talks to all ranks of a pod."""
        told = self.told(pod)
        return len(told) == pod.num_ranks and all(item.joined and item.pod == pod.name for item in told)

    def has_loaded(self, pod: ExpectedPod) -> bool:
        """Whether all ranks of a pod hold what they have to; a group is READY only then, be that nothing."""
        is_group_ready = self.answer is not None and self.answer.state is GroupState.READY
        return self.has_joined(pod) and (is_group_ready or all(item.loaded for item in self.told(pod)))

    def statefulset(self, pool: str) -> Object | None:
        return self.inventory.named(STATEFUL_SET, self.names.pool(pool), group="apps")

    def deployment(self) -> Object | None:
        return self.inventory.named(DEPLOYMENT, self.names.gateway, group="apps")


def _basis(observed: Observed, plan: Plan, inventory: Inventory, names: Names) -> Basis | None:
    spec = read_spec(observed.resource)
    if not plan.refusal and not isinstance(spec, Refusal):
        runs = spec.replicas > 0 and not spec.suspend
        return Basis(spec, revisions_of(observed.resource, spec), runs)
    return _basis_in_force(inventory, names)


def _basis_in_force(inventory: Inventory, names: Names) -> Basis | None:
    """What an earlier spec, not the refused one, put in force."""
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
    """The youngest that stays; Recreate leaves no two."""
    pods = [pod for pod in observed.pods if label_of(pod, LABEL_ROLE) == ROLE_GATEWAY]
    pods.sort(key=lambda pod: (not is_leaving(pod), str(pod["metadata"].get("creationTimestamp", ""))))
    return pods[-1] if pods else None


def _answer(report: GatewayReport | None, pod: Object | None, basis: Basis | None) -> GatewayReport | None:
    """The report, when it is an answer of the gateway that runs what is in force."""
    if report is None or report.error or pod is None or basis is None or is_leaving(pod):
        return None
    of_this_pod = report.pod == pod["metadata"]["name"]
    return report if of_this_pod and not _is_outdated(pod, basis.revisions) else None


def _is_outdated(pod: Object, revisions: Revisions) -> bool:
    """Whether a pod was made from another spec; a gateway also from other fields of its own."""
    is_gateway = label_of(pod, LABEL_ROLE) == ROLE_GATEWAY
    label, wanted = (LABEL_GATEWAY_REVISION, revisions.gateway) if is_gateway else (LABEL_REVISION, revisions.ranks)
    return label_of(pod, label) != wanted

"""The fields of the resource that only a cluster has a use for: images, scheduling, monitoring, network, disruption.

One machine (`hetero up`) has no use for them and accepts them, so that the same file serves both. What is handed
through to another system (tolerations, queue names, claims) keeps that system's names and meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from hetero_api.contract import GROUP
from hetero_api.spec_model import SecretKeyRef
from hetero_api.spec_types import (
    Annotations,
    Bytes,
    Image,
    LabelKey,
    Labels,
    LabelValue,
    ObjectName,
    Reason,
    Rule,
    ShortObjectName,
    SpecEnum,
    SpecModel,
    WholeMebibytes,
    left_out,
    spelled,
)

OWN_PREFIXES: Final = (f"{GROUP}/", "app.kubernetes.io/")
"""Labels and annotations that begin so are the operator's."""

MAX_REPLICAS: Final = 32
"""Most replicas of a resource, and most that a roll-out adds."""
PAGE_BYTES: Final = {"2Mi": 2 * 2**20, "1Gi": 2**30}
"""Bytes of a huge page, by its size as text."""


def leaves_ours_alone(field: str) -> Rule:
    """No key of a map is one that the operator sets."""

    def holds(model: object) -> bool:
        keys: Iterable[str] = getattr(model, field)
        return not any(key.startswith(OWN_PREFIXES) for key in keys)

    others = " && ".join(f"!k.startsWith('{prefix}')" for prefix in OWN_PREFIXES)
    return Rule(
        field,
        f"!has(self.{field}) || self.{field}.all(k, {others})",
        f"must hold no key of {' or '.join(OWN_PREFIXES)}: these are the operator's",
        holds,
        Reason.FORBIDDEN,
    )


class PullPolicy(SpecEnum):
    """Pull policy of images."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class GangScheduler(SpecEnum):
    """Scheduler that places all pods of a group at once."""

    NONE = "None"
    KUEUE = "Kueue"
    VOLCANO = "Volcano"


class SpreadPolicy(SpecEnum):
    """Strictness with which pods of a pool spread over nodes."""

    REQUIRED = "Required"
    PREFERRED = "Preferred"


class ImagesSpec(SpecModel):
    """Container images, where the operator's own are not wanted."""

    gpu_worker: Image | None = None
    """Image of GPU ranks."""
    cpu_worker: Image | None = None
    """Image of CPU ranks."""
    gateway: Image | None = None
    """Image of the gateway."""
    router: Image | None = None
    """Image of the router."""
    pull_policy: Annotated[PullPolicy, spelled(PullPolicy)] = PullPolicy.IF_NOT_PRESENT
    """When images are pulled."""
    pull_secrets: Annotated[list[ObjectName], Field(max_length=8)] = Field(default_factory=list)
    """Names of Secrets, in the resource's namespace, to pull images with."""


class Toleration(SpecModel):
    """A taint that pods tolerate, with Kubernetes' own fields."""

    rules: ClassVar[tuple[Rule, ...]] = (
        left_out("value", "is of no use with operator Exists; leave it out", where=("operator", "Exists")),
        Rule(
            "operator",
            "has(self.key) || self.operator == 'Exists'",
            "must be Exists where key is left out",
            lambda taint: taint.key is not None or taint.operator == "Exists",
        ),
        Rule(
            "effect",
            "!has(self.tolerationSeconds) || has(self.effect) && self.effect == 'NoExecute'",
            "must be NoExecute where tolerationSeconds is set",
            lambda taint: taint.toleration_seconds is None or taint.effect == "NoExecute",
        ),
    )

    key: LabelKey | None = None
    """The taint's key. Left out: every key."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Equal: the taint has this key and this value. Exists: it has this key."""
    value: LabelValue | None = None
    """The taint's value, for operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect. Left out: every effect."""
    toleration_seconds: Annotated[int | None, Field(ge=0, le=31_536_000)] = None
    """For NoExecute: seconds that the taint is tolerated. Left out: always."""


class PoolScheduling(SpecModel):
    """Where the pods of one pool may run, beyond what holds for all."""

    node_selector: Annotated[Labels, Field(max_length=64)] = Field(default_factory=dict)
    """Labels that this pool's nodes must have, beside those of spec.scheduling.nodeSelector."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(default_factory=list)
    """Taints that this pool's pods tolerate, beside those of spec.scheduling.tolerations."""


class TopologySpec(SpecModel):
    """Keeps the ranks near to one another."""

    key: LabelKey
    """Node label whose value names the domain, e.g. topology.kubernetes.io/zone."""
    policy: Annotated[SpreadPolicy, spelled(SpreadPolicy)] = SpreadPolicy.PREFERRED
    """Required: all ranks in one domain, or none starts. Preferred: where possible."""


class ReplicaSpreadSpec(SpecModel):
    """Keeps the ranks of different replicas apart, and their gateways."""

    key: LabelKey
    """Node label whose value names the domain, e.g. topology.kubernetes.io/zone."""
    policy: Annotated[SpreadPolicy, spelled(SpreadPolicy)] = SpreadPolicy.PREFERRED
    """Required: no domain has ranks, or gateways, of two replicas. Preferred: where possible."""


class GangSpec(SpecModel):
    """Hands the group to a scheduler that starts all pods or none."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "queue",
            "self.scheduler != 'Kueue' || has(self.queue)",
            "is required when scheduler is Kueue",
            lambda gang: gang.scheduler != GangScheduler.KUEUE or gang.queue is not None,
            Reason.REQUIRED,
        ),
        left_out("queue", "is for the schedulers Kueue and Volcano; set scheduler", where=("scheduler", "None")),
    )

    scheduler: Annotated[GangScheduler, spelled(GangScheduler)] = GangScheduler.NONE
    """Kueue: pod-group labels and the queue's name. Volcano: a PodGroup. None: neither."""
    queue: ShortObjectName | None = None
    """Queue of that scheduler; Kueue needs one (its LocalQueue)."""


class SchedulingSpec(SpecModel):
    """Where Kubernetes may put the pods."""

    scheduler_name: ObjectName | None = None
    """Scheduler of all pods, e.g. one that knows NUMA nodes. Default: the cluster's."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of all pods. Default: the cluster's."""
    node_selector: Annotated[Labels, Field(max_length=64)] = Field(default_factory=dict)
    """Labels that the nodes of all pods must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(default_factory=list)
    """Taints that all pods tolerate."""
    topology: TopologySpec | None = None
    """Keeps the ranks of all pools in one domain of nodes."""
    replica_spread: ReplicaSpreadSpec | None = None
    """Keeps replicas in different domains of nodes."""
    gang: GangSpec = GangSpec()
    """Starts all pods at once, or none."""


class RolloutStrategy(SpecEnum):
    """Way of a changed spec to the replicas."""

    ROLLING_UPDATE = "RollingUpdate"
    RECREATE = "Recreate"


class RolloutSpec(SpecModel):
    """How a changed spec reaches the replicas."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "maxUnavailable",
            "self.strategy != 'RollingUpdate' || self.maxUnavailable + self.maxSurge > 0",
            "must be more than 0 where maxSurge is 0",
            lambda rollout: (
                rollout.strategy != RolloutStrategy.ROLLING_UPDATE or rollout.max_unavailable + rollout.max_surge > 0
            ),
        ),
    )

    strategy: Annotated[RolloutStrategy, spelled(RolloutStrategy)] = RolloutStrategy.ROLLING_UPDATE
    """RollingUpdate: replica by replica; the next one makes way when the last one serves, so a spec that does not work
    stops at the first. Recreate: all replicas at once.
    """
    max_unavailable: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """RollingUpdate: replicas that may make way at a time."""
    max_surge: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0
    """RollingUpdate: further replicas that come first, with the changed spec, and leave last. With maxUnavailable 0 as
    many as asked for serve all the time, where nodes have room for more.
    """

    @property
    def surge(self) -> int:
        """Further replicas in force."""
        return self.max_surge if self.strategy == RolloutStrategy.ROLLING_UPDATE else 0


class ResourcesSpec(SpecModel):
    """Resources of a container; requests and limits are the same."""

    cpu_millis: Annotated[int, Field(ge=10, le=1_024_000)] = 1000
    """CPU in thousandths of a core."""
    memory: Bytes = 2 * 2**30
    """Memory, e.g. 2Gi."""


_MEBIBYTES: Final = (
    "int(self.perRank.substring(0, size(self.perRank) - 2)) * "
    "(self.perRank.endsWith('Ti') ? 1048576 : self.perRank.endsWith('Gi') ? 1024 : 1)"
)
"""CEL for mebibytes: before Kubernetes 1.29 CEL knows no quantities."""


class HugepagesSpec(SpecModel):
    """Huge pages for a rank's weights and cache."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "perRank",
            f"{_MEBIBYTES} % (self.size == '1Gi' ? 1024 : 2) == 0",
            "must be a multiple of size",
            lambda pages: pages.per_rank % PAGE_BYTES[pages.size] == 0,
        ),
    )

    size: Literal["2Mi", "1Gi"] = "2Mi"
    """Size of a page."""
    per_rank: WholeMebibytes
    """Huge pages a rank, e.g. 64Gi: a multiple of size. They are on top of memoryPerRank, and the node must have them
    reserved.
    """


class NumaClaimSpec(SpecModel):
    """CPUs through Dynamic Resource Allocation instead of the kubelet's static CPU manager."""

    device_class_name: ObjectName
    """DeviceClass of the driver that hands out CPUs, e.g. dra.cpu."""


class MonitoringSpec(SpecModel):
    """Objects offered to Prometheus."""

    rules: ClassVar[tuple[Rule, ...]] = (leaves_ours_alone("labels"),)

    pod_monitor: bool = True
    """Make a PodMonitor, where the cluster has that API (monitoring.coreos.com)."""
    interval_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """Seconds between two scrapes."""
    labels: Annotated[Labels, Field(max_length=16)] = Field(default_factory=dict)
    """Labels of the PodMonitor, by which a Prometheus may choose it."""
    key_secret_ref: SecretKeyRef | None = None
    """Secret with the key of role metrics that Prometheus shows the gateway, where gateway.auth asks for keys."""


class ClientSource(SpecEnum):
    """Where clients of the gateway may be."""

    NAMESPACE = "Namespace"
    ALL = "All"


class NetworkPolicySpec(SpecModel):
    """Who may talk to the group's pods."""

    enabled: bool = True
    """Make a NetworkPolicy for the ranks and one for the gateway: ranks talk to one another and to the gateway only."""
    clients_from: Annotated[ClientSource, spelled(ClientSource)] | None = None
    """Where clients of the gateway's doors may be. Namespace: pods of the resource's namespace. All: anywhere, which
    needs gateway.auth. Default: Namespace, or All where gateway.service.type is NodePort or LoadBalancer.
    """
    metrics_from: Annotated[list[ShortObjectName], Field(max_length=16)] = Field(default_factory=list)
    """Namespaces whose pods may scrape metrics of gateway and ranks, e.g. [monitoring]. Before Kubernetes 1.21 they
    need the label kubernetes.io/metadata.name. Default: anyone may. Probes of a node's kubelet are always let in.
    """
    allow_model_egress: bool = True
    """Let pods fetch an hf:// model: port 443 of any address. Unused by other models."""


class DisruptionBudgetSpec(SpecModel):
    """Protection from voluntary evictions."""

    enabled: bool = False
    """Make a PodDisruptionBudget for each replica, which lets its pods be evicted while all other replicas serve. Ready
    ranks of one that is alone are never evicted, which keeps their nodes from being drained; its gateway may be. A
    router's pods go one at a time. From Kubernetes 1.27 on, pods that are not ready may always be evicted.
    """


class PodMetadataSpec(SpecModel):
    """Labels and annotations that all pods get, for other systems to read."""

    rules: ClassVar[tuple[Rule, ...]] = (leaves_ours_alone("labels"), leaves_ours_alone("annotations"))

    labels: Annotated[Labels, Field(max_length=32)] = Field(default_factory=dict)
    """Labels of all pods."""
    annotations: Annotated[Annotations, Field(max_length=32)] = Field(default_factory=dict)
    """Annotations of all pods."""

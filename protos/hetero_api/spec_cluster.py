"""The fields of the resource that only a cluster has a use for: images, scheduling, monitoring, network, disruption.

One machine (`hetero up`) has no use for them and accepts them, so that the same file serves both. What is handed
through to another system (tolerations, queue names, claims) keeps that system's names and meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from hetero_api.contract import GROUP
from hetero_api.rules import Reason, Rule
from hetero_api.spec_types import (
    Annotations,
    Bytes,
    Image,
    LabelKey,
    Labels,
    LabelValue,
    ObjectName,
    ShortObjectName,
    SpecEnum,
    SpecModel,
    WholeMebibytes,
    spelled,
)

OWN_PREFIXES: Final = (f"{GROUP}/", "app.kubernetes.io/")
"""Labels and annotations that begin so are the operator's."""

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

    gpu_worker: Annotated[Image | None, Field(description="Image of GPU ranks.")] = None
    cpu_worker: Annotated[Image | None, Field(description="Image of CPU ranks.")] = None
    gateway: Annotated[Image | None, Field(description="Image of the gateway.")] = None
    pull_policy: Annotated[PullPolicy, spelled(PullPolicy), Field(description="When images are pulled.")] = (
        PullPolicy.IF_NOT_PRESENT
    )
    pull_secrets: Annotated[
        list[ObjectName],
        Field(max_length=8, description="Names of Secrets, in the resource's namespace, to pull images with."),
    ] = Field(default_factory=list)


class Toleration(SpecModel):
    """A taint that pods tolerate, with Kubernetes' own fields."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "value",
            "self.operator != 'Exists' || !has(self.value)",
            "is of no use with operator Exists; leave it out",
            lambda taint: taint.operator != "Exists" or taint.value is None,
            Reason.FORBIDDEN,
        ),
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

    key: Annotated[LabelKey | None, Field(description="The taint's key. Left out: every key.")] = None
    operator: Annotated[
        Literal["Exists", "Equal"],
        Field(description="Equal: the taint has this key and this value. Exists: it has this key."),
    ] = "Equal"
    value: Annotated[LabelValue | None, Field(description="The taint's value, for operator Equal.")] = None
    effect: Annotated[
        Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None,
        Field(description="The taint's effect. Left out: every effect."),
    ] = None
    toleration_seconds: Annotated[
        int | None,
        Field(ge=0, le=31_536_000, description="For NoExecute: seconds that the taint is tolerated. Left out: always."),
    ] = None


class PoolScheduling(SpecModel):
    """Where the pods of one pool may run, beyond what holds for all."""

    node_selector: Annotated[
        Labels,
        Field(
            max_length=64,
            description="Labels that this pool's nodes must have, beside those of spec.scheduling.nodeSelector.",
        ),
    ] = Field(default_factory=dict)
    tolerations: Annotated[
        list[Toleration],
        Field(
            max_length=32,
            description="Taints that this pool's pods tolerate, beside those of spec.scheduling.tolerations.",
        ),
    ] = Field(default_factory=list)


class TopologySpec(SpecModel):
    """Keeps the ranks near to one another."""

    key: Annotated[
        LabelKey,
        Field(description="Node label whose value names the domain, e.g. topology.kubernetes.io/zone."),
    ]
    policy: Annotated[
        SpreadPolicy,
        spelled(SpreadPolicy),
        Field(description="Required: all ranks in one domain, or none starts. Preferred: where possible."),
    ] = SpreadPolicy.PREFERRED


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
        Rule(
            "queue",
            "self.scheduler != 'None' || !has(self.queue)",
            "is for the schedulers Kueue and Volcano; set scheduler",
            lambda gang: gang.scheduler != GangScheduler.NONE or gang.queue is None,
            Reason.FORBIDDEN,
        ),
    )

    scheduler: Annotated[
        GangScheduler,
        spelled(GangScheduler),
        Field(description="Kueue: pod-group labels and the queue's name. Volcano: a PodGroup. None: neither."),
    ] = GangScheduler.NONE
    queue: Annotated[
        ShortObjectName | None, Field(description="Queue of that scheduler; Kueue needs one (its LocalQueue).")
    ] = None


class SchedulingSpec(SpecModel):
    """Where Kubernetes may put the pods."""

    scheduler_name: Annotated[
        ObjectName | None,
        Field(description="Scheduler of all pods, e.g. one that knows NUMA nodes. Default: the cluster's."),
    ] = None
    priority_class_name: Annotated[
        ObjectName | None, Field(description="PriorityClass of all pods. Default: the cluster's.")
    ] = None
    node_selector: Annotated[
        Labels, Field(max_length=64, description="Labels that the nodes of all pods must have.")
    ] = Field(default_factory=dict)
    tolerations: Annotated[list[Toleration], Field(max_length=32, description="Taints that all pods tolerate.")] = (
        Field(default_factory=list)
    )
    topology: Annotated[
        TopologySpec | None, Field(description="Keeps the ranks of all pools in one domain of nodes.")
    ] = None
    gang: Annotated[GangSpec, Field(description="Starts all pods at once, or none.")] = GangSpec()


class ResourcesSpec(SpecModel):
    """Resources of a container; requests and limits are the same."""

    cpu_millis: Annotated[int, Field(ge=10, le=1_024_000, description="CPU in thousandths of a core.")] = 1000
    memory: Annotated[Bytes, Field(description="Memory, e.g. 2Gi.")] = 2 * 2**30


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

    size: Annotated[Literal["2Mi", "1Gi"], Field(description="Size of a page.")] = "2Mi"
    per_rank: Annotated[
        WholeMebibytes,
        Field(
            description="Huge pages a rank, e.g. 64Gi: a multiple of size. They are on top of memoryPerRank, and the "
            "node must have them reserved."
        ),
    ]


class NumaClaimSpec(SpecModel):
    """CPUs through Dynamic Resource Allocation instead of the kubelet's static CPU manager."""

    device_class_name: Annotated[
        ObjectName, Field(description="DeviceClass of the driver that hands out CPUs, e.g. dra.cpu.")
    ]


class MonitoringSpec(SpecModel):
    """Objects offered to Prometheus."""

    rules: ClassVar[tuple[Rule, ...]] = (leaves_ours_alone("labels"),)

    pod_monitor: Annotated[
        bool, Field(description="Make a PodMonitor, where the cluster has that API (monitoring.coreos.com).")
    ] = True
    interval_seconds: Annotated[int, Field(ge=1, le=3600, description="Seconds between two scrapes.")] = 30
    labels: Annotated[
        Labels, Field(max_length=16, description="Labels of the PodMonitor, by which a Prometheus may choose it.")
    ] = Field(default_factory=dict)


class NetworkPolicySpec(SpecModel):
    """Who may talk to the group's pods."""

    enabled: Annotated[
        bool,
        Field(
            description="Make a NetworkPolicy for the ranks and one for the gateway: ranks talk to one another and to "
            "the gateway only."
        ),
    ] = True
    allow_model_egress: Annotated[
        bool,
        Field(description="Let pods fetch an hf:// model: port 443 of any address. Unused by other models."),
    ] = True


class DisruptionBudgetSpec(SpecModel):
    """Protection from voluntary evictions."""

    enabled: Annotated[
        bool,
        Field(
            description="Make a PodDisruptionBudget that allows no rank to be evicted. It also keeps nodes from being "
            "drained."
        ),
    ] = False


class PodMetadataSpec(SpecModel):
    """Labels and annotations that all pods get, for other systems to read."""

    rules: ClassVar[tuple[Rule, ...]] = (leaves_ours_alone("labels"), leaves_ours_alone("annotations"))

    labels: Annotated[Labels, Field(max_length=32, description="Labels of all pods.")] = Field(default_factory=dict)
    annotations: Annotated[Annotations, Field(max_length=32, description="Annotations of all pods.")] = Field(
        default_factory=dict
    )

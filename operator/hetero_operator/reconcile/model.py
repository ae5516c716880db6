"""Data between observing, planning, executing and reporting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple

from hetero_api.group_state import GroupState
from hetero_api.v1.admin_pb2 import GetTopologyResponse

Object = Mapping[str, Any]
"""A Kubernetes object as decoded JSON."""


class ObjectRef(NamedTuple):
    """Names an object within the resource's namespace."""

    api_version: str
    kind: str
    name: str

    @classmethod
    def from_object(cls, item: Object) -> ObjectRef:
        """Return the reference to an object."""
        return cls(item["apiVersion"], item["kind"], item["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The API server's capabilities, by discovery."""

    version: tuple[int, int]
    """Major and minor of Kubernetes, e.g. (1, 33)."""
    kinds: frozenset[tuple[str, str]]
    """(apiVersion, kind) of every optional kind that exists, e.g. ("policy/v1", "PodDisruptionBudget")."""

    def has(self, api_version: str, kind: str) -> bool:
        """Return whether the server offers an optional kind."""
        return (api_version, kind) in self.kinds


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """Settings of the installation that manifests depend on."""

    gateway_image: str
    cpu_worker_image: str
    gpu_worker_image: str
    operator_version: str
    cluster_domain: str = "cluster.local"
    operator_namespace: str = ""
    """Where the operator runs; "" outside a cluster."""
    run_as_user: int = 65532
    """0: the cluster gives pods a user and groups, as OpenShift does."""
    inside_tls: bool = False
    """Whether gateway, ranks and operator know one another by certificates."""
    any_address: str = "0.0.0.0"
    """What gateways, routers and responders listen on; "::" where pods have addresses of IPv6."""
    router_image: str = ""
    """"" where they were stored by a version that knew no router."""


ANY_NAME: Final = "*"
"""Entry of a list of allowed names that allows every name."""

DEFAULT_DNS: Final = (
    "kube-system/k8s-app=kube-dns",
    "openshift-dns/dns.operator.openshift.io/daemonset-dns=default",
    "kube-system/k8s-app=node-local-dns",
    "169.254.20.10/32",
    "169.254.25.10/32",
    "169.254.169.254/32",
)
"""Where clusters have their name servers.

They are kube-dns and CoreDNS, OpenShift's, NodeLocal DNSCache on each node (as pods where Cilium redirects to it, at
its own address and at kubespray's), and Cloud DNS of GKE.
"""


@dataclass(frozen=True, slots=True)
class Policy:
    """Names that resources may use and users that their pods run as, as whoever runs the operator sets it.

    In an allowed name `*` stands for any text; folders are allowed with everything below them.
    """

    allowed_host_paths: tuple[str, ...] = ()
    """Folders of nodes that pods may mount; "/" allows all."""
    allowed_images: tuple[str, ...] = (ANY_NAME,)
    allowed_secrets: tuple[str, ...] = (ANY_NAME,)
    allowed_priority_classes: tuple[str, ...] = (ANY_NAME,)
    allowed_schedulers: tuple[str, ...] = (ANY_NAME,)
    allowed_runtime_classes: tuple[str, ...] = (ANY_NAME,)
    namespace_users: tuple[int, int] | None = None
    """First and last of the uids of which each namespace's pods get their own; None: all run as the same user."""
    cluster_dns: tuple[str, ...] = DEFAULT_DNS
    """Name servers that pods may ask: NAMESPACE/LABEL=VALUE selects pods, other entries are CIDRs; ANY_NAME: any."""
    api_server_ports: tuple[int, ...] = (443, 6443)
    """Ports of the API server: that of its Service, and the one that it listens on, by which policies see it."""


@dataclass(frozen=True, slots=True)
class PodEvent:
    """A Warning that the cluster recorded about a pod."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """A gateway's answer, or the reason why there is none; `error` is "" when it answered."""

    pod: str
    """Name of the gateway's pod that was asked."""
    error: str = ""
    group: GetTopologyResponse = field(default_factory=GetTopologyResponse)
    """Answer of Admin.GetTopology; empty when there is none."""
    serving: bool = False
    """Whether grpc.health.v1 calls hetero.v1.Inference SERVING."""

    @property
    def state(self) -> GroupState:
        """State of the group."""
        return GroupState.from_proto(self.group.state)

    @property
    def takes_requests(self) -> bool:
        """Whether ranks are there for requests: they compute, or they rest until the next request (spec.idle)."""
        rests = self.state is GroupState.ASLEEP and self.group.idle.rests
        return rests or self.state is GroupState.READY


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that a reconcile knows, taken at `now`."""

    resource: Object
    """The HeteroInference as stored."""
    owned: Sequence[Object]
    """Every object but pods that carries LABEL_NAME with the resource's name, of every kind that we make."""
    pods: Sequence[Object]
    """Every pod that carries that label."""
    failed_pods: Sequence[Object]
    """Pods with that label that had failed and are gone, the last of each name."""
    now: datetime
    """With a time zone."""
    capabilities: Capabilities
    options: RenderOptions
    policy: Policy
    nodes: Mapping[str, Object | None] = field(default_factory=dict)
    """Nodes that were asked for, by name: None does not exist. A name that is missing is not known."""
    pod_events: Mapping[str, Sequence[PodEvent]] = field(default_factory=dict)
    """Warnings by uid of the pod, newest first, of pods that wait."""
    gateway: GatewayReport | None = None
    """Report of replica 0's gateway, or of a view's; None: no gateway pod has an address yet."""
    gateways: Mapping[int, GatewayReport] = field(default_factory=dict)
    """Reports of the gateways of further replicas, by ordinal."""
    ordinal: int = 0
    """The replica that a view is of."""
    revisions: tuple[str, str] | None = None
    """Revisions of ranks and gateway of a view with an earlier spec; None: the spec is the one as written."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """An object to delete, if it still is the one that was seen."""

    ref: ObjectRef
    uid: str
    reason: str
    grace_period_s: int | None = None
    """None: the object's own. 0: at once, without a kubelet's word; only for pods on dead nodes."""


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A Secret whose values nobody chooses: planning has no randomness, so the executor makes them up."""

    manifest: Object
    """The Secret without `data` and `stringData`."""
    generated_keys: tuple[str, ...] = ()
    """Keys of `data`; each gets a random token of its own, at least 256 bits, printable ASCII, no line end."""
    gateway_names: tuple[str, ...] = ()
    """DNS names of the gateway whose group's certificates it holds; empty: it holds none."""
    renews: str = ""
    """uid of the Secret whose place it takes, and whose authority goes on; "" where there is none."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The writes to do, in this order: create secrets, apply, delete."""

    create: tuple[NewSecret, ...] = ()
    """Secrets that must never be overwritten: a plain create. One that is there already (409) is as good as done
    when it is this resource's, and FailureKind.FOREIGN when not."""
    apply: tuple[Object, ...] = ()
    """Objects that are not there or not as they should be."""
    delete: tuple[Deletion, ...] = ()
    refusal: tuple[str, ...] = ()
    """Problems of the spec, `path: message`; then nothing of it is applied and what runs is left alone."""
    refusal_reason: str = ""
    """PascalCase; "" when the spec is accepted."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.create or self.apply or self.delete)


class FailureKind(StrEnum):
    """Kind of refusal of a write."""

    FOREIGN = "Foreign"
    """An object of that name belongs to someone else."""
    INVALID = "Invalid"
    """422 or 400: the object is wrong and will be wrong again."""
    FORBIDDEN = "Forbidden"
    """403: a quota, an admission plugin, or a verb that the operator lacks."""
    TRANSIENT = "Transient"
    """Everything that trying again may cure."""


@dataclass(frozen=True, slots=True)
class WriteFailure:
    """One write that was not done."""

    ref: ObjectRef
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The writes of a plan that failed."""

    failures: tuple[WriteFailure, ...] = ()
    stale: bool = False
    """The cache lacked something that is there; it has it now, so plan again. Nothing was written."""
    retry_after_s: float = 0.0
    """Seconds that the server asked to wait."""


class Transition(NamedTuple):
    """A Kubernetes Event to record on the resource."""

    type: str
    """Normal or Warning."""
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Report:
    """The status to write, Events, and when to look again."""

    status: Object
    """The whole new status, decoded JSON."""
    events: tuple[Transition, ...] = ()
    look_again_s: float | None = None
    """Seconds after which time alone changes something; None: only the resync."""

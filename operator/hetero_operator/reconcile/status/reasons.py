"""Reasons that a condition or an Event can have, with what each means and what to do about it, and troubles.

A trouble keeps a container, a pod or a group from being ready; it has a reason and a level.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final


class Reason(StrEnum):
    """Reason of a condition."""

    # --- all is well -------------------------------------------------------------------------------------
    SERVING = "Serving"
    """The group is formed, steps go forward, and the gateway takes requests."""
    ACCEPTED = "Accepted"
    """The spec is valid and in force."""
    SCHEDULED = "Scheduled"
    """Every pod has a node."""
    LOADED = "Loaded"
    """Every rank has its weights in memory."""
    FORMED = "Formed"
    """All ranks are in one epoch."""
    PINNED = "Pinned"
    """Every CPU rank read back from the kernel that its cores and memory are of one NUMA node."""
    AS_EXPECTED = "AsExpected"
    """Nothing is broken."""
    COMPLETE = "Complete"
    """There is nothing left to work toward."""
    NOT_SUSPENDED = "NotSuspended"
    """Pods are wanted."""
    NOT_EXPOSED = "NotExposed"
    """Clients of the gateway are of its namespace, or have to show a key or a certificate."""

    # --- asked for by the user ---------------------------------------------------------------------------
    SUSPENDED = "Suspended"
    """spec.suspend is true; set it to false to run again."""
    SCALED_TO_ZERO = "ScaledToZero"
    """spec.replicas is 0; scale to 1 to run again."""
    STOPPING = "Stopping"
    """No pods are wanted; the last of them are ending."""

    EXPOSED_AS_ASKED = "ExposedAsAsked"
    """Whoever reaches the gateway may use it, as spec.gateway.auth.mode None says."""

    # --- under way ---------------------------------------------------------------------------------------
    ROLLING_OUT = "RollingOut"
    """Pods of an earlier spec make way for those of the present one."""
    ROLLOUT_STOPPED = "RolloutStopped"
    """The first replicas with a changed spec are broken; the others keep the spec before it, which goes back if it is
    applied again."""
    STARTING = "Starting"
    """A pod is being created or its containers are; nothing failed so far."""
    SCHEDULING_GATED = "SchedulingGated"
    """A queue or another controller holds the pod back before it is scheduled."""
    FETCHING_MODEL = "FetchingModel"
    """An init container brings the model's files."""
    WAITING_FOR_RANKS = "WaitingForRanks"
    """A rank's pod runs, and the rank has not joined the gateway yet."""
    FORMING = "Forming"
    """All ranks are there and meet."""
    ASLEEP = "Asleep"
    """An administrator put the group to sleep: it has given up memory and refuses requests. `hetero wake` ends it."""
    LOADING_MODEL = "LoadingModel"
    """Ranks read their weights, allocate their caches and warm up."""
    DRAINING = "Draining"
    """The gateway finishes what it has and takes no more."""

    # --- the spec, and what the API server says of it ----------------------------------------------------
    INVALID_SPEC = "InvalidSpec"
    """The spec breaks a rule that the message names; it changes nothing until that is mended."""
    EXPOSED = "Exposed"
    """Clients beyond the namespace reach the gateway, which asks for nothing; set spec.gateway.auth, or clientsFrom."""
    NOT_ALLOWED = "NotAllowed"
    """The spec names a folder, image, Secret or class that the operator's settings do not allow; it changes nothing."""
    NOT_SUPPORTED = "NotSupportedByCluster"
    """The spec asks for something that this cluster has no API for."""
    NAME_CONFLICT = "NameConflict"
    """An object of a needed name belongs to somebody else; delete that, or name the resource otherwise."""
    APPLY_FORBIDDEN = "ApplyForbidden"
    """The API server forbade a write: a quota, an admission policy, or a right that the operator lacks."""
    APPLY_REJECTED = "ApplyRejected"
    """The API server called an object of ours invalid; the message says why."""
    API_UNAVAILABLE = "APIUnavailable"
    """The API server did not take a write; the operator tries again."""

    # --- pods that do not come up ------------------------------------------------------------------------
    POD_CREATION_FAILED = "PodCreationFailed"
    """A pod may not be created: mostly a quota or an admission policy, which the message names."""
    RANK_UNSCHEDULABLE = "RankUnschedulable"
    """No node fits the rank's pod; the message is the scheduler's. Compare nodes with cores, memory and selectors."""
    GATEWAY_UNSCHEDULABLE = "GatewayUnschedulable"
    """No node fits the gateway's pod; the message is the scheduler's."""
    TOPOLOGY_AFFINITY_ERROR = "TopologyAffinityError"
    """The node's Topology Manager could not align the pod's cores and devices. Ask for less than one NUMA node has."""
    POD_REJECTED = "PodRejected"
    """The node refused the pod for another reason, which the message tells."""
    POD_EVICTED = "PodEvicted"
    """The node or a pod of higher priority drove the pod out; the message says why."""
    POD_FAILED = "PodFailed"
    """The pod ended as a whole; the message has the node's reason."""
    POD_TERMINATING = "PodTerminating"
    """The pod was deleted, and is created again when it has ended."""
    IMAGE_PULL = "ImagePull"
    """An image cannot be pulled; the message has the registry's answer. Check its name and spec.images.pullSecrets."""
    CONTAINER_START_FAILED = "ContainerStartFailed"
    """A container cannot be made or started: a Secret that is missing, a program that is not in the image."""
    SANDBOX_FAILED = "SandboxFailed"
    """The node cannot set up the pod's sandbox, mostly its network."""
    VOLUME_NOT_READY = "VolumeNotReady"
    """A volume other than the model's cannot be mounted."""
    MODEL_VOLUME_NOT_READY = "ModelVolumeNotReady"
    """The model's volume or cache cannot be mounted; check spec.model.uri and spec.model.cache, and the URIs of a draft
    model and of adapters."""
    MODEL_DOWNLOAD_FAILED = "ModelDownloadFailed"
    """The init container that brings the model, or an adapter, fails; the message is its last line."""
    INIT_CONTAINER_FAILED = "InitContainerFailed"
    """An init container that is not ours fails."""
    STARTUP_TIMEOUT = "StartupTimeout"
    """The kubelet stopped a container that was not up in time; see spec.recovery.startupTimeoutSeconds."""

    # --- ranks that break --------------------------------------------------------------------------------
    RANK_EXITED = "RankExited"
    """A rank's container ended and is started again; the message has its exit code and last line."""
    RANK_CRASH_LOOP = "RankCrashLoop"
    """A rank's container ends again and again."""
    RANK_OUT_OF_MEMORY = "RankOutOfMemory"
    """The kernel killed a rank that took more than its limit; raise memoryPerRank, or give the rank less."""
    RANK_HUNG = "RankHung"
    """A step did not end within spec.recovery.stepTimeoutSeconds, or a rank's liveness probe failed."""
    RANK_NOT_READY = "RankNotReady"
    """A rank's pod runs and says that it is not ready."""
    NODE_LOST = "NodeLost"
    """A pod's node does not answer, is gone, or has not been ready for longer than the start of a kubelet takes; past
    spec.recovery.nodeLostTimeoutSeconds the pod is replaced."""
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    """Ranks restarted more than spec.recovery.maxRestarts times; tries come in growing gaps. A new spec resets it."""
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout"
    """Ranks did not meet or load within spec.recovery.rendezvousTimeoutSeconds."""
    EPOCH_ENDED = "EpochEnded"
    """The group lost its epoch, e.g. with a rank; it forms the next one when all ranks are back."""
    GROUP_FAILED = "GroupFailed"
    """The gateway gave up, because trying again cannot help; the message says why."""
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    """Nothing moved for startupTimeoutSeconds and rendezvousTimeoutSeconds together."""

    # --- the gateway -------------------------------------------------------------------------------------
    GATEWAY_EXITED = "GatewayExited"
    """The gateway's container ended and is started again."""
    GATEWAY_CRASH_LOOP = "GatewayCrashLoop"
    """The gateway's container ends again and again."""
    GATEWAY_OUT_OF_MEMORY = "GatewayOutOfMemory"
    """The kernel killed the gateway; raise spec.gateway.resources.memory."""
    GATEWAY_HUNG = "GatewayHung"
    """The gateway's liveness probe failed."""
    GATEWAY_NOT_READY = "GatewayNotReady"
    """The gateway runs, and its Service sends it nothing yet."""
    GATEWAY_UNREACHABLE = "GatewayUnreachable"
    """The gateway does not answer the operator; is its admin port open to the operator's namespace?"""

    # --- the router --------------------------------------------------------------------------------------
    ROUTER_NOT_READY = "RouterNotReady"
    """No pod of the router is ready, or none knows a gateway that is; kubectl describe them, and read their logs."""
    INFERENCE_POOL_UNKNOWN = "InferencePoolUnknown"
    """The cluster lacks the CRD of InferencePools; install the Gateway API inference extension. The operator notices
    within minutes."""
    NOT_ROUTED = "NotRouted"
    """No Gateway routes to the InferencePool; make an HTTPRoute with it as a backend."""
    POOL_REFUSED = "PoolRefused"
    """A Gateway does not accept the InferencePool, or does not find its endpoint picker; the message says why."""

    # --- NUMA --------------------------------------------------------------------------------------------
    NO_CPU_RANKS = "NoCPURanks"
    """No rank computes on a CPU."""
    NOT_REQUESTED = "NotRequested"
    """A pool's numa.policy, or spec.router.type, is None."""
    NOT_PINNED = "NotPinned"
    """A rank could not be bound to one NUMA node; the message says what it lacks."""
    MEMORY_NOT_LOCAL = "MemoryNotLocal"
    """A part of a rank's memory lies on another NUMA node than its cores."""
    NOT_PROVEN = "NotProven"
    """A rank is bound, and its kernel does not tell where its memory lies."""
    NOT_GUARANTEED = "NotGuaranteed"
    """Ranks are bound, and the kubelet may still give their cores to others: set memoryPerRank, and run the kubelet's
    CPU manager with policy static."""


MODEL_REASONS: Final = frozenset(
    {Reason.MODEL_DOWNLOAD_FAILED, Reason.MODEL_VOLUME_NOT_READY, Reason.FETCHING_MODEL, Reason.LOADING_MODEL}
)
"""Reasons that are about the model's files."""

OF_GATEWAY: Final = {
    Reason.RANK_UNSCHEDULABLE: Reason.GATEWAY_UNSCHEDULABLE,
    Reason.RANK_EXITED: Reason.GATEWAY_EXITED,
    Reason.RANK_CRASH_LOOP: Reason.GATEWAY_CRASH_LOOP,
    Reason.RANK_OUT_OF_MEMORY: Reason.GATEWAY_OUT_OF_MEMORY,
    Reason.RANK_HUNG: Reason.GATEWAY_HUNG,
    Reason.RANK_NOT_READY: Reason.GATEWAY_NOT_READY,
}
"""Names of ranks' reasons for the gateway's pod."""


class Level(IntEnum):
    """Severity: the worst is reported first, whichever rank it is of."""

    BROKEN = 0
    """Something failed."""
    ABSENT = 1
    """Not there yet: being scheduled, created, fetched."""
    APART = 2
    """Runs, but is not one of the group yet."""
    UNREADY = 3
    """One of the group, and not ready yet."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Reason for which something is not ready. `words` go on after "rank 0 (pod x-cpu-0): "."""

    level: Level
    reason: Reason
    words: str
    is_vague: bool = False
    """Whether an earlier look may have seen more: an awaited image, when its error was reported before."""


def broken(reason: Reason, words: str, *, is_vague: bool = False) -> Trouble:
    """Return a trouble that only a repair ends."""
    return Trouble(Level.BROKEN, reason, words, is_vague)


def absent(reason: Reason, words: str) -> Trouble:
    """Return a trouble of something that is not there yet."""
    return Trouble(Level.ABSENT, reason, words)

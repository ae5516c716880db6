"""`spec.pools`: sets of equal ranks, and what each rank gets."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, Field

from hetero_api.host.topology import NumaPolicy
from hetero_api.spec_cluster import HugepagesSpec, NumaClaimSpec, PoolScheduling
from hetero_api.spec_pods import PodPatch, Variables, Volumes, leaves_our_variables
from hetero_api.spec_types import (
    Bytes,
    ExtendedResource,
    ObjectName,
    PoolName,
    Reason,
    Rule,
    SpecEnum,
    SpecModel,
    TransitionRule,
    field_error,
    left_out,
    spelled,
)

MAX_RANKS: Final = 64
MAX_POOLS: Final = 16


class PoolType(SpecEnum):
    """Kind of device of a pool's ranks."""

    GPU = "GPU"
    CPU = "CPU"


class GpuSpec(SpecModel):
    """Resources of a rank of a GPU pool."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "devices",
            "!has(self.devices) || self.devices.all(d, self.devices.exists_one(e, e == d))",
            "must name every device once",
            lambda gpu: gpu.devices is None or len(set(gpu.devices)) == len(gpu.devices),
        ),
    )

    devices: Annotated[list[Annotated[int, Field(ge=0, le=1023)]] | None, Field(min_length=1, max_length=MAX_RANKS)] = (
        None
    )
    """CUDA device of each rank of a pod. On one machine: its number, in PCI order, among those that the user may see,
    e.g. [0, 2, 4, 6]. In a cluster a pod gets one device for each of its ranks, whichever the device plugin chooses,
    and the numbers give the order of the ranks on them. Default: 0, 1, and so on.
    """
    cores_per_rank: Annotated[int, Field(ge=1, le=1024)] = 2
    """Whole cores a rank, for launching work on the GPU and for the exchange."""
    memory_per_rank: Bytes | None = None
    """Host memory a rank, e.g. 32Gi. Default: not limited."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods, e.g. nvidia. Default: the cluster's."""
    resource_name: ExtendedResource = "nvidia.com/gpu"
    """Extended resource that a GPU is requested by."""


class NumaSpec(SpecModel):
    """How strictly a CPU rank is bound to one NUMA node."""

    rules: ClassVar[tuple[Rule, ...]] = (
        left_out(
            "claim",
            "takes cores that policy None would not bind ranks to; leave it out, or set another policy",
            where=("policy", "None"),
        ),
    )

    policy: Annotated[NumaPolicy, spelled(NumaPolicy)] = NumaPolicy.BEST_EFFORT
    """Required: a rank that cannot be bound to cores and memory of one node does not start. BestEffort: it starts and
    says what it got. None: it is not bound, and cores may be shared.
    """
    claim: NumaClaimSpec | None = None
    """Take cores by a ResourceClaim, on clusters whose nodes hand out CPUs that way."""


class CpuSpec(SpecModel):
    """Resources of a rank of a CPU pool."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "memoryPerRank",
            "self.numa.policy != 'Required' || has(self.memoryPerRank)",
            "is required when numa.policy is Required",
            lambda cpu: cpu.numa.policy != NumaPolicy.REQUIRED or cpu.memory_per_rank is not None,
            Reason.REQUIRED,
        ),
    )

    cores_per_rank: Annotated[int, Field(ge=1, le=1024)] = 1
    """Whole cores a rank; one thread runs on each."""
    memory_per_rank: Bytes | None = None
    """Memory a rank, weights and KV cache included, e.g. 128Gi. Needed by numa.policy Required; without it pods are not
    Guaranteed, and the kubelet gives them no cores of their own.
    """
    hugepages: HugepagesSpec | None = None
    """Huge pages for a rank's weights and cache. Default: none."""
    numa: NumaSpec = NumaSpec()
    """How strictly a rank is bound to one NUMA node."""


class PoolSpec(SpecModel):
    """A set of equal ranks."""

    rules: ClassVar[tuple[Rule, ...]] = (
        left_out("cpu", "is for pools of type CPU; this pool's type is GPU", unless=("type", "CPU")),
        left_out("gpu", "is for pools of type GPU; this pool's type is CPU", unless=("type", "GPU")),
        Rule(
            "gpu.devices",
            "!has(self.gpu) || !has(self.gpu.devices) || size(self.gpu.devices) == self.ranksPerPod",
            "must hold one device for each rank of a pod (ranksPerPod)",
            lambda pool: pool.gpu is None or pool.gpu.devices is None or len(pool.gpu.devices) == pool.ranks_per_pod,
        ),
        Rule(
            "ranks",
            "self.ranks % self.ranksPerPod == 0",
            "must be a multiple of ranksPerPod",
            lambda pool: pool.ranks % pool.ranks_per_pod == 0,
        ),
        leaves_our_variables("env"),
    )
    transitions: ClassVar[tuple[TransitionRule, ...]] = (
        TransitionRule(
            "type",
            "self.type == oldSelf.type",
            "cannot be changed; make a new resource",
            lambda old, new: old.type == new.type,
        ),
    )

    name: PoolName
    """Name of the pool, unique in the resource and never changed."""
    type: Annotated[PoolType, spelled(PoolType)]
    """Device that its ranks compute on, GPU or CPU; never changed."""
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    """Ranks in the pool: one process each."""
    ranks_per_pod: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Ranks in one pod, or in one container where topology.colocate is Pod; ranks is a multiple of it."""
    gpu: GpuSpec | None = None
    """Resources of a rank, for type GPU."""
    cpu: CpuSpec | None = None
    """Resources of a rank, for type CPU."""
    shared_memory: Bytes = 2**30
    """Size of a pod's /dev/shm, which its ranks exchange through; it is part of the pod's memory. With
    exchange.hostPath the node's folder takes its place, and this is what the pod's memory allows for it. With
    topology.colocate the sizes of all containers add up to the /dev/shm of their one pod, and each is part of its
    container's memory.
    """
    scheduling: PoolScheduling = PoolScheduling()
    """Where this pool's pods may run."""
    env: Variables | None = None
    """Environment variables of its ranks, e.g. HTTPS_PROXY or NCCL_DEBUG."""
    volumes: Volumes | None = None
    """Volumes in its pods, e.g. certificates."""
    pod_template: PodPatch | None = None
    """Patch of its pods (metadata and spec), merged last; what comes out must still be a pod of the operator's."""

    @property
    def cpu_or_default(self) -> CpuSpec:
        """The CPU settings in force for a CPU pool."""
        return self.cpu or CpuSpec()

    @property
    def gpu_or_default(self) -> GpuSpec:
        """The GPU settings in force for a GPU pool."""
        return self.gpu or GpuSpec()

    @property
    def cores_per_rank(self) -> int:
        """Whole cores that each rank gets, whatever it computes on."""
        return (self.gpu_or_default if self.type == PoolType.GPU else self.cpu_or_default).cores_per_rank

    @property
    def memory_per_rank(self) -> int | None:
        """Bytes of host memory that each rank gets; None where the pool names none."""
        return (self.gpu_or_default if self.type == PoolType.GPU else self.cpu_or_default).memory_per_rank

    @property
    def pods(self) -> int:
        """Pods that hold the ranks; containers, where all pools are one pod."""
        return self.ranks // self.ranks_per_pod


def _unique_names(pools: list[PoolSpec]) -> list[PoolSpec]:
    names = [pool.name for pool in pools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise field_error(f"[{index}].name", f"{name!r} is used by another pool; names must be unique")
    return pools


Pools = Annotated[
    list[PoolSpec],
    Field(
        min_length=1,
        max_length=MAX_POOLS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    ),
    AfterValidator(_unique_names),
]

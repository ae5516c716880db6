"""`spec.topology`: all ranks in one pod, and the rules that this puts on pools.

A pod has one node, one RuntimeClass and one /dev/shm. Its class of service is Guaranteed only if every container names
its memory, and only then does a kubelet give CPU ranks cores of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

from hetero_api.spec_pools import PoolSpec, PoolType
from hetero_api.spec_types import Reason, Rule, SpecEnum, SpecModel, spelled


class Colocation(SpecEnum):
    """Unit of Kubernetes that all ranks of a group are put into."""

    NONE = "None"
    POD = "Pod"


class GroupTopologySpec(SpecModel):
    """Distribution of ranks over pods."""

    colocate: Annotated[Colocation, spelled(Colocation)] = Colocation.NONE
    """None: each ranksPerPod ranks of a pool are a pod. Pod: they are a container, and the containers of all pools are
    one pod, on one node. Containers have cores and memory of their own, and restart alone. They share the pod's
    /dev/shm, so that ranks exchange through memory; Pod Security level Restricted allows it. All pools need
    memoryPerRank and the same scheduling.
    """


def _one_pod(
    path: str, cel: str, message: str, holds: Callable[[Any], bool], *, reason: Reason = Reason.INVALID
) -> Rule:
    """Return a rule of the whole spec that counts where all ranks are in one pod."""
    return Rule(
        path,
        f"self.topology.colocate != 'Pod' || {cel}",
        f"{message} (topology.colocate is Pod)",
        lambda spec: spec.topology.colocate != Colocation.POD or holds(spec),
        reason,
    )


def _alike(field: str, empty: str) -> str:
    """Return CEL that a field of all pools' scheduling equals the first pool's; `empty` stands for a missing one."""
    pool, first = (
        f"(has({item}.scheduling.{field}) ? {item}.scheduling.{field} : {empty})" for item in ("pool", "self.pools[0]")
    )
    return f"self.pools.all(pool, {pool} == {first})"


def _at_most_one(value: str) -> str:
    """Return CEL that a text of pools, "" where a pool has none, is the same for all that have one."""
    a, b = value.replace("pool", "a"), value.replace("pool", "b")
    return f"self.pools.all(a, self.pools.all(b, {a} == '' || {b} == '' || {a} == {b}))"


def _runtime_classes(spec: Any) -> set[str | None]:
    return {pool.gpu_or_default.runtime_class_name for pool in spec.pools if pool.type == PoolType.GPU}


def _page_sizes(spec: Any) -> set[str]:
    return {pool.cpu.hugepages.size for pool in spec.pools if pool.cpu and pool.cpu.hugepages}


def _is_scheduled_alike(spec: Any) -> bool:
    first: PoolSpec = spec.pools[0]
    return all(pool.scheduling == first.scheduling for pool in spec.pools)


_CLASS: Final = "(has(pool.gpu) && has(pool.gpu.runtimeClassName) ? pool.gpu.runtimeClassName : '-')"
"""Of a GPU pool; "-" is no name of an object."""

ONE_POD_RULES: Final = (
    _one_pod(
        "exchange.hostPath",
        "!has(self.exchange.hostPath)",
        "must be left out: all ranks share the /dev/shm of their pod",
        lambda spec: spec.exchange.host_path is None,
        reason=Reason.FORBIDDEN,
    ),
    _one_pod(
        "pools",
        "self.pools.all(pool, pool.type == 'GPU' ? has(pool.gpu) && has(pool.gpu.memoryPerRank) : "
        "has(pool.cpu) && has(pool.cpu.memoryPerRank))",
        "must each set gpu.memoryPerRank or cpu.memoryPerRank: a pod with one container without it is not Guaranteed, "
        "and none of its ranks gets cores of its own",
        lambda spec: all(pool.memory_per_rank is not None for pool in spec.pools),
        reason=Reason.REQUIRED,
    ),
    _one_pod(
        "pools",
        f"{_alike('nodeSelector', '{}')} && {_alike('tolerations', '[]')}",
        "must have the same scheduling: their ranks are one pod, on one node; give all pools the same nodeSelector and "
        "the same tolerations",
        _is_scheduled_alike,
    ),
    _one_pod(
        "pools",
        _at_most_one(f"(pool.type == 'GPU' ? {_CLASS} : '')"),
        "must have one gpu.runtimeClassName: a pod has one RuntimeClass; give all GPU pools the same",
        lambda spec: len(_runtime_classes(spec)) <= 1,
    ),
    _one_pod(
        "pools",
        _at_most_one("(has(pool.cpu) && has(pool.cpu.hugepages) ? pool.cpu.hugepages.size : '')"),
        "must have one cpu.hugepages.size: a pod has pages of one size; give all pools the same",
        lambda spec: len(_page_sizes(spec)) <= 1,
    ),
)
"""Rules of the whole spec about resources whose ranks are all in one pod."""

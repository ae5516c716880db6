"""Requests and limits, which decide whether the kubelet gives a rank cores, memory and devices of its own.

CPU pods are Guaranteed: requests equal limits, in whole cores, on every container of the pod, init containers
included; otherwise a static CPU manager leaves them in the shared pool. Memory covers the ranks and /dev/shm, which
the kernel counts to the pod. Without `memoryPerRank` there is nothing to ask for, and the pod is Burstable.

The device plugin chooses a pod's devices, and the pod sees them numbered from 0. So a pod asks for one for each of its
ranks, and the numbers that a pool names give the order of its ranks on them.
"""

from __future__ import annotations

from typing import Any, Final

from hetero_api.quantity import format_bytes
from hetero_api.spec import PoolSpec, PoolType
from hetero_api.spec_cluster import ResourcesSpec
from hetero_operator.reconcile.manifests.optional_kinds import CLAIM_NAME, device_class

_DECIMAL_SUFFIXES: Final = (("P", 10**15), ("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3))


def rank_resources(pool: PoolSpec) -> dict[str, Any]:
    """Return the resources of a rank pod's main container."""
    limits = {**_shared_limits(pool), **_devices(pool)}
    claims = {"claims": [{"name": CLAIM_NAME}]} if device_class(pool) else {}
    return {"requests": limits, "limits": limits, **claims}


def rank_init_resources(pool: PoolSpec) -> dict[str, Any]:
    """Return the resources of a rank pod's init container: the same cores and memory, no devices."""
    limits = _shared_limits(pool)
    return {"requests": limits, "limits": limits}


def gateway_resources(resources: ResourcesSpec) -> dict[str, Any]:
    """Return the resources of each of the gateway pod's containers."""
    limits = {"cpu": millis(resources.cpu_millis), "memory": memory(resources.memory)}
    return {"requests": limits, "limits": limits}


def memory(count: int) -> str:
    """Format bytes as the API server writes them, so that its answer reads the same: 1536Mi, 64M, 17."""
    if count % 1024 == 0:
        return format_bytes(count)
    for suffix, unit in _DECIMAL_SUFFIXES:
        if count % unit == 0:
            return f"{count // unit}{suffix}"
    return str(count)


def millis(count: int) -> str:
    """Format thousandths of a core as the API server writes them: 1500m, 2."""
    return f"{count}m" if count % 1000 else str(count // 1000)


def device_numbers(pool: PoolSpec) -> list[int]:
    """Return the CUDA device of each rank of a pod."""
    named = pool.gpu_or_default.devices or list(range(pool.ranks_per_pod))
    return [sorted(named).index(number) for number in named]


def _shared_limits(pool: PoolSpec) -> dict[str, str]:
    """Return the cores and memory of all ranks of a pod."""
    limits = {"cpu": str(pool.cores_per_rank * pool.ranks_per_pod)}
    if pool.memory_per_rank is not None:
        limits["memory"] = memory(pool.memory_per_rank * pool.ranks_per_pod + pool.shared_memory)
    return limits


def _devices(pool: PoolSpec) -> dict[str, str]:
    """Return GPUs and huge pages."""
    if pool.type == PoolType.GPU:
        return {pool.gpu_or_default.resource_name: str(pool.ranks_per_pod)}
    pages = pool.cpu_or_default.hugepages
    if pages is None:
        return {}
    return {f"hugepages-{pages.size}": memory(pages.per_rank * pool.ranks_per_pod)}

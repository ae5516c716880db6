"""Which device of this machine each GPU rank gets.

In a cluster a pod sees the devices that it was given. On one machine all pods of a resource see the same ones, so no
two ranks may name the same; pools that name none share out what is left, in PCI order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetero_api.cpu_list import format_cpu_list
from hetero_api.host.gpus import Gpu
from hetero_api.host.local_rank import dp_adjusted_local_rank
from hetero_api.spec import PoolSpec, PoolType


@dataclass(frozen=True, slots=True)
class PoolAt:
    """A pool and where it stands in the manifest, e.g. "spec.pools[0]"."""

    path: str
    pool: PoolSpec

    @property
    def section(self) -> str:
        """Where its ranks' settings stand below `path`: "gpu" or "cpu"."""
        return self.pool.type.lower()


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Devices by pool, a rank each; or what is wrong, as `path: what`."""

    devices: Mapping[str, tuple[Gpu, ...]]
    problems: tuple[str, ...]

    def of_pool(self, name: str) -> tuple[Gpu, ...]:
        """() for a pool of CPU ranks."""
        return self.devices.get(name, ())


def plan_devices(pools: Sequence[PoolAt], gpus: Sequence[Gpu], *, dp_local_rank: int = 0) -> DevicePlan:
    """Deal the devices out. `pools` are in rank order, `gpus` in the order of their numbers."""
    of_gpus = [at for at in pools if at.pool.type == PoolType.GPU]
    if of_gpus and not gpus:
        missing = "GPU: this machine has no NVIDIA GPU that may be used; use type CPU"
        return DevicePlan({}, tuple(f"{at.path}.type: {missing}" for at in of_gpus))
    named = [at for at in of_gpus if at.pool.gpu_or_default.devices is not None]
    problems = tuple(_problems_of_named(named, gpus, dp_local_rank))
    if problems:
        return DevicePlan({}, problems)
    by_number = {gpu.number: gpu for gpu in gpus}
    devices = {at.pool.name: tuple(by_number[number] for number in _numbers(at.pool)) for at in named}
    taken = {gpu for of_pool in devices.values() for gpu in of_pool}
    free = [gpu for gpu in gpus if gpu not in taken]
    unnamed = [at for at in of_gpus if at.pool.name not in devices]
    short = _shortage(unnamed, free, dp_local_rank)
    return DevicePlan({}, short) if short else DevicePlan({**devices, **_dealt(unnamed, free, dp_local_rank)}, ())


def _numbers(pool: PoolSpec) -> list[int]:
    """Devices that a pool names, one for each of its ranks."""
    return (pool.gpu_or_default.devices or []) * pool.pods


def _problems_of_named(named: Sequence[PoolAt], gpus: Sequence[Gpu], dp_local_rank: int) -> Iterator[str]:
    there = [gpu.number for gpu in gpus]
    seen: set[int] = set()
    for at in named:
        numbers = _numbers(at.pool)
        path = f"{at.path}.gpu.devices"
        if missing := sorted(set(numbers) - set(there)):
            yield f"{path}: there is no device {format_cpu_list(missing)}; this machine has {format_cpu_list(there)}"
        if twice := sorted(number for number in set(numbers) if number in seen or numbers.count(number) > 1):
            yield (
                f"{path}: device {format_cpu_list(twice)} would be two ranks'; on one machine all pods share the "
                "devices: put the pool's ranks into one pod (ranksPerPod), and name each device once"
            )
        if dp_local_rank:
            yield f"{path}: names the devices of one group; leave it out to start another beside it (--dp-local-rank)"
        seen.update(numbers)


def _shortage(unnamed: Sequence[PoolAt], free: Sequence[Gpu], dp_local_rank: int) -> tuple[str, ...]:
    needed = sum(at.pool.ranks for at in unnamed)
    if needed * (dp_local_rank + 1) <= len(free):
        return ()
    before = f" after those of the groups before this one (--dp-local-rank {dp_local_rank})" if dp_local_rank else ""
    there = format_cpu_list([gpu.number for gpu in free]) or "none"
    return tuple(
        f"{at.path}.ranks: {needed} GPU ranks need a device each{before}; free on this machine: {there}"
        for at in unnamed
    )  # fmt: skip


def _dealt(unnamed: Sequence[PoolAt], free: Sequence[Gpu], dp_local_rank: int) -> dict[str, tuple[Gpu, ...]]:
    """A device for each rank of the pools that name none."""
    needed = sum(at.pool.ranks for at in unnamed)
    order = iter(
        free[dp_adjusted_local_rank(dp_local_rank=dp_local_rank, tp_size=needed, pp_size=1, local_rank=rank)]
        for rank in range(needed)
    )
    return {at.pool.name: tuple(next(order) for _ in range(at.pool.ranks)) for at in unnamed}

"""Which device of this machine each GPU rank gets.

In a cluster a pod sees the devices that it was given. On one machine all pods of a resource see the same ones, so no
two ranks may name the same; pools that name none share out what is left, in PCI order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from hetero_api.cpu_list import format_cpu_list
from hetero_api.host.gpus import Gpu
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
    """Give each GPU rank a device. `pools` are in rank order, `gpus` in the order of their numbers.

    `dp_local_rank` numbers the groups of this resource on this machine from 0. The first group gets the devices that
    its pools name, and the first free ones for its other pools. The groups after it share out what is left, one after
    another: group n has the devices from (n - 1) * ranks on.
    """
    of_gpus = [at for at in pools if at.pool.type == PoolType.GPU]
    if of_gpus and not gpus:
        missing = "GPU: this machine has no NVIDIA GPU that may be used; use type CPU"
        return DevicePlan({}, tuple(f"{at.path}.type: {missing}" for at in of_gpus))
    if problems := tuple(_problems_of_named(of_gpus, gpus)):
        return DevicePlan({}, problems)
    named = {number for at in of_gpus for number in _named(at.pool)}
    free = [gpu for gpu in gpus if gpu.number not in named]
    unnamed = sum(at.pool.ranks for at in of_gpus if not _named(at.pool))
    if len(free) < unnamed + dp_local_rank * sum(at.pool.ranks for at in of_gpus):
        return DevicePlan({}, _shortage(of_gpus, free, dp_local_rank))
    if dp_local_rank:
        skipped = unnamed + (dp_local_rank - 1) * sum(at.pool.ranks for at in of_gpus)
        order = iter(free[skipped:])
        return DevicePlan({at.pool.name: tuple(islice(order, at.pool.ranks)) for at in of_gpus}, ())
    by_number, order = {gpu.number: gpu for gpu in gpus}, iter(free)
    return DevicePlan(
        {
            at.pool.name: tuple(by_number[number] for number in _named(at.pool)) or tuple(islice(order, at.pool.ranks))
            for at in of_gpus
        },
        (),
    )


def _named(pool: PoolSpec) -> list[int]:
    """Return the device that the pool names for each of its ranks; [] if it names none."""
    return (pool.gpu_or_default.devices or []) * pool.pods


def _problems_of_named(pools: Sequence[PoolAt], gpus: Sequence[Gpu]) -> Iterator[str]:
    there = [gpu.number for gpu in gpus]
    seen: set[int] = set()
    for at in pools:
        numbers = _named(at.pool)
        path = f"{at.path}.gpu.devices"
        if missing := sorted(set(numbers) - set(there)):
            yield f"{path}: there is no device {format_cpu_list(missing)}; this machine has {format_cpu_list(there)}"
        if twice := sorted(number for number in set(numbers) if number in seen or numbers.count(number) > 1):
            yield (
                f"{path}: device {format_cpu_list(twice)} would be two ranks'; on one machine all pods share the "
                "devices: put the pool's ranks into one pod (ranksPerPod), and name each device once"
            )
        seen.update(numbers)


def _shortage(pools: Sequence[PoolAt], free: Sequence[Gpu], dp_local_rank: int) -> tuple[str, ...]:
    """Return one problem for each pool that needs free devices."""
    asking = [at for at in pools if dp_local_rank or not _named(at.pool)]
    needed = sum(at.pool.ranks for at in asking)
    before = f" after those of the groups before this one (--dp-local-rank {dp_local_rank})" if dp_local_rank else ""
    there = format_cpu_list([gpu.number for gpu in free]) or "none"
    return tuple(
        f"{at.path}.ranks: {needed} GPU ranks need a device each{before}; free on this machine: {there}"
        for at in asking
    )  # fmt: skip

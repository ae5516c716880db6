"""How fast a device reads memory, multiplies matrices and copies to and from the host: timed, the best of a few times.

The same code for every kind of device. Whoever asks has the device to itself, but for what its neighbours do to the
memory that they share; the best time is the one that they disturbed least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from hetero_worker.backends.base import Platform


_REPEATS: Final = 3
_COPY_BYTES: Final = 32 * 1024 * 1024

Work = Callable[[], object]


def best_s(work: Work, synchronize: Work) -> float:
    """Return the least time of a few; the first, which warms up, does not count."""
    times = []
    for _ in range(1 + _REPEATS):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def read_bandwidth(platform: Platform, num_bytes: int) -> float:
    """Bytes a second of a sum over so many."""
    data = torch.ones(num_bytes // 4, device=platform.device)
    return data.nbytes / best_s(data.sum, platform.synchronize)


def matmul_flops(platform: Platform, dtypes: Iterable[str], *, size: int) -> dict[str, float]:
    """FLOP a second of a product of size x size, by arithmetic type."""
    flops = {}
    for name in sorted(dtypes):
        left = torch.ones(size, size, dtype=getattr(torch, name), device=platform.device)
        flops[name] = 2 * size**3 / best_s(lambda left=left: left @ left, platform.synchronize)  # type: ignore[misc]
    return flops


def copy_bandwidths(platform: Platform) -> tuple[float, float]:
    """Bytes a second from pinned host memory to the device, and back."""
    host = torch.ones(_COPY_BYTES // 4, pin_memory=platform.pins_memory)
    there = torch.ones(_COPY_BYTES // 4, device=platform.device)
    to_device_s = best_s(lambda: there.copy_(host, non_blocking=True), platform.synchronize)
    from_device_s = best_s(lambda: host.copy_(there, non_blocking=True), platform.synchronize)
    return host.nbytes / to_device_s, host.nbytes / from_device_s


def round_trip_s(platform: Platform) -> float:
    """Seconds of the smallest copy to the host and back."""
    there = torch.ones(1, device=platform.device)
    host = torch.ones(1, pin_memory=platform.pins_memory)

    def go() -> None:
        host.copy_(there)
        there.copy_(host)

    return best_s(go, platform.synchronize)

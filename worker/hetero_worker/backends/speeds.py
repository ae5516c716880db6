"""How fast a device reads memory, multiplies matrices and copies to and from the host: timed, the best of a few times.

The same code for every kind of device. The caller has the device to itself, but for what its neighbours do to the
memory that they share; the best time is the one that they disturbed least. `synchronize` waits until the device has
done all work.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

import torch

from hetero_worker.backends.base import Work

_REPEATS: Final = 3
_COPY_BYTES: Final = 32 * 1024 * 1024


def _done() -> None:
    """Return at once: on the host work is done when its call returns."""


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


def read_bandwidth(device: torch.device, num_bytes: int, synchronize: Work = _done) -> float:
    """Return the bytes a second of a sum over so many."""
    data = torch.ones(num_bytes // 4, device=device)
    return data.nbytes / best_s(data.sum, synchronize)


def matmul_flops(
    device: torch.device, dtypes: Iterable[str], *, size: int, synchronize: Work = _done
) -> dict[str, float]:
    """Return the FLOP a second of a product of size x size, by arithmetic type."""
    flops = {}
    for name in sorted(dtypes):
        left = torch.ones(size, size, dtype=getattr(torch, name), device=device)
        flops[name] = 2 * size**3 / best_s(lambda left=left: left @ left, synchronize)  # type: ignore[misc]
    return flops


def copy_bandwidths(device: torch.device, synchronize: Work, *, pins_memory: bool) -> tuple[float, float]:
    """Return the bytes a second from host memory to the device, and back."""
    host = torch.ones(_COPY_BYTES // 4, pin_memory=pins_memory)
    there = torch.ones(_COPY_BYTES // 4, device=device)
    to_device_s = best_s(lambda: there.copy_(host, non_blocking=True), synchronize)
    from_device_s = best_s(lambda: host.copy_(there, non_blocking=True), synchronize)
    return host.nbytes / to_device_s, host.nbytes / from_device_s


def round_trip_s(device: torch.device, synchronize: Work, *, pins_memory: bool) -> float:
    """Return the seconds of the smallest copy to the host and back."""
    there = torch.ones(1, device=device)
    host = torch.ones(1, pin_memory=pins_memory)

    def go() -> None:
        host.copy_(there)
        there.copy_(host)

    return best_s(go, synchronize)

"""How fast a device reads memory, multiplies matrices and copies to and from the host: timed, the best of a few times.

The same code for every kind of device. The caller has the device to itself, but for what its neighbours do to the
memory that they share; the best time is the one that they disturbed least. `laps` is `DeviceBackend.laps`: it times a
device by its own clock, so that the host's waiting does not count. Numbers are random: a GPU computes with constants
on less power, and so faster, than with a model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch

from hetero_worker.backends.base import Work

Laps = Callable[[Sequence[Work]], list[float]]
"""Does each work once, in order, and returns the seconds of each."""

_REPEATS: Final = 3
_COPY_BYTES: Final = 32 * 1024 * 1024
_NUMBERS: Final = 1 << 18
_SEED: Final = 5


def best_s(work: Work, laps: Laps) -> float:
    """Return the least time of a few; the first, which warms up, does not count."""
    return min(laps([work] * (1 + _REPEATS))[1:])


def read_bandwidth(device: torch.device, num_bytes: int, laps: Laps) -> float:
    """Return the bytes a second of a sum over so many."""
    data = _numbers(num_bytes // 4, device)
    return data.nbytes / best_s(data.sum, laps)


def matmul_flops(device: torch.device, dtypes: Iterable[str], *, size: int, laps: Laps) -> dict[str, float]:
    """Return the FLOP a second of a product of size x size, by arithmetic type."""
    flops = {}
    for name in sorted(dtypes):
        left = _numbers(size * size, device, getattr(torch, name)).view(size, size)
        flops[name] = 2 * size**3 / best_s(lambda left=left: left @ left, laps)  # type: ignore[misc]
    return flops


def copy_bandwidths(device: torch.device, laps: Laps, *, pins_memory: bool) -> tuple[float, float]:
    """Return the bytes a second from host memory to the device, and back."""
    host = torch.ones(_COPY_BYTES // 4, pin_memory=pins_memory)
    there = torch.ones(_COPY_BYTES // 4, device=device)
    to_device_s = best_s(lambda: there.copy_(host, non_blocking=True), laps)
    from_device_s = best_s(lambda: host.copy_(there, non_blocking=True), laps)
    return host.nbytes / to_device_s, host.nbytes / from_device_s


def round_trip_s(device: torch.device, laps: Laps, *, pins_memory: bool) -> float:
    """Return the seconds of the smallest copy to the host and back."""
    there = torch.ones(1, device=device)
    host = torch.ones(1, pin_memory=pins_memory)

    def go() -> None:
        host.copy_(there)
        there.copy_(host)

    return best_s(go, laps)


def _numbers(count: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random numbers [count] on the device; a few, over and over, so that making them takes no time."""
    some = torch.randn(_NUMBERS, generator=torch.Generator().manual_seed(_SEED)).to(device=device, dtype=dtype)
    numbers = torch.empty(count, dtype=dtype, device=device)
    whole = count // _NUMBERS * _NUMBERS
    numbers[:whole].view(-1, _NUMBERS).copy_(some)
    numbers[whole:].copy_(some[: count - whole])
    return numbers

"""What an exchange takes: medians of all-reduces of a few sizes, for the solver.

All ranks measure together, the same sizes as often, so nobody decides how long it goes on. It is over in well under
a third of a second where the exchange is any good.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

SIZES: Final = {4 * 1024: 17, 64 * 1024: 9, 1024 * 1024: 5}
"""Bytes, and how often each is measured."""
_WARM_UPS: Final = 2

Times = tuple[tuple[int, float], ...]
"""(bytes of the tensor, seconds), ascending."""


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """What an all-reduce takes; empty where the rank takes part in none."""

    host: Times = ()
    """Among the ranks that meet on the host: the CPU ranks, and the GPU ranks' leader."""
    device: Times = ()
    """Among all GPU ranks, on their devices."""


def measure_all_reduce(
    all_reduce: Callable[[torch.Tensor], None],
    *,
    device: torch.device,
    synchronize: Callable[[], None] = lambda: None,
) -> Times:
    """Medians of `all_reduce`, which all ranks call as often. `synchronize` waits for the device."""
    return tuple((size, _median_s(all_reduce, size, repeats, device, synchronize)) for size, repeats in SIZES.items())


def _median_s(
    all_reduce: Callable[[torch.Tensor], None],
    size: int,
    repeats: int,
    device: torch.device,
    synchronize: Callable[[], None],
) -> float:
    tensor = torch.zeros(size // torch.float32.itemsize, device=device)
    times = []
    for _ in range(_WARM_UPS + repeats):
        synchronize()
        began = time.perf_counter()
        all_reduce(tensor)
        synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[_WARM_UPS:])

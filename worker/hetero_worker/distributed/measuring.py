"""Measurements that the ranks of a group make together.

Ranks of one host share its memory, so the speed of a part of the model depends on what other ranks do meanwhile. They
measure the same parts at the same time, as they will compute them, and for comparison one after another. All ranks
measure the same sizes the same number of times, so nobody has to decide how long it goes on. Exchange times take well
under a third of a second where the exchange is fast.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

SIZES: Final = {4 * 1024: 17, 64 * 1024: 9, 1024 * 1024: 5}
"""Number of repetitions by bytes."""
_WARM_UPS: Final = 2

Round = Callable[[torch.Tensor], None]
"""Sums a host tensor over the ranks that meet on the host; all of them call."""
Times = tuple[tuple[int, float], ...]
"""(bytes of the tensor, seconds), ascending."""


class Peers(Protocol):
    """All ranks of a group, which measure together.

    All methods but `host_round` are collective: every rank calls them in the same order.
    """

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        ...

    def meet(self) -> None:
        """Wait for all ranks, so that they begin what follows at the same time."""
        ...

    def in_turn(self, work: Callable[[], float]) -> float:
        """Do `work` while other ranks wait, and return its result."""
        ...

    def all_can(self, can: bool) -> bool:
        """Return True if all ranks say so."""
        ...

    def host_round(self) -> Round | None:
        """Return a sum among the ranks that meet on the host; None if this rank takes part in none."""
        ...


class NoPeers:
    """Peers of a rank that is alone."""

    num_ranks = 1

    def meet(self) -> None:
        """Return at once."""

    def in_turn(self, work: Callable[[], float]) -> float:
        """Do `work` and return its result."""
        return work()

    def all_can(self, can: bool) -> bool:
        """Return `can`."""
        return can

    def host_round(self) -> Round | None:
        """Return None."""
        return None


def shared_bandwidth(peers: Peers, read: Callable[[], float]) -> tuple[float, float]:
    """Return what `read` returns (bytes/s) while all ranks read, and while this rank reads alone. Collective."""
    peers.meet()
    together = read()
    return together, peers.in_turn(read)


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """Durations of an all-reduce; empty where the rank takes part in none."""

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
    """Return medians of `all_reduce`, which all ranks call. `synchronize` waits for the device."""
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

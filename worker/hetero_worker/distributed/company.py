"""Whom a rank measures with; a GroupCoordinator is one, and so is nobody.

Ranks of one host share its memory, so what a part of the model takes depends on what the others do meanwhile. They
measure the same parts at the same time, as they will compute them, and now and then one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Round = Callable[[torch.Tensor], None]
"""Sums a host tensor over the ranks that meet on the host; all of them call."""


class Company(Protocol):
    """The ranks of a group. All but `host_round` are collective: every rank calls them as often, in one order."""

    @property
    def num_ranks(self) -> int: ...

    def meet(self) -> None:
        """Wait for all ranks, so that they begin what follows at once."""
        ...

    def in_turn(self, work: Callable[[], float]) -> float:
        """Do `work` while other ranks wait; what it told."""
        ...

    def all_can(self, can: bool) -> bool:
        """Whether all ranks say so."""
        ...

    def host_round(self) -> Round | None:
        """None where this rank takes part in no round on the host."""
        ...


def shared_bandwidth(company: Company, read: Callable[[], float]) -> tuple[float, float]:
    """What `read` tells (bytes a second) while all ranks read, and while this one does alone. Collective."""
    company.meet()
    together = read()
    return together, company.in_turn(read)


class Alone:
    """The company of a group of one."""

    num_ranks = 1

    def meet(self) -> None:
        """Nobody to wait for."""

    def in_turn(self, work: Callable[[], float]) -> float:
        return work()

    def all_can(self, can: bool) -> bool:
        return can

    def host_round(self) -> Round | None:
        return None

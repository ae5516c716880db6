"""HostExchange: how the ranks of one group exchange host tensors, behind one interface.

A *round* is the only primitive: ranks publish bytes, wait for one another, read. All ranks of the group take
part in every round, in the same order, with the same shapes; the step plan makes that so. Sums are taken in
fp32 in ascending rank order on every rank, hence the result is bitwise the same everywhere and from run to run,
whichever implementation carries it.

Implementations: `LocalExchange` (one rank), `ShmExchange` (ranks that share memory), `GlooExchange` (any
network; the reference the other is tested against).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class HostExchange(Protocol):
    """Collectives over host tensors of one group.

    Every method blocks until the round is done and raises ExchangeAborted when the group was aborted
    meanwhile, ExchangeTimeout when a peer did not come within the group's timeout.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """In place: `tensor` becomes the sum of the contributors' tensors, in ascending rank order.

        `tensor` is contiguous, of one floating dtype and shape on every rank. Ranks not in `contributors`
        send nothing; what their tensor held is overwritten. With one contributor it is a broadcast.
        """
        ...

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Every rank's 1-d tensor, in rank order; `counts[r]` elements from rank r (0 is allowed).

        The returned tensors belong to the caller.
        """
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """In place: `tensor` becomes the source's tensor. Contiguous, same dtype and shape everywhere."""
        ...

    def abort(self) -> None:
        """Make a blocked or later call raise ExchangeAborted. May be called from another thread."""
        ...

    def close(self) -> None:
        """Free what the exchange holds. Idempotent."""
        ...


class LocalExchange:
    """The exchange of a group of one rank: every collective is the identity."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """The sum over one rank."""

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:  # noqa: ARG002
        return [tensor.clone()]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """The tensor is the source's already."""

    def abort(self) -> None:
        """No call ever blocks."""

    def close(self) -> None:
        """Nothing is held."""

"""HostExchange: how the ranks of one group exchange host tensors, behind one interface.

A *round* is one primitive: ranks publish bytes, wait for one another, read. All ranks of the group, or of a subgroup
(`among`), take part in every round, in the same order, with the same shapes; the step plan makes that so. Sums are
taken in fp32 in ascending rank order on every rank, hence the result is bitwise the same everywhere and from run to
run, whichever implementation carries it.

A *link* is the other: one rank sends, others receive, and neither waits for the other unless it must. A receive is
posted, and waited for when its tensor is needed. Subgroups and links are fixed when the exchange is made (routes.py).

Implementations: `LocalExchange` (one rank), `ShmExchange` (ranks that share memory), `GlooExchange` (any
network; the reference the other is tested against).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hetero_worker.distributed.routes import Link


class PendingTensor(Protocol):
    """A tensor that is on its way."""

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there; the same when called again. Raises as HostExchange does.

        Tensors of one link are waited for in the order in which they were posted.
        """
        ...


class SumExchange(Protocol):
    """Sums among some ranks; ranks are named by their number in the whole group."""

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        ...

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """As HostExchange.all_reduce, among these ranks; contributors must be some of them."""
        ...


class HostExchange(Protocol):
    """Collectives over host tensors of one group.

    Every method of a round blocks until the round is done. All methods raise ExchangeAborted when the group was aborted
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

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        """The exchange of a subgroup that this rank is in: one that the group was made with, all ranks, or one."""
        ...

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        """To all receivers of a link whose source this rank is. Contiguous; the caller may change it afterwards.

        Returns as soon as the link has room, whether or not the receivers are there; in order.
        """
        ...

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:
        """Post the receipt of the link's next tensor into `out`, contiguous, of the sent one's dtype and shape.

        `out` must be left alone until it has been waited for. An empty tensor is there at once.
        """
        ...

    def abort(self) -> None:
        """Make a blocked or later call raise ExchangeAborted. May be called from another thread."""
        ...

    def close(self) -> None:
        """Free what the exchange holds. Idempotent."""
        ...


class LocalExchange:
    """The exchange of one rank, a whole group or a subgroup: every collective is the identity."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """The sum over one rank."""

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:  # noqa: ARG002
        return [tensor.clone()]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """The tensor is the source's already."""

    def among(self, ranks: tuple[int, ...]) -> SumExchange:  # noqa: ARG002
        return self

    def send(self, tensor: torch.Tensor, link: Link) -> None:  # noqa: ARG002
        raise ValueError(f"a group of one rank has no {link}")

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:  # noqa: ARG002
        raise ValueError(f"a group of one rank has no {link}")

    def abort(self) -> None:
        """No call ever blocks."""

    def close(self) -> None:
        """Nothing is held."""


class Arrived:
    """A PendingTensor that is there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        return self._tensor

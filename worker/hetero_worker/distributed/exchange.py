"""Exchange: what the model and the sampler see of the other ranks; HostExchange: how host tensors get around.

A *round* is one primitive: ranks publish bytes, wait for one another, read. All ranks of the group, or of a subgroup
(`among`), take part in every round, in the same order, with the same shapes; the step plan makes that so. Sums on the
host are taken in fp32 in ascending rank order on every rank, hence the result is bitwise the same everywhere and from
run to run, whichever implementation carries it.

A *link* is the other: one rank sends, others receive, and neither waits for the other unless it must. A receive is
posted, and waited for when its tensor is needed. Subgroups and links are fixed when the exchange is made (routes.py).

HostExchange's implementations: `LocalExchange` (one rank), `ShmExchange` (ranks that share memory), `GlooExchange`
(any network; the reference the others are tested against). In a group of CPU ranks it is the Exchange too; where there
are GPU ranks that is a `HierarchicalExchange` on top of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from hetero_worker.distributed.routes import Link

SUMMABLE: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})


def sum_in_order(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write terms[0] + terms[1] + … into `out`: left to right, in fp32, rounded once. One term is copied unchanged.

    Every exchange adds in this way, so their results are bitwise equal. All tensors have one shape and type. `out` may
    be one of the terms if there are at most two.
    """
    if len(terms) == 1:
        out.copy_(terms[0])
    elif out.dtype == torch.float32:
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)
    else:
        total = terms[0].float()
        for term in terms[1:]:
            total.add_(term)
        out.copy_(total)


def check_summable(tensor: torch.Tensor) -> None:
    """Raise TypeError if exchanges do not add tensors of this type."""
    if tensor.dtype not in SUMMABLE:
        names = ", ".join(sorted(str(dtype) for dtype in SUMMABLE))
        raise TypeError(f"all_reduce adds {names}; it was given {tensor.dtype}")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Amount that one rank moved over an exchange since it was made; a plan's cost table can be checked against it."""

    published_bytes: int = 0
    """Bytes that this rank wrote for others to read, counted once however many read them."""
    rounds: int = 0
    """Rounds of the group or a subgroup that had something to share, by any rank."""
    messages: int = 0
    """Tensors that this rank sent over links, without empty ones."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.published_bytes + other.published_bytes, self.rounds + other.rounds, self.messages + other.messages
        )

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.published_bytes - earlier.published_bytes,
            self.rounds - earlier.rounds,
            self.messages - earlier.messages,
        )


NO_TRAFFIC: Final = Traffic()


class TrafficCounter:
    """Counter of one rank's traffic; one thread uses it."""

    def __init__(self) -> None:
        self._total = NO_TRAFFIC

    def count_round(self, published_bytes: int) -> None:
        """Count a round in which this rank published so many bytes."""
        self._total += Traffic(published_bytes, rounds=1)

    def count_message(self, published_bytes: int) -> None:
        """Count a tensor of so many bytes that this rank sent."""
        self._total += Traffic(published_bytes, messages=1)

    def total(self) -> Traffic:
        """Return the traffic so far."""
        return self._total


class PendingTensor(Protocol):
    """A tensor that is on its way."""

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there; the same when called again. Raises as Exchange does.

        Tensors of one link are waited for in the order in which they were posted.
        """
        ...


class PendingSend(Protocol):
    """A tensor that is to be sent."""

    def finish(self) -> None:
        """Have it sent, as Exchange.send does. Sends of one link are finished in the order in which they began."""
        ...


class SumExchange(Protocol):
    """Sums among some ranks; ranks are named by their number in the whole group."""

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        ...

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """In place: `tensor` becomes the sum of the contributors' tensors, bitwise the same on all of these ranks.

        `tensor` is contiguous, of one floating dtype and shape on every rank, and on the rank's device. Contributors
        are some of these ranks. The others send nothing; what their tensor held is overwritten. With one
        contributor it is a broadcast. Nothing but `tensor` changes.

        Among CPU ranks: one latency, b bytes published by each contributor, b read from each by every rank. With GPU
        ranks see hierarchical.py.
        """
        ...


class Exchange(Protocol):
    """One rank's end of a group.

    Every method of a round blocks until the round is done. All methods raise ExchangeAborted when the group was aborted
    meanwhile, ExchangeTimeout when a peer did not come within the group's timeout, ExchangeError when one is lost.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def link_bytes(self) -> int:
        """How many bytes, in two tensors of half as much or fewer, a link takes in before its source has to wait."""
        ...

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Every rank's 1-d host tensor, in rank order; `counts[r]` elements from rank r (0 is allowed).

        The returned tensors belong to the caller. One latency; every rank's bytes are read by every other.
        """
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """In place: the host tensor becomes the source's. Contiguous, same dtype and shape everywhere. One latency."""
        ...

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        """The exchange of a subgroup that this rank is in: one that the group was made with, all ranks, or one."""
        ...

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        """To all receivers of a link whose source this rank is. Contiguous; the caller may change it afterwards.

        Returns as soon as the link has room, whether or not the receivers are there; in order. One latency until it
        arrives; published once, read by each receiver; off the device first where the source is a GPU rank.
        """
        ...

    def is_staged(self, link: Link) -> bool:
        """Whether this rank's end of the link is a device's, which copies to or from the host.

        Then `start_send` and `receive` of any number of tensors may come before the first is finished or waited for,
        and the device may be given other work meanwhile.
        """
        ...

    def start_send(self, tensor: torch.Tensor, link: Link) -> PendingSend:
        """As `send`, in two parts: what may go on by itself (a copy off the device) begins, `finish` does the rest.

        The tensor is left alone until then. Between the two other work can be given to the device.
        """
        ...

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:
        """Post the receipt of the link's next tensor into `out`, contiguous, of the sent one's dtype and shape.

        `out` must be left alone until it has been waited for. An empty tensor is there at once.
        """
        ...


class HostExchange(Exchange, Protocol):
    """Collectives over host tensors of one group; its device is the host."""

    @property
    def traffic(self) -> Traffic:
        """What this rank has moved over it since it was made."""
        ...

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """As SumExchange.all_reduce, among all ranks, the sum taken in fp32 in ascending rank order."""
        ...

    def abort(self) -> None:
        """Make a blocked or later call raise ExchangeAborted. May be called from another thread."""
        ...

    def close(self) -> None:
        """Free what the exchange holds. Idempotent."""
        ...


class Sent:
    """A PendingSend of what is sent already."""

    def finish(self) -> None:
        """Nothing is left to do."""


SENT: Final = Sent()


class SendsAtOnce:
    """`start_send` where nothing can go on by itself: mixed into exchanges whose tensors are on the host."""

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        raise NotImplementedError

    def is_staged(self, link: Link) -> bool:  # noqa: ARG002
        return False

    def start_send(self, tensor: torch.Tensor, link: Link) -> PendingSend:
        self.send(tensor, link)
        return SENT


class LocalExchange(SendsAtOnce):
    """The exchange of one rank, a whole group or a subgroup, on any device: every collective is the identity."""

    rank = 0
    world_size = 1
    link_bytes = 0
    traffic = NO_TRAFFIC

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

    is_here = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        return self._tensor

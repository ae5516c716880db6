"""Exchange: how a rank's model and sampler reach the other ranks; HostExchange: how host tensors travel.

A *round* is one primitive: ranks publish bytes, wait for one another, and read. All ranks of the group, or of a
subgroup (`among`), take part in every round, in the same order, with the same shapes, as the step plan says. Every rank
adds host tensors in fp32 in ascending rank order. So the result is bitwise the same on every rank, in every run, and in
every implementation.

A *link* is the other primitive: one rank sends, others receive, and neither waits for the other unless it must. A
receipt is posted early and waited for when its tensor is needed. Subgroups and links are fixed when the exchange is
made (routes.py).

HostExchange's implementations are `LocalExchange` (one rank), `ShmExchange` (ranks that share memory), `TcpExchange`
(any network) and `GlooExchange` (any network, without native code; the reference that the others are tested against).
In a group of CPU ranks it is the Exchange, too. With GPU ranks the Exchange is a `HierarchicalExchange` on top of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import torch

from hetero_worker.distributed.routes import Link, Ranks

SUMMABLE: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})


def sum_in_order(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write terms[0] + terms[1] + … into `out`: left to right, in fp32, rounded once. One term is copied unchanged.

    Every exchange adds in this way, so their results are bitwise equal. All tensors have one shape and type. `out` may
    be the first term, or one of two.
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


def check_contributors(contributors: Collection[int], ranks: Ranks) -> None:
    """Raise ValueError unless the contributors to a sum are some of these ranks."""
    if not contributors or not set(contributors) <= set(ranks):
        raise ValueError(f"contributors {list(contributors)} are no ranks of a group of {len(ranks)}: {ranks}")


def check_counts(tensor: torch.Tensor, counts: Sequence[int], *, rank: int, ranks: Ranks) -> None:
    """Raise ValueError unless `counts` has an entry for each rank, that of `rank` for this tensor."""
    if len(counts) != len(ranks) or tensor.numel() != counts[ranks.index(rank)]:
        raise ValueError(f"counts {list(counts)} do not fit {tensor.numel()} elements of rank {rank}")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Amount that one rank moved over an exchange since it was made; a plan's cost table can be checked against it."""

    published_bytes: int = 0
    """Bytes that this rank wrote for others to read, counted once however many read them."""
    rounds: int = 0
    """Rounds of the group or a subgroup that had something to share, by any rank."""
    messages: int = 0
    """Tensors that this rank sent over links, without empty ones."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds in calls of the exchange: bytes moved, sums, and waits for other ranks."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.published_bytes + other.published_bytes,
            self.rounds + other.rounds,
            self.messages + other.messages,
            self.seconds + other.seconds,
        )

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.published_bytes - earlier.published_bytes,
            self.rounds - earlier.rounds,
            self.messages - earlier.messages,
            self.seconds - earlier.seconds,
        )


NO_TRAFFIC: Final = Traffic()


class TrafficCounter:
    """Counter of one rank's traffic; one thread uses it."""

    def __init__(self) -> None:
        self.total = NO_TRAFFIC
        """Traffic so far."""

    def count_round(self, published_bytes: int) -> None:
        """Count a round in which this rank published so many bytes."""
        self.total += Traffic(published_bytes, rounds=1)

    def count_message(self, published_bytes: int) -> None:
        """Count a tensor of so many bytes that this rank sent."""
        self.total += Traffic(published_bytes, messages=1)


class PendingTensor(Protocol):
    """Tensor that is on its way."""

    def wait(self) -> torch.Tensor:
        """Wait for the tensor and return it; may be called again. Raises as Exchange does.

        Tensors of one link are waited for in the order in which they were posted.
        """
        ...


class PendingSend(Protocol):
    """Tensor whose sending has begun."""

    def finish(self) -> None:
        """Send it, as Exchange.send does. Sends of one link are finished in the order in which they began."""
        ...


class SumExchange(Protocol):
    """Sums among some ranks; ranks are named by their number in the whole group."""

    @property
    def world_size(self) -> int:
        """Number of ranks that take part."""
        ...

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """Replace `tensor` by the sum of the contributors' tensors, bitwise the same on all of these ranks.

        `tensor` is contiguous, of one floating dtype and shape on every rank, and on the rank's device. Contributors
        are some of these ranks. The others send nothing, and their tensor is overwritten. With one contributor it is a
        broadcast. Nothing but `tensor` changes.

        Among CPU ranks: one latency, b bytes published by each contributor, b read from each by every rank. With GPU
        ranks see hierarchical.py.
        """
        ...


class Exchange(Protocol):
    """One rank's end of a group.

    A method of a round blocks until the round is done. All methods raise ExchangeAborted when the group was aborted
    meanwhile, ExchangeTimeout when a peer did not come within the group's timeout, and PeerLost when one has ended.
    """

    @property
    def rank(self) -> int:
        """Number of this rank."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        ...

    @property
    def link_bytes(self) -> int:
        """Bytes that a link takes in, in two tensors of half this size, before its source has to wait."""
        ...

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's 1-d host tensor in rank order; `counts[r]` elements from rank r (0 is allowed).

        The returned tensors belong to the caller. One latency; every rank's bytes are read by every other.
        """
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace the host tensor by the source's. Contiguous, of one dtype and shape everywhere. One latency."""
        ...

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        """Return the exchange of a subgroup that this rank is in: all ranks, this rank alone, or one of the routes'."""
        ...

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        """Send a contiguous tensor to all receivers of a link whose source this rank is. Tensors arrive in order.

        Returns as soon as the link has room, without waiting for the receivers; the caller may change the tensor then.
        One latency until it arrives. It is published once and read by each receiver, after a copy off the device if the
        source is a GPU rank.
        """
        ...

    def is_staged(self, link: Link) -> bool:
        """Return True if this rank's end of the link is a device that copies to or from the host.

        Then any number of tensors may be started or posted before the first is finished or waited for, and the device
        may get other work meanwhile.
        """
        ...

    def start_send(self, tensor: torch.Tensor, link: Link) -> PendingSend:
        """Begin a `send`, as a copy off the device; `finish` does the rest.

        The caller leaves the tensor alone until then. The device may get other work meanwhile.
        """
        ...

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:
        """Post the receipt of the link's next tensor into `out`, contiguous, of the sent tensor's dtype and shape.

        The caller leaves `out` alone until it has waited for it. An empty tensor arrives at once.
        """
        ...


class HostExchange(Exchange, Protocol):
    """Exchange of host tensors, for ranks whose device is the host."""

    @property
    def traffic(self) -> Traffic:
        """Amount that this rank has moved since the exchange was made."""
        ...

    @property
    def shared_path(self) -> Path | None:
        """Path whose folder all ranks see, and which no other exchange has; None if they share no memory."""
        ...

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """Sum among all ranks, as SumExchange.all_reduce, in fp32 in ascending rank order."""
        ...

    def abort(self) -> None:
        """Make a blocked or later call raise ExchangeAborted. From any thread."""
        ...

    def close(self) -> None:
        """Free what the exchange holds. Idempotent."""
        ...


class Sent:
    """PendingSend of a tensor that was sent."""

    def finish(self) -> None:
        """Return at once."""


SENT: Final = Sent()


class SendsAtOnce:
    """Base of exchanges whose tensors are on the host: `start_send` sends at once."""

    shared_path: Path | None = None
    """See `HostExchange.shared_path`."""

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        """Send over a link, as Exchange.send."""
        raise NotImplementedError

    def is_staged(self, link: Link) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def start_send(self, tensor: torch.Tensor, link: Link) -> PendingSend:
        """Send over a link."""
        self.send(tensor, link)
        return SENT


class LocalExchange(SendsAtOnce):
    """Exchange of one rank, a whole group or a subgroup, on any device: every collective is the identity."""

    rank = 0
    world_size = 1
    link_bytes = 0
    traffic = NO_TRAFFIC

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """Leave the tensor, which is the sum over one rank."""

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:  # noqa: ARG002
        """Return a copy of this rank's tensor."""
        return [tensor.clone()]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Leave the tensor, which is the source's."""

    def among(self, ranks: tuple[int, ...]) -> SumExchange:  # noqa: ARG002
        """Return this exchange."""
        return self

    def send(self, tensor: torch.Tensor, link: Link) -> None:  # noqa: ARG002
        """Raise ValueError: one rank has no links."""
        raise ValueError(f"a group of one rank has no {link}")

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:  # noqa: ARG002
        """Raise ValueError: one rank has no links."""
        raise ValueError(f"a group of one rank has no {link}")

    def abort(self) -> None:
        """Return at once: no call ever blocks."""

    def close(self) -> None:
        """Return at once: there is nothing to free."""


class Rounds(SumExchange, Protocol):
    """One rank's end of the rounds of a group or subgroup. Ranks are named by their number in the whole group."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace the tensor by the source's, as Exchange.broadcast."""
        ...

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's tensor, as Exchange.all_gather. Raises ValueError if `counts` do not fit."""
        ...


class GroupedExchange(SendsAtOnce):
    """Base of HostExchanges of several ranks: their rounds by group, of which the widest is of all ranks."""

    def __init__(self, rank: int, groups: Mapping[Ranks, Rounds]) -> None:
        self.rank = rank
        self._groups = groups
        self._world = groups[max(groups, key=len)]
        self.world_size = self._world.world_size

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """Sum in place among all ranks, as HostExchange.all_reduce."""
        self._world.all_reduce(tensor, contributors)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace the tensor by the source's, as Exchange.broadcast."""
        self._world.broadcast(tensor, source)

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's tensor, as Exchange.all_gather."""
        return self._world.all_gather(tensor, counts)

    def among(self, ranks: Ranks) -> SumExchange:
        """Return the exchange of a subgroup, as Exchange.among."""
        return LocalExchange() if ranks == (self.rank,) else self._groups[ranks]


class Arrived:
    """PendingTensor that has arrived."""

    is_here = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        """Return the tensor."""
        return self._tensor


def all_can(exchange: Exchange, can: bool) -> bool:
    """Return whether every rank of the group can. One round of all ranks. Raises ExchangeError."""
    return all(all_votes(exchange, int(can)))


def all_votes(exchange: Exchange, vote: int) -> list[int]:
    """Return a number of 63 bits of each rank of the group. One round of all ranks. Raises ExchangeError."""
    if exchange.world_size == 1:
        return [vote]
    votes = exchange.all_gather(torch.tensor([vote], dtype=torch.int64), [1] * exchange.world_size)
    return [int(one.item()) for one in votes]

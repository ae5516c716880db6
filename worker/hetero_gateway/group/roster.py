"""The roster: which process holds which place of the group, over which link, and whether it is free for an epoch.

A member is JOINED once it said Hello, ENGAGED while an epoch has it, and LEAVING from the epoch's Abort until it says
Hello again. A place is taken by a member that is JOINED or ENGAGED; a LEAVING one has not shown that it still lives,
so a new process may take its place. Messages tell members apart by their links, processes by their instance ids. One
asyncio loop.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hetero_api.v1 import ranks_pb2
from hetero_gateway.group.errors import RankMisbehaved, RankRefused
from hetero_gateway.group.settings import ExpectedPlace

_NAMED_FILES: Final = 3


class LinkEnd(enum.Enum):
    """Way in which the gateway ended a stream."""

    DONE = "done"
    """In good order."""
    REFUSED = "refused"
    """The rank cannot have the place that it asked for."""
    MISBEHAVED = "misbehaved"
    """The rank broke the protocol."""
    REPLACED = "replaced"
    """The rank hangs, or did not come back from an epoch that ended: a new process is to take its place."""


@dataclass(frozen=True, slots=True)
class Closing:
    """End of a link, and its reason."""

    end: LinkEnd
    reason: str


class RankLink:
    """Stream to one rank, as the group sees it; `peer` names it in logs until it says who it is.

    The group puts messages in and never waits; the server of the stream takes them out in order and writes them. So a
    rank that does not read holds up nobody but itself. A closed link takes no more messages; earlier ones are still
    delivered. Messages travel serialised: one for all ranks is turned into bytes once (`broadcast`).
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.closing: Closing | None = None
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, message: ranks_pb2.GatewayMessage) -> None:
        """Queue a message, unless the link is closed."""
        self.send_serialized(message.SerializeToString())

    def send_serialized(self, payload: bytes) -> None:
        """Queue a GatewayMessage that is already serialised, unless the link is closed."""
        if self.closing is None:
            self._queue.put_nowait(payload)

    def close(self, end: LinkEnd, reason: str) -> None:
        """End the stream after the queued messages. Only the first call counts."""
        if self.closing is None:
            self.closing = Closing(end, reason)
            self._queue.put_nowait(None)

    async def outgoing(self) -> AsyncIterator[bytes]:
        """Yield serialised GatewayMessages in order, until the link is closed. For one reader."""
        while (payload := await self._queue.get()) is not None:
            yield payload


def broadcast(links: Iterable[RankLink], message: ranks_pb2.GatewayMessage) -> None:
    """Send one message to every link."""
    payload = message.SerializeToString()
    for link in links:
        link.send_serialized(payload)


class MemberState(enum.Enum):
    """Progress of a member between Hello and Abort."""

    JOINED = "joined"
    ENGAGED = "engaged"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class Member:
    """Process that holds a place. `hello` is its latest one."""

    place: ExpectedPlace
    link: RankLink
    hello: ranks_pb2.Hello
    state: MemberState = MemberState.JOINED
    was_told_to_end: bool = False
    """Whether it said that somebody told it to end, e.g. a kubelet that evicts its pod."""

    @property
    def rank(self) -> int:
        """Its rank in the group."""
        return self.place.rank

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.hello.pod_name or self.place.pod_name})"


class Roster:
    """Members of a group by rank. Only ranks of this version, with this model and the same weights, are admitted."""

    def __init__(self, places: Sequence[ExpectedPlace], *, version: str, model_fingerprint: str) -> None:
        self.places = tuple(places)
        self._version = version
        self._model_fingerprint = model_fingerprint
        self._members: dict[int, Member] = {}

    @property
    def members(self) -> list[Member]:
        """Its members, in rank order."""
        return [self._members[rank] for rank in sorted(self._members)]

    @property
    def instance_ids(self) -> frozenset[str]:
        """Instance ids of the processes that are there."""
        return frozenset(member.hello.instance_id for member in self._members.values())

    def holder_of(self, rank: int) -> Member | None:
        """Return who holds a place."""
        return self._members.get(rank)

    def member_of(self, link: RankLink) -> Member | None:
        """Return the member whose link it is."""
        return next((member for member in self._members.values() if member.link is link), None)

    def missing(self) -> list[ExpectedPlace]:
        """Return places whose rank has not said Hello, or not since the last epoch."""
        joined = {rank for rank, member in self._members.items() if member.state is MemberState.JOINED}
        return [place for place in self.places if place.rank not in joined]

    def admit(self, link: RankLink, hello: ranks_pb2.Hello) -> Member:
        """Take a Hello, the first one or one after an Abort. Raises RankRefused or RankMisbehaved."""
        known = self.member_of(link)
        if known is not None:
            return self._admit_again(known, hello)
        self._check_program(hello)
        place = self._place_of(hello)
        self._check_weights(place, hello)
        holder = self._members.get(place.rank)
        if holder is not None and holder.state is not MemberState.LEAVING:
            raise RankRefused(f"the place of {place} is taken by {holder.hello.pod_name!r}, which is connected")
        if holder is not None:
            holder.link.close(LinkEnd.REPLACED, f"another process took the place of {holder}")
        member = self._members[place.rank] = Member(place, link, hello)
        return member

    def remove(self, link: RankLink) -> Member | None:
        """Remove and return the member whose stream ended."""
        member = self.member_of(link)
        if member is not None:
            del self._members[member.rank]
        return member

    def engage(self) -> list[Member]:
        """Engage all members in a new epoch; return them in rank order."""
        for member in self._members.values():
            member.state = MemberState.ENGAGED
        return self.members

    def release(self) -> list[Member]:
        """End the epoch; return the members that were in it and are still connected."""
        engaged = [member for member in self.members if member.state is MemberState.ENGAGED]
        for member in engaged:
            member.state = MemberState.LEAVING
        return engaged

    def leaving(self) -> list[Member]:
        """Return members that have not said Hello since the last epoch."""
        return [member for member in self.members if member.state is MemberState.LEAVING]

    def _admit_again(self, member: Member, hello: ranks_pb2.Hello) -> Member:
        if member.state is not MemberState.LEAVING:
            raise RankMisbehaved(f"{member} said Hello and is {member.state.value} already")
        before = member.hello
        if (hello.pool, hello.ordinal, hello.local_rank, hello.instance_id) != (
            before.pool, before.ordinal, before.local_rank, before.instance_id,
        ):  # fmt: skip
            raise RankMisbehaved(f"{member} said Hello as another rank on the same stream")
        self._check_weights(member.place, hello)
        member.hello, member.state = hello, MemberState.JOINED
        return member

    def _check_program(self, hello: ranks_pb2.Hello) -> None:
        if hello.version != self._version:
            raise RankRefused(
                f"version: the rank runs HeteroInference {hello.version or '(none)'}, the gateway {self._version}; "
                "run the same version everywhere"
            )
        if hello.model_fingerprint != self._model_fingerprint:
            raise RankRefused(
                f"model: the config.json of rank {hello.pod_name!r} (sha256 {hello.model_fingerprint[:12] or 'missing'}"
                f"…) is not the gateway's ({self._model_fingerprint[:12]}…); give both the same model and revision"
            )
        if not hello.instance_id:
            raise RankRefused("instance_id: is empty; a rank tells its process from an earlier one by it")

    def _check_weights(self, place: ExpectedPlace, hello: ranks_pb2.Hello) -> None:
        """Raise RankRefused if the rank would compute with other weights than those that are there.

        A rank that cannot read its files names none: it joins, and reports why when it is to load them.
        """
        for other in self.members:
            if other.rank == place.rank or other.state is MemberState.LEAVING:
                continue
            if difference := _difference(hello, other.hello):
                raise RankRefused(
                    f"model: the weights of rank {place.rank} ({hello.pod_name}) are not those of {other}: "
                    f"{difference}; give all ranks the same model and revision (spec.model.revision), and restart "
                    "those that hold others"
                )

    def _place_of(self, hello: ranks_pb2.Hello) -> ExpectedPlace:
        asked = (hello.pool, hello.ordinal, hello.local_rank)
        for place in self.places:
            if (place.pool, place.ordinal, place.local_rank) == asked:
                return place
        pools = ", ".join(sorted({place.pool for place in self.places}))
        raise RankRefused(
            f"pool, ordinal, local_rank: {asked} is no place of this group; it has {len(self.places)} ranks in the "
            f"pools {pools} (spec.pools)"
        )


def _difference(ours: ranks_pb2.Hello, theirs: ranks_pb2.Hello) -> str:
    """Return what differs in the files that two ranks read weights from; empty if nothing does."""
    here, there = ({file.name: file.digest for file in hello.files} for hello in (ours, theirs))
    if not (here and there):
        return ""
    names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if names:
        more = f" and {len(names) - _NAMED_FILES} more" if len(names) > _NAMED_FILES else ""
        return f"{', '.join(names[:_NAMED_FILES])}{more} differ" if len(names) > 1 else f"{names[0]} differs"
    revisions = ours.model_revision, theirs.model_revision
    return f"revision {revisions[0]} is not {revisions[1]}" if all(revisions) and len(set(revisions)) > 1 else ""

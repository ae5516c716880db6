"""The roster: which process holds which place of the group, and whether it is free for an epoch.

A member is JOINED once it said Hello, ENGAGED while an epoch has it, and LEAVING from the epoch's Abort until it says
Hello again. A place is taken by a member that is JOINED or ENGAGED; a LEAVING one has not shown that it still lives,
so a new process may take its place. Messages tell members apart by their links, processes by their instance ids.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_api.v1 import ranks_pb2
from hetero_gateway.group.errors import RankMisbehaved, RankRefused
from hetero_gateway.group.placement import ExpectedPlace
from hetero_gateway.group.rank_link import LinkEnd, RankLink


class MemberState(enum.Enum):
    """Where a member stands between Hello and Abort."""

    JOINED = "joined"
    ENGAGED = "engaged"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class Member:
    """A process in its place. `hello` is the latest that it said."""

    place: ExpectedPlace
    link: RankLink
    hello: ranks_pb2.Hello
    state: MemberState = MemberState.JOINED

    @property
    def rank(self) -> int:
        return self.place.rank

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.hello.pod_name or self.place.pod_name})"


class Roster:
    """Members by rank. Only ranks of this version, with this model, are admitted."""

    def __init__(self, places: Sequence[ExpectedPlace], *, version: str, model_fingerprint: str) -> None:
        self.places = tuple(places)
        self._version = version
        self._model_fingerprint = model_fingerprint
        self._members: dict[int, Member] = {}

    @property
    def members(self) -> list[Member]:
        """In rank order."""
        return [self._members[rank] for rank in sorted(self._members)]

    @property
    def instance_ids(self) -> frozenset[str]:
        """Of the processes that are there."""
        return frozenset(member.hello.instance_id for member in self._members.values())

    def at(self, rank: int) -> Member | None:
        """Who holds a place."""
        return self._members.get(rank)

    def of(self, link: RankLink) -> Member | None:
        """Whose link it is."""
        return next((member for member in self._members.values() if member.link is link), None)

    def is_complete(self) -> bool:
        """Whether every place has a member that waits for an epoch."""
        return not self.missing()

    def missing(self) -> list[ExpectedPlace]:
        """Places whose rank has not said Hello, or not since the last epoch."""
        joined = {rank for rank, member in self._members.items() if member.state is MemberState.JOINED}
        return [place for place in self.places if place.rank not in joined]

    def admit(self, link: RankLink, hello: ranks_pb2.Hello) -> Member:
        """A Hello, the first or one after an Abort. Raises RankRefused or RankMisbehaved."""
        known = self.of(link)
        if known is not None:
            return self._admit_again(known, hello)
        self._check_program(hello)
        place = self._place_of(hello)
        holder = self._members.get(place.rank)
        if holder is not None and holder.state is not MemberState.LEAVING:
            raise RankRefused(f"the place of {place} is taken by {holder.hello.pod_name!r}, which is connected")
        if holder is not None:
            holder.link.close(LinkEnd.REPLACED, f"another process took the place of {holder}")
        member = self._members[place.rank] = Member(place, link, hello)
        return member

    def remove(self, link: RankLink) -> Member | None:
        """Its stream ended; who it was."""
        member = self.of(link)
        if member is not None:
            del self._members[member.rank]
        return member

    def engage(self) -> list[Member]:
        """All members, in rank order, for a new epoch."""
        for member in self._members.values():
            member.state = MemberState.ENGAGED
        return self.members

    def release(self) -> list[Member]:
        """The epoch is over: those that were in it and are still connected."""
        engaged = [member for member in self.members if member.state is MemberState.ENGAGED]
        for member in engaged:
            member.state = MemberState.LEAVING
        return engaged

    def leaving(self) -> list[Member]:
        """Members that have not said Hello since the last epoch."""
        return [member for member in self.members if member.state is MemberState.LEAVING]

    def _admit_again(self, member: Member, hello: ranks_pb2.Hello) -> Member:
        if member.state is not MemberState.LEAVING:
            raise RankMisbehaved(f"{member} said Hello and is {member.state.value} already")
        before = member.hello
        if (hello.pool, hello.ordinal, hello.local_rank, hello.instance_id) != (
            before.pool, before.ordinal, before.local_rank, before.instance_id,
        ):  # fmt: skip
            raise RankMisbehaved(f"{member} said Hello as another rank on the same stream")
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

"""RankLink: one rank's stream as the group sees it, whatever carries it.

The group puts messages in and never waits; whoever serves the stream takes them out in order and writes them. A
rank that does not read holds up nobody but itself. A closed link takes nothing more; what was put in before is
still delivered. One asyncio loop.

Messages travel serialised: what all ranks are told is turned into bytes once (`broadcast`), not once a rank.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from hetero_api.v1 import ranks_pb2


class LinkEnd(enum.Enum):
    """How the gateway ended a stream."""

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
    """Why and how a link was closed."""

    end: LinkEnd
    reason: str


class RankLink:
    """Messages to one rank. `peer` names it in logs until it says who it is."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.closing: Closing | None = None
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, message: ranks_pb2.GatewayMessage) -> None:
        """Queue a message. Does nothing on a closed link."""
        self.send_serialized(message.SerializeToString())

    def send_serialized(self, payload: bytes) -> None:
        """Queue a GatewayMessage that is bytes already. Does nothing on a closed link."""
        if self.closing is None:
            self._queue.put_nowait(payload)

    def close(self, end: LinkEnd, reason: str) -> None:
        """End the stream after what is queued. Only the first call counts."""
        if self.closing is None:
            self.closing = Closing(end, reason)
            self._queue.put_nowait(None)

    async def outgoing(self) -> AsyncIterator[bytes]:
        """Serialised GatewayMessages in order, until the link is closed. For one reader."""
        while (payload := await self._queue.get()) is not None:
            yield payload


def broadcast(links: Iterable[RankLink], message: ranks_pb2.GatewayMessage) -> None:
    """The same message to every link."""
    payload = message.SerializeToString()
    for link in links:
        link.send_serialized(payload)

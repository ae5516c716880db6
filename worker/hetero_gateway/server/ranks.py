"""hetero.v1.Ranks: one stream a rank, for the rank's whole life.

A stream is read by one task and written by another, through the rank's link, so a rank that does not read delays
neither the group nor the loop. The server refuses callers without the group's token before anything of theirs is
read.

The gateway's messages come serialised from the link: `serve_ranks` registers the service with a handler that passes
bytes through, which the generated one does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from hetero_api.v1 import ranks_pb2
from hetero_gateway.group.rendezvous import Group
from hetero_gateway.group.roster import LinkEnd, RankLink
from hetero_gateway.server.calls import Context, RpcStatus, abort, answering, clip, when_over

logger = logging.getLogger(__name__)

_CODES: Final = {
    LinkEnd.REFUSED: grpc.StatusCode.FAILED_PRECONDITION,
    LinkEnd.MISBEHAVED: grpc.StatusCode.INVALID_ARGUMENT,
    LinkEnd.REPLACED: grpc.StatusCode.ABORTED,
}
"""Status of a stream by the way its link ended; OK for the others."""


_SERVICE: Final = ranks_pb2.DESCRIPTOR.services_by_name["Ranks"].full_name


def serve_ranks(server: grpc.aio.Server, group: Group) -> None:
    """Have `server` answer hetero.v1.Ranks for `group`."""
    join: Any = grpc.stream_stream_rpc_method_handler(
        RanksServicer(group).Join,
        request_deserializer=ranks_pb2.RankMessage.FromString,
        response_serializer=None,  # bytes already
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Join": join}),))


class RanksServicer:
    """The service: ranks that call become links of the group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    async def Join(  # noqa: N802
        self, request_iterator: AsyncIterator[ranks_pb2.RankMessage], context: Context
    ) -> AsyncIterator[bytes]:
        """Exchange messages with a rank until one of the two leaves."""
        async with answering(context, "Join"):
            link = RankLink(context.peer())
            reader = asyncio.create_task(self._read(request_iterator, link))
            when_over(context, lambda: self._hang_up(link, reader))
            async for payload in link.outgoing():
                yield payload
            # A read that is still waiting when the call ends would fail.
            reader.cancel()
            closing = link.closing
            if closing is not None and closing.end in _CODES:
                await abort(context, RpcStatus(_CODES[closing.end], clip(closing.reason)))

    async def _read(self, messages: AsyncIterator[ranks_pb2.RankMessage], link: RankLink) -> None:
        reason = "the rank's process ended or left"
        try:
            async for message in messages:
                self._group.receive(link, message)
        except grpc.aio.UsageError:
            reason = "the connection broke"
        except Exception as error:
            logger.exception("peer=%s: reading failed", link.peer)
            reason = f"reading failed: {type(error).__name__}: {error}"
        self._group.leave(link, reason)
        link.close(LinkEnd.DONE, reason)

    def _hang_up(self, link: RankLink, reader: asyncio.Task[None]) -> None:
        """Take the rank out of the group: its call is over."""
        reader.cancel()
        closing = link.closing
        self._group.leave(link, closing.reason if closing is not None else "the connection broke")
        link.close(LinkEnd.DONE, "the call is over")

"""Who shows the right token. One rule for ranks and for administrators: `authorization: Bearer TOKEN`, once."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import grpc

from hetero_api.contract import AUTHORIZATION_KEY
from hetero_gateway.server.statuses import Context, RpcStatus, abort

logger = logging.getLogger(__name__)

_HEALTH_PREFIX: Final = "/grpc.health.v1.Health/"


class Bearer:
    """The token that callers must show; `whose` names it for those who do not, e.g. "this group's"."""

    def __init__(self, token: str, *, whose: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._whose = whose

    def is_shown(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Whether the metadata hold the token, exactly once. Takes as long for a near miss as for a far one."""
        shown = [value for key, value in metadata or () if key == AUTHORIZATION_KEY]
        raw = shown[0] if len(shown) == 1 else ""
        return hmac.compare_digest(raw.encode() if isinstance(raw, str) else raw, self._expected)

    async def refuse(self, context: Context) -> None:
        """End the call with UNAUTHENTICATED."""
        logger.warning("peer=%s called without %s token", context.peer(), self._whose)
        message = f"metadata {AUTHORIZATION_KEY!r} must be 'Bearer TOKEN' with {self._whose} token"
        await abort(context, RpcStatus(grpc.StatusCode.UNAUTHENTICATED, message))


class BearerInterceptor(grpc.aio.ServerInterceptor):
    """Asks for the token on every call of a server but health, whatever services it has or will have."""

    def __init__(self, bearer: Bearer) -> None:
        self._bearer = bearer

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        details = handler_call_details
        if details.method.startswith(_HEALTH_PREFIX) or self._bearer.is_shown(details.invocation_metadata):
            handler: grpc.RpcMethodHandler[Any, Any] | None = await continuation(details)
            return handler
        # Of a stream, whatever the call is: it is refused before anything of it is read.
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, _: object, context: Context) -> None:
        await self._bearer.refuse(context)

"""grpc.health.v1, with a Watch that tells every watcher of every change.

The package's own asyncio servicer drops its list of watchers of a service when one of them leaves, so the others hear
no more; hence this one. A watcher that reads slowly sees the latest status, not each. An unknown service is NOT_FOUND
to Check; to Watch it is SERVICE_UNKNOWN, and the stream stays open in case it comes to be. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hetero_gateway.server.statuses import Context, RpcStatus, abort

WHOLE_SERVER: Final = ""

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the package is untyped
    """Services begin as NOT_SERVING."""

    def __init__(self, services: Iterable[str]) -> None:
        self._statuses: dict[str, int] = dict.fromkeys(services, _NOT_SERVING)
        self._watchers: set[asyncio.Event] = set()
        self._closed = False

    def set_serving(self, services: Iterable[str], serving: bool) -> None:
        """Change the status of services, and wake those who watch."""
        self._statuses.update(dict.fromkeys(services, _SERVING if serving else _NOT_SERVING))
        self._wake()

    def close(self) -> None:
        """Everything is NOT_SERVING from now on; Watch streams end after they told so."""
        self._statuses = dict.fromkeys(self._statuses, _NOT_SERVING)
        self._closed = True
        self._wake()

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802
        status = self._statuses.get(request.service)
        if status is None:
            await abort(context, RpcStatus(grpc.StatusCode.NOT_FOUND, f"service {request.service!r} is unknown"))
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802, ARG002
        changed = asyncio.Event()
        self._watchers.add(changed)
        told: int | None = None
        try:
            while True:
                changed.clear()
                status = self._statuses.get(request.service, _SERVICE_UNKNOWN)
                if status != told:
                    told = status
                    yield health_pb2.HealthCheckResponse(status=status)
                elif self._closed:
                    return
                else:
                    await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()

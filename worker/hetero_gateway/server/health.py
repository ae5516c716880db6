"""Health of a gateway: grpc.health.v1, and the kubelet's probes.

grpc.health.v1 is answered by a servicer of our own, whose Watch reports every change to every watcher: the package's
asyncio servicer drops its list of watchers of a service when one of them leaves, so the others hear no more. A watcher
that reads slowly sees the latest status, not each. Check answers NOT_FOUND for an unknown service; Watch answers
SERVICE_UNKNOWN and stays open in case the service comes to be. Nobody needs a key to watch, so watchers are bounded,
in all and by machine: each holds one of the server's calls.

Probes run in threads of the probe server and read from the event loop, so an answer shows that the loop turns. A
gateway is alive while its loop answers and no step has been out for much longer than a step may take. (A step that is
late ends its epoch by `recovery.stepTimeoutSeconds`; one that outlives even that means that the gateway is stuck.) It
is ready while the group serves. A gateway that waits for ranks is alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hetero_gateway.group.rendezvous import Group
from hetero_gateway.server.calls import Context, RpcStatus, abort, clip, host_of

WHOLE_SERVER: Final = ""
MAX_WATCHERS: Final = 512
MAX_WATCHERS_A_HOST: Final = 32

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the package is untyped
    """grpc.health.v1 for some services, which begin as NOT_SERVING. One asyncio loop."""

    def __init__(self, services: Iterable[str]) -> None:
        self._statuses: dict[str, int] = dict.fromkeys(services, _NOT_SERVING)
        self._watchers: dict[asyncio.Event, str] = {}
        """Where a change is told, and the host that watches."""
        self._closed = False

    def set_serving(self, services: Iterable[str], serving: bool) -> None:
        """Change the status of services, and wake the watchers."""
        self._statuses.update(dict.fromkeys(services, _SERVING if serving else _NOT_SERVING))
        self._wake()

    def close(self) -> None:
        """Set everything to NOT_SERVING for good; Watch streams end after they have said so."""
        self._statuses = dict.fromkeys(self._statuses, _NOT_SERVING)
        self._closed = True
        self._wake()

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Return the service's status. Ends with NOT_FOUND for an unknown one."""
        status = self._statuses.get(request.service)
        if status is None:
            message = clip(f"service {request.service!r} is unknown")
            await abort(context, RpcStatus(grpc.StatusCode.NOT_FOUND, message))
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        """Stream the service's status, now and whenever it changes. Ends with RESOURCE_EXHAUSTED for one too many."""
        host, watching = host_of(context), [*self._watchers.values()]
        if len(watching) >= MAX_WATCHERS or watching.count(host) >= MAX_WATCHERS_A_HOST:
            message = f"at most {MAX_WATCHERS} may watch, and {MAX_WATCHERS_A_HOST} of one machine; use Check"
            await abort(context, RpcStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, message))
        changed = asyncio.Event()
        self._watchers[changed] = host
        sent: int | None = None
        try:
            while True:
                changed.clear()
                status = self._statuses.get(request.service, _SERVICE_UNKNOWN)
                if status != sent:
                    sent = status
                    yield health_pb2.HealthCheckResponse(status=status)
                elif self._closed:
                    return
                else:
                    await changed.wait()
        finally:
            del self._watchers[changed]

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()


LOOP_TIMEOUT_S: Final = 3.0
"""Less than the kubelet's patience with a probe."""
STALL_FACTOR: Final = 2.0


class GatewayProbes:
    """Probes of one gateway, called from the probe server's threads."""

    def __init__(self, group: Group, reader: LoopReader, *, step_timeout_s: float) -> None:
        self._group = group
        self._reader = reader
        self._stall_limit_s = STALL_FACTOR * step_timeout_s

    def live(self) -> str:
        """Return the reason why the gateway is stuck; "" if it is not."""
        return self._ask(self._stall)

    def ready(self) -> str:
        """Return the reason why requests are not served; "" if they are."""
        return self._ask(self._obstacle)

    def _ask(self, question: Callable[[], str]) -> str:
        try:
            return self._reader.read(question, timeout_s=LOOP_TIMEOUT_S)
        except TimeoutError:
            return f"the event loop has not answered within {LOOP_TIMEOUT_S:g} s"

    def _stall(self) -> str:
        stalled_s = self._group.stalled_s
        if stalled_s <= self._stall_limit_s:
            return ""
        return f"a step has been out for {stalled_s:.0f} s, the limit is {self._stall_limit_s:g} s"

    def _obstacle(self) -> str:
        return "" if self._group.is_ready else f"the group is {self._group.state.name}"


T = TypeVar("T")


class LoopReader:
    """Calls functions on an event loop, from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def read(self, function: Callable[[], T], *, timeout_s: float) -> T:
        """Return the result of `function`, called on the loop. Raises its error, or TimeoutError."""

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(timeout_s)

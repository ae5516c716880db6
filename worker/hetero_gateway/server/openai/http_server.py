"""The HTTP server of the endpoint: uvicorn, on the gateway's own loop, on a socket that is bound before it starts.

uvicorn waits for a request's head as long as the client likes, and takes any number of connections; the protocol here
bounds both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import uvicorn
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from hetero_api.contract import MAX_DOOR_CONNECTIONS
from hetero_gateway.server.errors import BindError
from hetero_gateway.server.grpc_server import address
from hetero_gateway.server.openai.answers import Failure

MAX_CONNECTIONS: Final = MAX_DOOR_CONNECTIONS
MAX_HEAD_BYTES: Final = 16 * 1024
"""Request line and headers together; what came with them in one piece may be as much again."""
HEAD_TIMEOUT_S: Final = 10.0
"""From the connection, or from the first byte of a further request, to the end of its head."""
MAX_BODY_BYTES: Final = 8 * 1024 * 1024
READ_TIMEOUT_S: Final = 60.0
"""From the moment when a connection holds more of an answer than it should until its client has read most of that."""
BODY_TIMEOUT_S: Final = 60.0
"""From a request's head to the end of its body."""
MAX_BODIES_BYTES: Final = 128 * 1024 * 1024
"""Bodies that are being received and read, all together."""
SMALL_BODY_BYTES: Final = 64 * 1024
"""Smaller ones do not count."""
_BACKLOG: Final = 1024
_KEEP_ALIVE_S: Final = 30


class _BoundedProtocol(H11Protocol):
    """One connection, closed when its request's head is too long or late, or its client does not read."""

    _waiting: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type] # uvicorn narrows it
        if len(self.connections) > MAX_CONNECTIONS:
            self.transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        # In pieces: the library looks at the length of a head only while it is not complete.
        for begin in range(0, len(data), MAX_HEAD_BYTES):
            if self.transport.is_closing():
                break
            super().data_received(data[begin : begin + MAX_HEAD_BYTES])
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        self.resume_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _watch(self) -> None:
        """Time the wait for a head, if there is one and it is not timed yet."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._waiting is None and not self.transport.is_closing():
            self._waiting = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class _Server(uvicorn.Server):
    """A server without signal handlers: the gateway has its own. It bounds the time of handshakes, too."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets."""
        await self.lifespan.startup()
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        timeout_s = None if tls is None else HEAD_TIMEOUT_S
        self.servers = [
            await loop.create_server(
                self._new_protocol, sock=each, ssl=tls, backlog=_BACKLOG, ssl_handshake_timeout=timeout_s
            )
            for each in sockets or ()
        ]
        self.started = True

    def _new_protocol(self) -> _BoundedProtocol:
        return _BoundedProtocol(self.config, self.server_state, self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpListener:
    """Server of `application`, from `start` to `stop`. Made and used on one loop."""

    def __init__(
        self, application: Any, *, host: str, port: int, option: str, tls: ssl.SSLContext | None = None
    ) -> None:
        """Bind the port, 0 for any free one. Raises BindError, which names `option`."""
        self._socket = _bound(host, port, option)
        self.port = int(self._socket.getsockname()[1])
        self.address = address(host, self.port)
        config = uvicorn.Config(
            application,
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_keep_alive=_KEEP_ALIVE_S,
            server_header=False,
            ws="none",
            http=_BoundedProtocol,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Answer calls."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="openai-endpoint")

    def close_connections(self) -> None:
        """Have every connection end with its next answer, so that its client comes back by another, to who is ready."""
        self._server.config.encoded_headers.append((b"connection", b"close"))  # read within a second

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections; cut off calls that have not ended within `grace_s`."""
        if self._serving is None:
            self._socket.close()
            return
        self._server.should_exit = True
        _, pending = await asyncio.wait((self._serving,), timeout=grace_s)
        if pending:
            self._server.force_exit = True
            # From Python 3.12 on a server that closes waits for all connections, also of clients that do not read.
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await self._serving


def _bound(host: str, port: int, option: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        is_ipv6 = family == socket.AF_INET6
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_ipv6)
        # Connections inherit it. asyncio sets it only where a socket names its protocol, which this one does not.
        # Without it the second piece of an answer waits until the client acknowledges the first, for up to 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        # The standard library adds the address to the system's words.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise BindError(
            f"{option}: cannot listen on {host} port {port} ({reason}); choose another port, or 0 for any that is free"
        ) from error


class RequestBodies:
    """Bodies that are being received and read, bounded in bytes and in time."""

    def __init__(self) -> None:
        self._held = 0

    @asynccontextmanager
    async def received(self, request: Request) -> AsyncIterator[bytes]:
        """Hold a request's body while entered. Raises Failure when it is too long or late, or others hold too much."""
        body = bytearray()
        held = 0
        try:
            async for chunk in _in_time(request.stream()):
                body += chunk
                held += self._hold(len(body), held)
            yield bytes(body)
        finally:
            self._held -= held

    def _hold(self, size: int, held: int) -> int:
        """Hold what `size` bytes of a body take beyond `held`, and return it."""
        if size > MAX_BODY_BYTES:
            raise Failure(413, "invalid_request_error", f"the body is longer than {MAX_BODY_BYTES} bytes")
        more = size - held if size > SMALL_BODY_BYTES else 0
        if self._held + more > MAX_BODIES_BYTES:
            raise Failure(429, "rate_limit_error", "too many long bodies at once; try later", code="queue_full")
        self._held += more
        return more


async def _in_time(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pass on a body's chunks. Raises Failure when the last of them does not come in time."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + BODY_TIMEOUT_S
    try:
        while True:
            async with asyncio.timeout_at(end_s):
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            yield chunk
    except TimeoutError as error:
        text = f"the body did not come within {BODY_TIMEOUT_S:g} s"
        raise Failure(408, "invalid_request_error", text, code="timeout") from error


async def client_gone(request: Request) -> None:
    """Return once the client has gone away; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass

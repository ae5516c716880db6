"""The HTTP server of the endpoint: uvicorn, on the gateway's own loop, on a socket that is bound before it starts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

from hetero_gateway.server.errors import BindError
from hetero_gateway.server.listening import address

_BACKLOG: Final = 1024
_KEEP_ALIVE_S: Final = 30


class _Server(uvicorn.Server):
    """The gateway has signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpListener:
    """Serves `application` from `start` to `stop`. To be made and used on one loop."""

    def __init__(self, application: Any, *, host: str, port: int, option: str) -> None:
        """Binds the port, 0 for one of the system's choice. Raises BindError, which names `option`."""
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
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Answer calls."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="openai-endpoint")

    async def stop(self, grace_s: float) -> None:
        """Accept no more; calls that have not ended within the time are cut off."""
        if self._serving is None:
            self._socket.close()
            return
        self._server.should_exit = True
        _, pending = await asyncio.wait((self._serving,), timeout=grace_s)
        if pending:
            self._server.force_exit = True
            await self._serving


def _bound(host: str, port: int, option: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise BindError(f"{option}: cannot listen on {host} port {port}: {error.strerror}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise BindError(
            f"{option}: cannot listen on {host} port {port} ({error.strerror}); choose another port, or 0 for any that "
            "is free"
        ) from error
    return listening

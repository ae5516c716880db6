"""HTTP for Kubernetes' probes and for Prometheus, which gateways and rank pods serve beside gRPC.

A probe is a function that returns the problem in a line; "" means that all is well. It runs in a thread of the
server's, and answers 200 or 503 with that line, so that `kubectl describe` shows why. GET /metrics is a scrape.
"""

from __future__ import annotations

import socket
import socketserver
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry

from hetero_api.metrics import EXPOSITION_TYPE, exposition

Probe = Callable[[], str]
"""Function that returns the problem, "" if there is none."""

ScrapeRefusal = Callable[[str], tuple[str, str] | None]
"""Function from the value of `Authorization`, "" if absent, to status and reason of a refusal; None lets it pass."""

_Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
_SLOW_CLIENT_S: Final = 10
MAX_CONNECTIONS: Final = 64


class ProbeServer:
    """Listens from `start` to `stop`, in threads of its own."""

    def __init__(self, server: WSGIServer) -> None:
        self._server = server
        self._thread = Thread(target=server.serve_forever, name="probes", daemon=True)
        self._thread.start()

    @classmethod
    def start(
        cls,
        *,
        host: str,
        port: int,
        probes: Mapping[str, Probe],
        registry: CollectorRegistry,
        scrape_refusal: ScrapeRefusal = lambda _: None,
    ) -> ProbeServer:
        """Serve `probes` by path, and the registry at /metrics. Port 0 lets the system choose. Raises OSError."""
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = (_Server6 if family == socket.AF_INET6 else _Server)((host, port), _Handler)
        server.set_app(_application(probes, registry, scrape_refusal))
        return cls(server)

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return int(self._server.server_address[1])

    def stop(self) -> None:
        """Listen no more. Answers that are being made are not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each connection, of which the oldest is closed when there are too many.

    So clients that send nothing, or a byte now and then, cannot keep the kubelet out.
    """

    daemon_threads = True
    block_on_close = False
    _open: dict[Any, None]
    _lock: Lock

    def server_activate(self) -> None:
        self._open = {}
        self._lock = Lock()
        super().server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        # The standard library's asks DNS for this host's name, which may take seconds and is of no use here.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _SLOW_CLIENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: a line for each probe would bury the log."""


def _application(
    probes: Mapping[str, Probe], registry: CollectorRegistry, scrape_refusal: ScrapeRefusal
) -> _Application:
    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        refusal = scrape_refusal(environ.get("HTTP_AUTHORIZATION", "")) if path == "/metrics" else None
        if refusal is not None:
            status, text = refusal
        elif path == "/metrics":
            scrape = exposition(registry)  # before the status: it may fail
            start_response("200 OK", [("Content-Type", EXPOSITION_TYPE)])
            return [scrape]
        elif path not in probes:
            status, text = "404 Not Found", f"there is {', '.join(sorted([*probes, '/metrics']))}"
        else:
            problem = probes[path]()
            status, text = ("503 Service Unavailable", problem) if problem else ("200 OK", "ok")
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    return answer

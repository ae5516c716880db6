"""A reverse proxy between a program and its API server: it records every call and does to it what rules say.

Plain http on loopback towards the program, https towards the API server, in a thread with an event loop of its own.
The caller's bearer token is passed on; or the proxy presents `credentials` of its own, so that the program needs none.
Answers are passed on whole, watches event by event. What rules there are: faults.py.

    with FaultProxy(cluster, credentials=cluster.user("operator")) as proxy:
        run_operator(kubeconfig=cluster.kubeconfig(Credentials(), server=proxy.url))
        proxy.rules.append(AtCall(3, operator.kill, when="after"))
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.support.kube.calls import CallFilter, ProxiedCall
from tests.support.kube.cluster import Cluster
from tests.support.kube.faults import Rule
from tests.support.kube.kubeconfigs import Credentials
from tests.support.kube.polling import poll
from tests.support.kube.ports import HOST, free_port
from tests.support.kube.proxy_server import ProxyServer, error_event

T = TypeVar("T")

COMMAND_TIMEOUT_S = 20.0
WAIT_TIMEOUT_S = 20.0


def any_call(call: ProxiedCall) -> bool:
    """The filter that lets everything through."""
    return True


class FaultProxy:
    """Listens when entered. `rules` may be changed at any time; `calls` grows in the order of arrival."""

    def __init__(self, cluster: Cluster, *, credentials: Credentials | None = None) -> None:
        self.rules: list[Rule] = []
        self._port = free_port()
        token = None if credentials is None else credentials.token
        self._server = ProxyServer(cluster.server, _tls(cluster, credentials), token, self.rules)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    @property
    def url(self) -> str:
        """Where programs find their API server."""
        return f"http://{HOST}:{self._port}"

    @property
    def calls(self) -> list[ProxiedCall]:
        return self._server.calls

    def start(self) -> None:
        """Listen."""
        self._thread.start()
        try:
            self._do(self._server.open(HOST, self._port))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Cut everything and end."""
        self._do(self._server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(COMMAND_TIMEOUT_S)
        self._loop.close()

    def refuse(self) -> None:
        """As if the API server were gone: connections are cut, and new ones refused, until `accept`."""
        self._do(self._server.refuse())

    def accept(self) -> None:
        """Back on the same port."""
        self._do(self._server.accept(HOST, self._port))

    def expire_watches(self, of: CallFilter = any_call) -> int:
        """End open watches with an ERROR event 410, as a server does whose history was compacted; how many."""
        return self._do(self._server.end_watches(of, last=error_event(410)))

    def cut_watches(self, of: CallFilter = any_call) -> int:
        """End open watches without a word; how many."""
        return self._do(self._server.end_watches(of, last=b""))

    def open_watches(self, of: CallFilter = any_call) -> list[ProxiedCall]:
        """Watches that are streaming now."""
        return [call for call in self._server.open_watches() if of(call)]

    def matching(self, of: CallFilter, *, since: int = 0) -> list[ProxiedCall]:
        """Calls that a filter lets through, after the first `since` of all (`len(proxy.calls)` is a mark)."""
        return [call for call in self.calls[since:] if of(call)]

    def wait_for_calls(
        self, of: CallFilter, *, count: int = 1, since: int = 0, timeout_s: float = WAIT_TIMEOUT_S
    ) -> list[ProxiedCall]:
        """Matching calls, once `count` of them were answered or cut (a watch: once it streams)."""

        def probe() -> list[ProxiedCall] | None:
            found = [call for call in self.matching(of, since=since) if call.ended is not None or call.code is not None]
            return found if len(found) >= count else None

        return poll(probe, timeout_s=timeout_s, describe=lambda: "\n".join(str(call) for call in self.calls[-50:]))

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(COMMAND_TIMEOUT_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _tls(cluster: Cluster, credentials: Credentials | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(cluster.ca_file))
    if credentials is not None and credentials.certificate is not None:
        context.load_cert_chain(credentials.certificate.certificate, credentials.certificate.key)
    return context

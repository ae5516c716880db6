"""Fence around all writes: the border that a process which no longer leads cannot cross.

The Lease is another's from `duration_s` after its last renewal on. Writes end earlier, `renew_s` after it, and each
write is given no more time than the Lease has left: when another process takes over, nothing of ours is under way.
Both are counted on this process's monotonic clock from before the renewal was sent, so no clocks are compared.

Every call of the API goes through one FencedClient. It asks the fence when a write begins, and again in the step of
the event loop in which the bytes go to the socket: a connection may take long, and a process can be stopped between
any two steps and go on when another has the Lease. That second look hangs on aiohttp's tracing of requests. Whether it
still refuses with the aiohttp that is installed is tried with a dry write at start (`prove`), before any election.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.rest import RESTResponse

from hetero_operator.cluster.kinds import LEASE
from hetero_operator.errors import FenceBroken, NotLeading

Clock = Callable[[], float]

REQUEST_TIMEOUT_S: Final = 30.0
_READS: Final = frozenset({"GET", "HEAD"})


class Fence:
    """Closed until `open` is called, and again when its time is over."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._writes_until = 0.0
        self._lease_until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a write may begin now."""
        return self._clock() < self._writes_until

    def open(self, *, writes_until: float, lease_until: float) -> None:
        """Allow writes until a moment of the clock; another may hold the Lease from `lease_until` on."""
        self._writes_until, self._lease_until = writes_until, lease_until

    def close(self) -> None:
        """Let no write begin any more."""
        self._writes_until = 0.0

    def allowance_s(self) -> float:
        """Return how many seconds a write that begins now may take. Raises NotLeading."""
        if not self.is_open:
            raise NotLeading("the Lease is not held")
        return self._lease_until - self._clock()


class FencedClient(ApiClient):
    """The Kubernetes API client, through which no write goes while the fence is closed. Only the Lease is exempt."""

    def __init__(self, configuration: Configuration, fence: Fence) -> None:
        self._fence = fence
        tracing = aiohttp.TraceConfig()
        tracing.on_request_chunk_sent.append(self._look_again)
        configuration.trace_configs = [tracing]
        super().__init__(configuration)

    async def call_api(  # type: ignore[override]  # of the library's arguments, those that are used
        self,
        method: str,
        url: str,
        header_params: Mapping[str, str] | None = None,
        body: Any = None,
        *,
        _request_timeout: aiohttp.ClientTimeout,
    ) -> RESTResponse:
        """Send a request; a write is given no more time than the Lease has left. Raises NotLeading."""
        limits = _request_timeout
        if _is_fenced(method, url):
            allowed_s = min(limits.total or REQUEST_TIMEOUT_S, self._fence.allowance_s())
            connect_s = min(limits.sock_connect or allowed_s, allowed_s)
            limits = aiohttp.ClientTimeout(total=allowed_s, sock_connect=connect_s)
        return await self._send(method, url, header_params, body, limits)

    async def prove(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> None:
        """Send a dry write past the first look, with a closed fence, and see the second look refuse it.

        `path` is a collection's. Raises FenceBroken when the server answers, aiohttp.ClientError when there is none.
        """
        if self._fence.is_open:
            raise FenceBroken("the fence is open before any election")
        _, url, headers, payload, _ = await self.param_serialize(
            "POST", path, query_params=[("dryRun", "All")], header_params={}, body=body, auth_settings=["BearerToken"]
        )
        try:
            await self._send("POST", url, headers, payload, aiohttp.ClientTimeout(total=timeout_s))
        except aiohttp.ClientError as error:
            if not isinstance(error.__cause__, NotLeading):
                raise
        else:
            raise FenceBroken("a write reached the API server although the Lease is not held")

    async def _send(
        self, method: str, url: str, headers: Mapping[str, str] | None, body: Any, limits: aiohttp.ClientTimeout
    ) -> RESTResponse:
        return await super().call_api(method, url, headers, body, _request_timeout=limits)

    async def _look_again(self, session: object, context: object, sent: aiohttp.TraceRequestChunkSentParams) -> None:  # noqa: ARG002
        """Refuse a write whose bytes are about to go to the socket; aiohttp closes the connection then."""
        if _is_fenced(sent.method, sent.url.path) and not self._fence.is_open:
            raise NotLeading("the Lease is not held")


def _is_fenced(method: str, url: str) -> bool:
    return method not in _READS and f"{LEASE.root}/" not in url

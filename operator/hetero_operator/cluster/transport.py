"""Calls of the API server through the API client of kubernetes.aio, without its models: objects stay decoded JSON.

Every call has a time limit, is counted by verb and code, and fails with an ApiError only. Nothing is tried again here:
callers know better when. Writes pass the fence (fence.py). Watches are read here: `aio.watch` passes on a line
that was cut as if it were an event, and to close one of its watches closes the whole client.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import Configuration

from hetero_api.contract import FIELD_MANAGER, VERSION
from hetero_operator.cluster.fence import REQUEST_TIMEOUT_S, Fence, FencedClient
from hetero_operator.errors import (
    ApiError,
    ConfigError,
    Conflict,
    Gone,
    NotFound,
    NotLeading,
    Refused,
    TooLarge,
    Unreachable,
)
from hetero_operator.timing import unobserved

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 10.0
WATCH_SERVER_TIMEOUT_S: Final = 300
WATCH_SILENCE_S: Final = 90.0
"""A watch that brings nothing for so long is dialled again: the host at its other end may be dead."""
MAX_RETRY_AFTER_S: Final = 60.0
CREDENTIALS_PAUSE_S: Final = 10.0
PAGE_SIZE: Final = 500
"""Most objects of a page. The first has fewer, and the next ones as many as PAGE_BYTES allow by those seen so far."""
FIRST_PAGE_SIZE: Final = 8
PAGE_GROWTH: Final = 4
PAGE_BYTES: Final = 4 * 2**20
MAX_PAGE_BYTES: Final = 16 * 2**20
"""A larger page is not read to its end but asked for again with fewer objects: one may have 1.5 MiB, or be tiny."""

_ERRORS: Final[Mapping[int, type[ApiError]]] = {
    400: Refused, 403: Refused, 404: NotFound, 409: Conflict, 410: Gone, 422: Refused,
}  # fmt: skip
_PROXY_VARIABLES: Final = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_APPLY: Final = "application/apply-patch+yaml"
_MERGE: Final = "application/merge-patch+json"

Object = dict[str, Any]
CountCall = Callable[[str, str], None]
"""Receives the verb and the code ("error" when there was no answer) of every call."""


async def load_configuration(kubeconfig: Path | None, environment: Mapping[str, str] = os.environ) -> Configuration:
    """Return the way to the API server: the given file, else the pod's account, else $KUBECONFIG.

    Raises ConfigError.
    """
    configuration = Configuration()
    try:
        if kubeconfig is not None:
            await kubernetes_config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        elif environment.get("KUBERNETES_SERVICE_HOST"):
            kubernetes_config.load_incluster_config(client_configuration=configuration)
        else:
            await kubernetes_config.load_kube_config(client_configuration=configuration)
    except (kubernetes_config.ConfigException, OSError, ValueError) as error:
        raise ConfigError(f"no way to the API server: {error}") from error
    configuration.connection_pool_maxsize = 0  # watches would use up the default of 100 where namespaces are many
    if not any(environment.get(name) for name in _PROXY_VARIABLES):
        configuration.client_session_kwargs = {"trust_env": False}  # spares a look at the environment for each call
    return configuration


async def authorization_of(configuration: Configuration) -> str:
    """Return the header with our token, "" where a certificate identifies us. Tokens that change are read again."""
    return await configuration.get_api_key_with_prefix("BearerToken", alias="authorization") or ""


class Transport:
    """Client of the API server. Close it with `aclose`, or by contextlib.aclosing."""

    def __init__(
        self,
        configuration: Configuration,
        fence: Fence,
        *,
        reload: Callable[[], Any] | None = None,
        count: CountCall = unobserved,
    ) -> None:
        """`reload` makes a new Configuration when the server says that it does not know us (a coroutine function)."""
        self.configuration = configuration
        self._reload = reload
        self._count = count
        self._client = FencedClient(configuration, fence)
        self._client.user_agent = f"{FIELD_MANAGER}/{VERSION}"
        self._reloaded = -CREDENTIALS_PAUSE_S

    async def get(self, path: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> Object:
        """Return an object, or another document, at a path. Raises ApiError."""
        return await self._call("get", "GET", path, timeout_s=timeout_s)

    async def pages(
        self, path: str, *, size: int = PAGE_SIZE, at_most: int | None = None, **query: object
    ) -> AsyncIterator[Object]:
        """Yield the pages of a list until it ends, or has given `at_most` objects or more. Raises ApiError.

        `size` is the most objects of a page. Each page has the list's version.
        """
        limit, num_read, token = min(FIRST_PAGE_SIZE, size), 0, None
        while at_most is None or num_read < at_most:
            try:
                page, length = await self._page(path, {**query, "limit": limit, "continue": token})
            except TooLarge:
                if limit == 1:
                    raise
                limit = max(1, limit // FIRST_PAGE_SIZE)
                continue
            count = len(page.get("items") or ())
            yield page
            num_read += count
            token = page["metadata"].get("continue") or None
            if token is None:
                return
            limit = max(1, min(size, limit * PAGE_GROWTH, PAGE_BYTES * max(count, 1) // length))

    async def prove_fence(self, path: str, manifest: Mapping[str, Any]) -> None:
        """See that a closed fence refuses a write to a collection. Raises FenceBroken, or Unreachable: not known."""
        try:
            await self._client.prove(path, manifest, timeout_s=REQUEST_TIMEOUT_S)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"the fence could not be tried: {type(error).__name__} {error}".rstrip()) from error

    async def create(self, path: str, manifest: Mapping[str, Any]) -> Object:
        """Create an object in a collection. Return it. Raises ApiError, NotLeading."""
        return await self._call("create", "POST", path, manifest, query={"fieldManager": FIELD_MANAGER})

    async def apply(self, path: str, manifest: Mapping[str, Any]) -> Object:
        """Apply an object with force: what we want of it holds, whoever else wanted it otherwise.

        Return the object. Raises ApiError, NotLeading.
        """
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._call("apply", "PATCH", path, manifest, query=query, content=_APPLY)

    async def merge(self, path: str, changes: Mapping[str, Any]) -> Object:
        """Change fields of an object by merge patch. Return it. Raises ApiError, NotLeading."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._call("patch", "PATCH", path, changes, query=query, content=_MERGE)

    async def delete(self, path: str, options: Mapping[str, Any]) -> Object:
        """Delete an object. Return it, or a Status. Raises ApiError, NotLeading."""
        return await self._call("delete", "DELETE", path, options)

    async def claim(self, method: str, path: str, lease: Mapping[str, Any], *, timeout_s: float) -> Object:
        """Write to the Lease, the only write that needs none. `method` is POST or PUT. Raises ApiError."""
        return await self._call("create" if method == "POST" else "update", method, path, lease, timeout_s=timeout_s)

    async def watch(self, path: str, **query: object) -> AsyncIterator[Object]:
        """Yield decoded events until the server ends the stream. Raises ApiError, also for an ERROR event."""
        asked = {**query, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": WATCH_SERVER_TIMEOUT_S}
        limits = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, sock_read=WATCH_SILENCE_S)
        async with self._response("watch", "GET", path, query=asked, limits=limits) as response:
            lines = _lines(response.content)
            while (line := await _next_line(lines)) is not None:
                event: Object = json.loads(line)
                if event["type"] == "ERROR":
                    raise _error(event["object"], int(event["object"].get("code", 500)), {})
                yield event

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.close()  # type: ignore[no-untyped-call]

    async def _call(
        self,
        verb: str,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, object] | None = None,
        content: str = "application/json",
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> Object:
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s))
        async with self._response(
            verb, method, path, limits=limits, query=query, body=body, content=content
        ) as response:
            answer: Object = json.loads(await response.read())
            return answer

    async def _page(self, path: str, query: Mapping[str, object]) -> tuple[Object, int]:
        """Return a page of a list and its size in bytes. Raises TooLarge."""
        limits = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        text = bytearray()
        async with self._response("list", "GET", path, limits=limits, query=query) as response:
            async for chunk in response.content.iter_any():
                text += chunk
                if len(text) > MAX_PAGE_BYTES:
                    raise TooLarge(f"{path}: {query['limit']} objects have more than {MAX_PAGE_BYTES >> 20} MiB")
            page: Object = json.loads(text)
            return page, len(text)

    @asynccontextmanager
    async def _response(
        self,
        verb: str,
        method: str,
        path: str,
        *,
        limits: aiohttp.ClientTimeout,
        query: Mapping[str, object] | None = None,
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response that is no error. Anything that goes wrong until it is read is an ApiError."""
        asked = [(key, value) for key, value in (query or {}).items() if value is not None]
        headers = {"Content-Type": content, "Accept": "application/json"}
        _, url, headers, payload, _ = await self._client.param_serialize(
            method, path, query_params=asked, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            answer = await self._client.call_api(method, url, headers, payload, _request_timeout=limits)
            response: aiohttp.ClientResponse = answer.response
            async with response:
                self._count(verb, str(response.status))
                if response.status >= 400:
                    raise await self._refusal(response)
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error.__cause__, NotLeading):
                raise error.__cause__ from None
            self._count(verb, "error")
            raise Unreachable(f"{method} {path}: {type(error).__name__} {error}".rstrip()) from error
        except ValueError as error:
            raise Unreachable(f"{method} {path}: the answer is no JSON: {error}") from error

    async def _refusal(self, response: aiohttp.ClientResponse) -> ApiError:
        text = await response.read()
        if response.status == 401:
            await self._renew_credentials()
        try:
            status = json.loads(text)
        except ValueError:
            status = {}
        if not isinstance(status, dict):
            status = {}
        return _error(status or {"message": text[:500].decode(errors="replace")}, response.status, response.headers)

    async def _renew_credentials(self) -> None:
        """Read them again, now and then: tokens of kubeconfig files end too."""
        now = time.monotonic()
        if self._reload is None or now - self._reloaded < CREDENTIALS_PAUSE_S:
            return
        self._reloaded = now
        try:
            fresh = await self._reload()
        except ConfigError as error:
            logger.warning("credentials cannot be read again: %s", error)
            return
        self.configuration.api_key = fresh.api_key
        self.configuration.refresh_api_key_hook = fresh.refresh_api_key_hook


def _error(status: Mapping[str, Any], code: int, headers: Mapping[str, str]) -> ApiError:
    details = status.get("details") or {}
    after = headers.get("Retry-After") or details.get("retryAfterSeconds") or 0
    try:
        # Proxies that are maintained ask for an hour, in which nothing would be healed.
        retry_after_s = max(0.0, min(float(after), MAX_RETRY_AFTER_S))
    except ValueError:
        retry_after_s = 0.0  # a date: proxies may send one, API servers do not
    kind = _ERRORS.get(code, ApiError)
    return kind(code, status.get("reason") or "", status.get("message") or "", retry_after_s=retry_after_s)


async def _next_line(lines: AsyncIterator[bytes]) -> bytes | None:
    """Return None when the stream has ended or is silent. Some servers send not even bookmarks of a kind without
    changes."""
    try:
        return await anext(lines, None)
    except aiohttp.ServerTimeoutError:
        return None


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield whole lines, however long: aiohttp's own iteration gives up on those that its buffer cannot hold."""
    rest = bytearray()
    async for chunk in content.iter_any():
        begin = len(rest)
        rest += chunk
        while (end := rest.find(b"\n", begin)) >= 0:
            line = bytes(rest[:end])
            del rest[: end + 1]
            begin = 0
            if line.strip():
                yield line
    if rest.strip():
        # The connection was cut within an event, which comes again after a new dial from the last version.
        raise aiohttp.ClientPayloadError("the stream ended within an event")

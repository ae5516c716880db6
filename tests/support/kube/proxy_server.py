"""The asynchronous part of the fault proxy: takes calls, asks the rules, asks the API server, answers."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
from aiohttp import web
from yarl import URL

from tests.support.kube.calls import CallFilter, ProxiedCall, parse_path, verb_of
from tests.support.kube.faults import PASS, Answer, Cut, Decision, Forward, Rule, failure

Moment = Literal["before", "after"]

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
TLS_CLOSING_S = 0.25
"""What aiohttp's manual asks for after the end of a session: its TLS connections end a little later."""
BODY_LIMIT_BYTES = 64 << 20
# Of a connection rather than of a call (RFC 9110, 7.6.1), or made anew as we pass the call on.
NOT_PASSED = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
    | {"host", "content-length"}
)


@dataclass(slots=True, eq=False)
class _Watch:
    """An open watch. `last` is sent before its end."""

    answer: aiohttp.ClientResponse
    last: bytes = b""


class ProxyServer:
    """One listening port. `rules` and `calls` belong to the caller too."""

    def __init__(self, upstream: str, tls: ssl.SSLContext, token: str | None, rules: list[Rule]) -> None:
        self._upstream = upstream
        self._tls = tls
        self._token = token
        self._rules = rules
        self._thread = ThreadPoolExecutor(1, "fault-rules")
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.ServerRunner | None = None
        self._site: web.TCPSite | None = None
        self._requests: set[web.BaseRequest] = set()
        self._watches: dict[ProxiedCall, _Watch] = {}
        self.calls: list[ProxiedCall] = []

    def open_watches(self) -> list[ProxiedCall]:
        return list(self._watches)

    async def open(self, host: str, port: int) -> None:
        """Listen."""
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=TIMEOUT, auto_decompress=False)
        # Our own call to the API server goes on when the caller is gone: it may have been the caller's last.
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.0)
        await self._runner.setup()
        await self.accept(host, port)

    async def close(self) -> None:
        await self.refuse()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(TLS_CLOSING_S)
        self._thread.shutdown()

    async def accept(self, host: str, port: int) -> None:
        """Take connections."""
        if self._site is None and self._runner is not None:
            self._site = web.TCPSite(self._runner, host, port, reuse_address=True)
            await self._site.start()

    async def refuse(self) -> None:
        """Take no connection, and cut those there are."""
        if self._site is not None:
            await self._site.stop()
            self._site = None
        server = self._runner.server if self._runner is not None else None
        for connection in list(server.connections) if isinstance(server, web.Server) else []:
            if connection.transport is not None:
                connection.transport.abort()
        await self.end_watches(lambda call: True, last=b"")

    async def end_watches(self, of: CallFilter, *, last: bytes) -> int:
        """End open watches after sending `last`; how many."""
        ended = [watch for call, watch in self._watches.items() if of(call)]
        for watch in ended:
            watch.last = last
            watch.answer.close()
        return len(ended)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        target = parse_path(request.path)
        verb = verb_of(request.method, target, request.query, request.headers.get("Content-Type", ""))
        agent = request.headers.get("User-Agent", "")
        call = ProxiedCall(len(self.calls) + 1, verb, request.path_qs, target, agent)
        self.calls.append(call)
        try:
            return await self._carry_out(call, request)
        finally:
            call.ended = time.monotonic()

    async def _carry_out(self, call: ProxiedCall, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        decision = await self._decide("before", call)
        if isinstance(decision, Forward):
            if decision.delay_s:
                await asyncio.sleep(decision.delay_s)
            return await self._forward(call, request, body)
        return await self._refuse_call(decision, call, request)

    async def _decide(self, moment: Moment, call: ProxiedCall) -> Decision:
        """The first rule's word that is not to pass the call on. Actions may block, so rules have a thread."""
        if not self._rules:
            return PASS
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, moment, call)

    def _ask(self, moment: Moment, call: ProxiedCall) -> Decision:
        for rule in list(self._rules):
            decision = rule.before(call) if moment == "before" else rule.after(call)
            if decision != PASS:
                return decision
        return PASS

    async def _refuse_call(
        self, decision: Answer | Cut, call: ProxiedCall, request: web.BaseRequest
    ) -> web.StreamResponse:
        if isinstance(decision, Cut):
            return _cut(request)
        call.code = 200 if decision.in_stream else decision.code
        if decision.in_stream:
            return web.Response(body=error_event(decision.code), content_type="application/json")
        headers = {} if decision.retry_after_s is None else {"Retry-After": str(decision.retry_after_s)}
        return web.json_response(failure(decision.code), status=decision.code, headers=headers)

    async def _forward(self, call: ProxiedCall, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        assert self._session is not None
        url = URL(f"{self._upstream}{request.raw_path}", encoded=True)
        try:
            answer = await self._session.request(
                request.method, url, headers=self._headers(call, request), data=body or None
            )
        except aiohttp.ClientError:  # the API server is away, and so are we
            return _cut(request)
        async with answer:
            call.upstream_code = answer.status
            if call.verb == "watch" and answer.status == 200:
                return await self._stream(call, request, answer)
            return await self._pass_back(call, request, answer)

    def _headers(self, call: ProxiedCall, request: web.BaseRequest) -> dict[str, str]:
        headers = {key: value for key, value in request.headers.items() if key.lower() not in NOT_PASSED}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        if call.verb == "watch":
            headers["Accept-Encoding"] = "identity"
        return headers

    async def _pass_back(
        self, call: ProxiedCall, request: web.BaseRequest, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        try:
            body = await answer.read()
        except aiohttp.ClientError:
            return _cut(request)
        decision = await self._decide("after", call)
        if not isinstance(decision, Forward):
            return await self._refuse_call(decision, call, request)
        call.code = answer.status
        headers = {key: value for key, value in answer.headers.items() if key.lower() not in NOT_PASSED}
        return web.Response(status=answer.status, body=body, headers=headers)

    async def _stream(
        self, call: ProxiedCall, request: web.BaseRequest, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        watch = self._watches[call] = _Watch(answer)
        response = web.StreamResponse(headers={"Content-Type": answer.headers.get("Content-Type", "application/json")})
        call.code = 200
        try:
            await response.prepare(request)
            async for line in _lines(answer):
                if self._keeps(call, line):
                    await response.write(line)
            if watch.last:
                await response.write(watch.last)
            await response.write_eof()
        except ConnectionError:  # the caller is gone
            answer.close()
        finally:
            del self._watches[call]
        return response

    def _keeps(self, call: ProxiedCall, line: bytes) -> bool:
        rules = list(self._rules)
        if not rules:
            return True
        event: dict[str, Any] = json.loads(line)
        return all(rule.keeps(call, event) for rule in rules)


def error_event(code: int) -> bytes:
    """What a watch says when it cannot go on."""
    return json.dumps({"type": "ERROR", "object": failure(code)}).encode() + b"\n"


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Whole lines, as soon as they are whole, until either side ends the stream."""
    rest = b""
    try:
        async for chunk in answer.content.iter_any():
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line + b"\n"
    except (aiohttp.ClientError, ConnectionError):
        return


def _cut(request: web.BaseRequest) -> web.StreamResponse:
    """Close the connection; what is returned goes nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)

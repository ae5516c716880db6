"""An API server that holds a handful of objects, in this process: for answers that a real one gives only on bad days.

It lists in pages, watches, compares versions, and does what `faults` say first. A patch merges top-level fields. It
knows no schema; what must be true of a real server is tested in tests/cluster.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from kubernetes.aio.client import Configuration

from hetero_operator.cluster.fence import Fence
from hetero_operator.cluster.transport import Transport
from tests.support.kube.ports import HOST, free_port

Object = dict[str, Any]
Answer = Callable[[], web.Response]


@dataclass
class Fault:
    """The next `times` requests whose method and path match are answered so."""

    method: str
    path_part: str
    answer: Answer
    times: int = 1
    watch: bool | None = None


def refusal(code: int, reason: str = "", message: str = "", *, headers: dict[str, str] | None = None) -> Answer:
    """An answer with a Status."""
    status = {"kind": "Status", "code": code, "reason": reason, "message": message}
    return lambda: web.json_response(status, status=code, headers=headers)


@dataclass
class ApiStandIn:
    """`objects` by path; `calls` as "METHOD path"; a watch is "WATCH path". Changes go through put and remove."""

    objects: dict[str, Object] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    bodies: list[tuple[str, Any]] = field(default_factory=list)
    queries: list[dict[str, str]] = field(default_factory=list)
    version: int = 100
    oldest: int = 0
    """Watches from before this version are answered 410."""
    page_size: int | None = None
    events_sent: int = 0
    """Events of watches that clients have read, or that fit into the connections' buffers."""

    def __post_init__(self) -> None:
        self.port = free_port()
        self._log: list[tuple[int, str, Object]] = []
        self._changed = asyncio.Condition()
        self._epoch = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def transport(self, fence: Fence | None = None, **options: Any) -> aclosing[Transport]:
        """A client of it, as a context; with an open fence unless one is given."""
        if fence is None:
            fence = Fence(clock=lambda: 0.0)
            fence.open(writes_until=10.0, lease_until=10.0)
        return aclosing(self.client(fence, **options))

    def client(self, fence: Fence, **options: Any) -> Transport:
        """A client of it. Close it."""
        return Transport(Configuration(host=self.url), fence, **options)

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self.port).start()

    async def stop(self) -> None:
        """Every connection is cut."""
        await self.cut_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def put(self, path: str, item: Object) -> Object:
        """Create or change an object; watches are told."""
        self.version += 1
        known = self.objects.get(path)
        metadata = {
            "namespace": path.split("/namespaces/")[1].split("/")[0],
            "name": path.rpartition("/")[2],
            "uid": f"uid-{self.version}" if known is None else known["metadata"]["uid"],
            "creationTimestamp": "2026-01-01T00:00:00Z",
            **{key: value for key, value in item.get("metadata", {}).items() if key != "uid"},
            "resourceVersion": str(self.version),
        }
        stored = self.objects[path] = {**item, "metadata": metadata}
        await self._tell("ADDED" if known is None else "MODIFIED", path, stored)
        return stored

    async def remove(self, path: str, *, silently: bool = False) -> None:
        """Delete an object; `silently`: no watch will ever tell."""
        item = self.objects.pop(path)
        self.version += 1
        if not silently:
            item = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
            await self._tell("DELETED", path, item)

    async def bookmark(self, collection: str) -> None:
        """Tell watches of a collection how far they are."""
        self.version += 1
        await self._tell(
            "BOOKMARK", f"{collection}/", {"kind": "X", "metadata": {"resourceVersion": str(self.version)}}
        )

    async def error_event(self, collection: str, code: int) -> None:
        """An ERROR within the streams."""
        await self._tell("ERROR", f"{collection}/", {"kind": "Status", "code": code, "message": "too old"})

    async def cut_watches(self) -> None:
        """End all streams that are open."""
        async with self._changed:
            self._epoch += 1
            self._changed.notify_all()

    def count(self, start: str) -> int:
        """Calls that begin with this."""
        return sum(call.startswith(start) for call in self.calls)

    async def _tell(self, change: str, path: str, item: Object) -> None:
        async with self._changed:
            self._log.append((self.version, change, {"path": path, "object": item}))
            self._changed.notify_all()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path, watching = request.path, request.query.get("watch") == "true"
        method = "WATCH" if watching else request.method
        self.calls.append(f"{method} {path}")
        self.queries.append(dict(request.query))
        body = await request.read()
        if body:
            self.bodies.append((f"{method} {path}", json.loads(body)))
        for fault in self.faults:
            if fault.times and fault.method == method and fault.path_part in path:
                fault.times -= 1
                return fault.answer()
        if watching:
            return await self._watch(request)
        return await self._answer(request.method, path, json.loads(body) if body else {}, request)

    async def _answer(self, method: str, path: str, body: Object, request: web.Request) -> web.Response:
        known = self.objects.get(path)
        if method == "GET" and self._is_collection(path):
            return self._list(path, request)
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return refusal(409, "AlreadyExists")()
            return web.json_response(await self.put(path, body), status=201)
        if method == "PATCH" and path.endswith("/status"):
            path = path.removesuffix("/status")
            known = self.objects.get(path)
            if known is not None:
                metadata = {**known["metadata"], **body["metadata"]}
                body = {**known, "metadata": metadata, "status": _merged(known.get("status") or {}, body["status"])}
        if known is None and method != "PATCH":
            return refusal(404, "NotFound")()
        if method == "GET":
            return web.json_response(known)
        return await self._change(method, path, body, known)

    async def _change(self, method: str, path: str, body: Object, known: Object | None) -> web.Response:
        metadata = body.get("metadata") or {}
        wanted = {**metadata, **(body.get("preconditions") or {})}
        for name in ("uid", "resourceVersion"):
            if name in wanted and (known is None or known["metadata"][name] != wanted[name]):
                return refusal(409, "Conflict", f"{name} is another")()
        if method == "DELETE":
            await self.remove(path)
            return web.json_response({"kind": "Status", "status": "Success"})
        merged = {**(known or {}), **body, "metadata": {**(known or {}).get("metadata", {}), **metadata}}
        return web.json_response(await self.put(path, merged), status=201 if known is None else 200)

    def _is_collection(self, path: str) -> bool:
        if "/namespaces/" in path:
            return len(path.split("/namespaces/")[1].split("/")) == 2
        return len(path.split("/")) == (4 if path.startswith("/api/") else 5)

    def _members(self, collection: str) -> list[Object]:
        """Objects of a collection in one namespace or in all."""
        head, _, plural = collection.rpartition("/")
        return [
            item
            for path, item in sorted(self.objects.items())
            if path.startswith(f"{head}/") and path.split("/")[-2] == plural
        ]

    def _list(self, path: str, request: web.Request) -> web.Response:
        items = self._members(path)
        begin = int(request.query.get("continue", 0))
        size = self.page_size or int(request.query.get("limit", len(items) or 1))
        metadata = {"resourceVersion": str(self.version)}
        if begin + size < len(items):
            metadata["continue"] = str(begin + size)
        return web.json_response({"metadata": metadata, "items": items[begin : begin + size]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if since < self.oldest:
            return refusal(410, "Expired", "too old resource version")()
        response = web.StreamResponse()
        await response.prepare(request)
        head, _, plural = request.path.rpartition("/")
        epoch, at, ended = self._epoch, 0, False
        with suppress(ConnectionError):
            while not ended:
                ended = epoch != self._epoch
                for version, change, event in self._log[at:]:
                    of_kind = event["path"].startswith(f"{head}/") and event["path"].split("/")[-2] == plural
                    if version > since and of_kind:
                        line = json.dumps({"type": change, "object": event["object"]}).encode() + b"\n"
                        await response.write(line)
                        self.events_sent += 1
                    at += 1
                async with self._changed:
                    while len(self._log) == at and epoch == self._epoch:
                        await self._changed.wait()
        return response


def _merged(known: Object, changes: Object) -> Object:
    """RFC 7386."""
    merged = {key: value for key, value in known.items() if changes.get(key, value) is not None}
    for key, value in changes.items():
        if isinstance(value, dict):
            merged[key] = _merged(known.get(key) or {}, value)
        elif value is not None:
            merged[key] = value
    return merged

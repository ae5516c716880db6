"""The page at the HTTP door's root: a chat, and a live picture of the group.

It is static files of this package, which browsers may load without a key, and one answer in JSON, which the page asks
for twice a second. That answer is what `GetTopology` and `GetStats` say, so the page and `hetero top` show the same.
The files ask nobody but this gateway for anything: their policy forbids it, and scripts and styles in the document.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetero_api.v1 import admin_pb2, ranks_pb2

STATUS_PATH: Final = "/page/status"
_FOLDER: Final = Path(__file__).with_name("static")
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX: Final = "index.html"
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Browsers ask whether a file changed: the next version of the gateway has other ones under the same names.
    "Cache-Control": "no-cache",
}


class Page:
    """Routes of the page. `topology` and `stats` each give one moment's answer."""

    def __init__(
        self, topology: Callable[[], admin_pb2.GetTopologyResponse], stats: Callable[[], admin_pb2.GetStatsResponse]
    ) -> None:
        self._topology = topology
        self._stats = stats
        self._files = {_path_of(file): _File(file) for file in sorted(_FOLDER.iterdir()) if file.suffix in _TYPES}

    @property
    def open_paths(self) -> tuple[str, ...]:
        """Paths that need no key: the files'."""
        return tuple(self._files)

    def routes(self) -> list[Route]:
        """Return the routes of the files and of the status."""
        files = [Route(path, file.answer) for path, file in self._files.items()]
        return [*files, Route(STATUS_PATH, self._status)]

    async def _status(self, request: Request) -> Response:  # noqa: ARG002
        topology, stats, now_s = self._topology(), self._stats(), time.monotonic()
        # In a thread: the answer of a large group takes a millisecond, which steps would wait for.
        content = await asyncio.to_thread(status_object, topology, stats, now_s=now_s)
        return JSONResponse(content, headers={"Cache-Control": "no-store"})


class _File:
    """One static file, in memory."""

    def __init__(self, file: Path) -> None:
        self._content = file.read_bytes()
        self._etag = f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'
        self._type = _TYPES[file.suffix]

    async def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self._etag}
        if request.headers.get("if-none-match") == self._etag:
            return Response(status_code=304, headers=headers)
        return Response(self._content, headers=headers, media_type=self._type)


def _path_of(file: Path) -> str:
    return "/" if file.name == _INDEX else f"/page/{file.name}"


def status_object(
    topology: admin_pb2.GetTopologyResponse, stats: admin_pb2.GetStatsResponse, *, now_s: float
) -> Mapping[str, Any]:
    """Return the status as JSON: fields as in admin.proto, 64-bit numbers as text, and `now_s`, a monotonic time.

    In place of a shard's layers it has `runs`: layers in a row that a rank holds equal parts of. `topology` is changed.
    """
    runs = [_runs(rank.shard.layers) for rank in topology.ranks]
    for rank in topology.ranks:
        rank.shard.ClearField("layers")
        rank.place.device.ClearField("speeds")
    shown = _fields(topology)
    for rank, own in zip(shown["ranks"], runs, strict=True):
        rank["runs"] = own
    return {"now_s": now_s, "topology": shown, "stats": _fields(stats)}


def _runs(layers: Sequence[ranks_pb2.LayerShard]) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    before: ranks_pb2.LayerShard | None = None
    for index, layer in enumerate(layers):
        if layer != before:
            runs.append({"begin": index, "end": index, **_fields(layer)})
        runs[-1]["end"] = index + 1
        before = layer
    return runs


def _fields(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

"""A Hub on loopback: what huggingface_hub asks of it to fetch a snapshot, with faults where a test wants them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE_BYTES = 1024
"""Files from here on are kept as the Hub keeps large ones: known by sha256."""
_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(/revision/(?P<revision>[^/?]+))?$")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/[^/]+/(?P<name>.+)$")


@dataclass
class StandInHub:
    """Enter it to serve. `token` must be shown if set; `cut_short` ends the first download of a file after so many
    bytes, `stalls` keeps it open then until the Hub ends; `damaged` turns the first byte of a file's first download,
    `always_damaged` of each."""

    name: str
    files: dict[str, bytes]
    token: str | None = None
    cut_short: dict[str, int] = field(default_factory=dict)
    stalls: dict[str, int] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    always_damaged: set[str] = field(default_factory=set)
    downloads: Counter[str] = field(default_factory=Counter)
    ranges: list[str] = field(default_factory=list)
    sent_bytes: int = 0

    def __enter__(self) -> Self:
        hub = self
        self._ends = threading.Event()

        class Handler(_Handler):
            def _hub(self) -> StandInHub:
                return hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def stall(self) -> None:
        """Return when the Hub ends."""
        self._ends.wait()

    def sibling(self, path: str) -> dict[str, Any]:
        """A file, as the Hub tells it of a model that is asked for with its files."""
        entry = self.entry(path)
        told: dict[str, Any] = {"rfilename": path, "size": entry["size"], "blobId": entry["oid"]}
        if "lfs" in entry:
            told["lfs"] = {"sha256": entry["lfs"]["oid"], "size": entry["size"], "pointerSize": 130}
        return told

    def entry(self, path: str) -> dict[str, Any]:
        content = self.files[path]
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_sha1(content)}
        if len(content) >= LARGE_BYTES:
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _hub(self) -> StandInHub:
        raise NotImplementedError

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self._hub(), self.path.partition("?")[0]
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._refuse(401, "GatedRepo")
        elif (found := _INFO.match(path)) and found[1] == hub.name:
            if found["revision"] in (None, "main", COMMIT):
                self._json({"id": hub.name, "sha": COMMIT, "siblings": [hub.sibling(name) for name in hub.files]})
            else:
                self._refuse(404, "RevisionNotFound")
        elif (found := _TREE.match(path)) and found[1] == hub.name:
            self._json([hub.entry(name) for name in hub.files])
        elif (found := _FILE.match(path)) and found[1] == hub.name and found["name"] in hub.files:
            self._file(found["name"])
        else:
            self._refuse(404, "RepoNotFound")

    def _file(self, name: str) -> None:
        hub = self._hub()
        content, entry = hub.files[name], hub.entry(name)
        begin = 0
        if (wanted := self.headers.get("Range")) and self.command == "GET":
            hub.ranges.append(wanted)
            begin = int(wanted.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if begin else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self._send(name, content[begin:])

    def _send(self, name: str, body: bytes) -> None:
        hub = self._hub()
        hub.downloads[name] += 1
        if name in hub.damaged | hub.always_damaged:
            hub.damaged.discard(name)
            body = bytes([body[0] ^ 0xFF]) + body[1:]
        if (end := hub.cut_short.pop(name, None)) is not None:
            body = body[:end]
            self.close_connection = True
        stalls = hub.stalls.pop(name, None)
        if stalls is not None:
            body = body[:stalls]
        hub.sent_bytes += len(body)
        self.wfile.write(body)
        if stalls is not None:
            hub.stall()
            self.close_connection = True

    def _json(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", "as the test says")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""

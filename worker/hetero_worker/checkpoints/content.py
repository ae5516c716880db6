"""Identity of a model directory: a hash of its content, and a cheap fingerprint of its present state.

Copies of a checkpoint have the same content hash. To hash everything takes about as long as to load it, so the hash is
remembered per state of the directory, in a small file each.

The state is the name, inode, size, and times of the last write and last change of each file that weights are read from.
Nobody can set the change time, so a file that was written to, replaced or renamed has another state, even with its old
size and write time. A copy has another state too. Clocks tick some times in a hundredth of a second: a state younger
than that could still change within its tick, so it does not count yet.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from hetero_api.gguf_model import gguf_files
from hetero_api.model_config import CONFIG_FILE
from hetero_api.packed_weights import MODELOPT_FILE
from hetero_worker.checkpoints.packed_file import PARTIAL_SUFFIX

logger = logging.getLogger(__name__)

SUFFIX: Final = ".content"
"""Suffix of a file that remembers a content hash."""
_CONFIG_FILES: Final = (CONFIG_FILE, MODELOPT_FILE)
_CHECKPOINT_SUFFIXES: Final = (".safetensors", ".gguf", ".safetensors.index.json")
_TICK_NS: Final = 2_000_000_000
"""Two seconds, the resolution of the coarsest file systems."""
_PIECE: Final = 1 << 26
"""Bytes that one thread reads at a time; the hash depends on it."""
_BLOCK: Final = 1 << 20

ClockNs = Callable[[], int]
"""Returns nanoseconds since 1970."""


class Piece(NamedTuple):
    """A range of bytes of a file."""

    path: Path
    begin: int
    end: int


RunAll = Callable[[Callable[[Piece], bytes], "list[Piece]"], Iterable[bytes]]
"""`map`, or a pool's."""


class CheckpointContent:
    """Content hash of one directory, for one load on one thread."""

    def __init__(self, directory: Path, read_state: Callable[[], str | None], state: str, *, folder: Path) -> None:
        """`read_state` returns the directory's state at the time of the call; `folder` is where hashes are kept."""
        self._directory = directory
        self._read_state = read_state
        self._state = state
        self._folder = folder
        self._content: str | None = None
        self._was_asked = self._is_remembered = False

    def is_unchanged(self) -> bool:
        """Return whether nothing has been written to the directory since this was constructed."""
        return self._read_state() == self._state

    def digest(self, run: RunAll) -> str | None:
        """Return the hash in hexadecimal; None, with one log line, if the directory is unreadable or changed."""
        if not self._was_asked:
            self._was_asked = True
            self._content = self._remembered()
            self._is_remembered = self._content is not None
            if self._content is None:
                self._content = self._read(run)
        return self._content

    def remember(self) -> None:
        """Keep the hash for the next load, if the folder exists and can be written."""
        if self._content is None or self._is_remembered:
            return
        with suppress(OSError):
            fd, partial = tempfile.mkstemp(dir=self._folder, prefix=".", suffix=PARTIAL_SUFFIX)
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(f"{self._content} {self._seal(self._content)}\n")
            os.replace(partial, self._path)
            self._is_remembered = True

    def _remembered(self) -> str | None:
        try:
            fields = self._path.read_text(encoding="ascii").split()
        except (OSError, ValueError):
            return None
        return fields[0] if len(fields) == 2 and fields[1] == self._seal(fields[0]) else None

    def _read(self, run: RunAll) -> str | None:
        began_s = time.perf_counter()
        try:
            content = digest_of(self._directory, run=run)
        except OSError as error:
            logger.warning("packed weights are not kept: %s cannot be read: %s", self._directory, error)
            return None
        if not self.is_unchanged():
            logger.warning("packed weights are not kept: %s changed while it was read", self._directory)
            return None
        took_s = time.perf_counter() - began_s
        logger.info("hashed %s in %.1f s, to find its packed weights by content", self._directory, took_s)
        return content

    @property
    def _path(self) -> Path:
        return self._folder / f"{hashlib.sha256(self._state.encode()).hexdigest()[:40]}{SUFFIX}"

    def _seal(self, content: str) -> str:
        """Return a checksum: files are not synced, so a power cut may leave anything in them."""
        return hashlib.sha256(f"{content} {self._state}".encode()).hexdigest()


def checkpoint_files(directory: Path) -> list[Path]:
    """Return config and weight files, by name. Raises OSError."""
    if not directory.is_dir():  # a GGUF file that is named in place of its directory
        return list(gguf_files(directory))
    return sorted(
        path for path in directory.iterdir() if path.name in _CONFIG_FILES or path.name.endswith(_CHECKPOINT_SUFFIXES)
    )


def checkpoint_state(directory: Path, *, clock_ns: ClockNs = time.time_ns) -> str | None:
    """Return the directory's state; None if it was written to just now, or cannot be read."""
    try:
        found = [(path.name, path.stat()) for path in checkpoint_files(directory)]
    except OSError:
        return None
    youngest = max((max(stat.st_mtime_ns, stat.st_ctime_ns) for _, stat in found), default=0)
    if not found or youngest + _TICK_NS > clock_ns():
        return None
    return repr([(name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found])


def digest_of(directory: Path, *, run: RunAll) -> str:
    """Return the sha256 of config and weights and their names, in hexadecimal. Raises OSError."""
    found = [(path, path.stat().st_size) for path in checkpoint_files(directory)]
    whole = hashlib.sha256(repr([(path.name, size) for path, size in found]).encode())
    pieces = [Piece(path, begin, min(begin + _PIECE, size)) for path, size in found for begin in range(0, size, _PIECE)]
    for digest in run(_digest_piece, pieces):
        whole.update(digest)
    return whole.hexdigest()


def _digest_piece(piece: Piece) -> bytes:
    found = hashlib.sha256()
    with piece.path.open("rb", buffering=0) as file:
        file.seek(piece.begin)
        left = piece.end - piece.begin
        while left:
            block = file.read(min(left, _BLOCK))
            if not block:
                raise OSError(f"{piece.path} became shorter while it was read")
            found.update(block)
            left -= len(block)
    return found.digest()

"""What is in a model directory, as a hash: copies of a checkpoint have it in common.

To read everything for it takes about as long as to load it, so it is remembered for the state that the directory is in
(checkpoint_identity.py): a small file each.
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

from hetero_worker.memory.checkpoint_identity import checkpoint_files
from hetero_worker.memory.packed_file import PARTIAL_SUFFIX

logger = logging.getLogger(__name__)

SUFFIX: Final = ".content"
"""Of a file by which a content is remembered."""
_PIECE: Final = 1 << 26
"""Bytes that one thread reads at a time; the hash depends on it."""
_BLOCK: Final = 1 << 20


class Piece(NamedTuple):
    """Of a file."""

    path: Path
    begin: int
    end: int


RunAll = Callable[[Callable[[Piece], bytes], "list[Piece]"], Iterable[bytes]]
"""`map`, or a pool's."""


class CheckpointContent:
    """Of one directory, from when this was made on; used by one thread."""

    def __init__(self, directory: Path, identify: Callable[[], str | None], state: str, *, folder: Path) -> None:
        """`identify` tells the directory's state as it is now, `state` is the present one; `folder`: to remember in."""
        self._directory = directory
        self._identify = identify
        self._state = state
        self._folder = folder
        self._content: str | None = None
        self._was_asked = self._is_remembered = False

    def is_as_it_was(self) -> bool:
        """Whether nothing has been written since."""
        return self._identify() == self._state

    def digest(self, run: RunAll) -> str | None:
        """Hexadecimal. None, and says why, once, if it cannot be told: of a directory that changed meanwhile, too."""
        if not self._was_asked:
            self._was_asked = True
            self._content = self._remembered()
            self._is_remembered = self._content is not None
            if self._content is None:
                self._content = self._read(run)
        return self._content

    def remember(self) -> None:
        """For the next time, where the folder is there and takes it."""
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
            told = self._path.read_text(encoding="ascii").split()
        except (OSError, ValueError):
            return None
        return told[0] if len(told) == 2 and told[1] == self._seal(told[0]) else None

    def _read(self, run: RunAll) -> str | None:
        began_s = time.perf_counter()
        try:
            content = digest_of(self._directory, run=run)
        except OSError as error:
            logger.warning("packed weights are not kept: %s cannot be read: %s", self._directory, error)
            return None
        if not self.is_as_it_was():
            logger.warning("packed weights are not kept: %s changed while it was read", self._directory)
            return None
        took_s = time.perf_counter() - began_s
        logger.info("read %s in %.1f s, to know by its content what is packed of it", self._directory, took_s)
        return content

    @property
    def _path(self) -> Path:
        return self._folder / f"{hashlib.sha256(self._state.encode()).hexdigest()[:40]}{SUFFIX}"

    def _seal(self, content: str) -> str:
        """Files are not synced: after a power cut one may have anything in it."""
        return hashlib.sha256(f"{content} {self._state}".encode()).hexdigest()


def digest_of(directory: Path, *, run: RunAll) -> str:
    """sha256 of config and weights and their names, hexadecimal. Raises OSError."""
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

"""Packed weights kept on disk, so that a rank that starts again need not quantise and pack them again.

There is one file per matrix, named by a hash of everything its bytes depend on: the checkpoint's content (`content`),
the code that reads and quantises, the kernels' layout, and the slices of tensors that it is made of. A matrix that
differs in any of these has another file, so no file is ever out of date. Ranks, groups and copies of a checkpoint share
equal matrices, and several may write at once.

The folder may disappear at any time, and no problem with it ends a load. A file that is unreadable or has wrong
checksums is logged and packed again; if nothing can be written, weights are packed as without a folder. The folder
grows to a quarter of the disk space that is free without it; the least recently used files go first.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch

import hetero_api
from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.content import SUFFIX as CONTENT_SUFFIX
from hetero_worker.checkpoints.content import CheckpointContent, ClockNs, checkpoint_state
from hetero_worker.checkpoints.packed_file import (
    PARTIAL_SUFFIX,
    DamagedFileError,
    PackedHeader,
    read_header,
    read_parts,
    write_packed,
)
from hetero_worker.native.build import source_digest

logger = logging.getLogger(__name__)

SUFFIX: Final = ".packed"
_SHARE_OF_DISK: Final = 4
_LASTS_S: Final = {PARTIAL_SUFFIX: 3600.0, CONTENT_SUFFIX: 90 * 86400.0}
"""Age at which files go: abandoned partial files, and hashes of directories, which are then computed again."""
_FORMAT_SOURCES: Final = ("weight_format.py", "packed_weights.py", "module_names.py", "gguf_*.py")


M = TypeVar("M")
"""A weight in a kernel's layout."""


class PackedCache:
    """A folder of packed weights. It is created by the first write."""

    def __init__(self, folder: Path, *, limit_bytes: int | None = None, clock_ns: ClockNs = time.time_ns) -> None:
        """`limit_bytes` None: a share of the disk."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._clock_ns = clock_ns

    def open(self, directory: Path) -> KeptMatrices | None:
        """Return the packed weights of a model directory in its present state; None if that is unknown."""

        def read_state() -> str | None:
            return checkpoint_state(directory, clock_ns=self._clock_ns)

        state = read_state()
        if state is None:
            logger.info("packed weights are not kept: %s was written to just now, or cannot be read", directory)
            return None
        content = CheckpointContent(directory, read_state, state, folder=self._folder)
        return KeptMatrices(self._folder, content, limit_bytes=self._limit_bytes)


class _KeptFile(NamedTuple):
    path: Path
    used: float
    num_bytes: int


class KeptMatrices:
    """Packed weights of one checkpoint, for one load on one thread."""

    def __init__(self, folder: Path, content: CheckpointContent, *, limit_bytes: int | None = None) -> None:
        self._folder = folder
        self._content = content
        self._limit_bytes = limit_bytes
        self._pool = ThreadPoolExecutor(torch.get_num_threads())
        self._used: set[Path] = set()
        self._written: list[Path] = []
        self._others: list[_KeptFile] | None = None
        self._room_bytes = 0
        self._can_write = True

    def find(
        self,
        question: str,
        blank: Callable[[tuple[int, int], WeightFormat], M],
        *,
        memory: Callable[[M], Sequence[torch.Tensor]],
    ) -> M | None:
        """Return the matrix that was kept under `question`; None if there is none.

        The question says everything about the matrix but the checkpoint. `blank` allocates a matrix of this (out, in)
        shape and format, and `memory` returns its bytes, as uint8 tensors, to be filled.
        """
        if (content := self._content.digest(self._pool.map)) is None:
            return None
        path, asked = self._path_of(content, question)
        try:
            with path.open("rb", buffering=0) as file:
                header, begin = read_header(file)
                if header.question != asked:
                    raise DamagedFileError("it is of another matrix")
                matrix = blank(header.shape, header.weights)
                read_parts(file, header, begin, memory(matrix), run=self._pool.map)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            logger.warning("packed weights in %s cannot be read, they are packed again: %s", path, error)
            return None
        except DamagedFileError as error:
            logger.warning("packed weights in %s are damaged, they are packed again: %s", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):  # a read-only folder is fine
            os.utime(path)
        self._used.add(path)
        return matrix

    def keep(
        self, question: str, weights: WeightFormat, shape: tuple[int, int], memory: Sequence[torch.Tensor]
    ) -> None:
        """Write a matrix of this (out, in) shape, all of whose bytes are `memory`. Logs once if it cannot."""
        if not self._can_write or (content := self._content.digest(self._pool.map)) is None:
            return
        path, asked = self._path_of(content, question)
        size = sum(part.nbytes for part in memory)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self._make_room(size):
                logger.info("packed weights are not kept any more: %s has reached its limit", self._folder)
                self._can_write = False
                return
            header = PackedHeader.of(asked, weights, shape, memory, self._pool.map)
            write_packed(path, header, memory)
        except OSError as error:
            logger.warning("packed weights cannot be kept in %s: %s", self._folder, error)
            self._can_write = False
            return
        self._used.add(path)
        self._written.append(path)
        self._room_bytes -= size

    def close(self) -> None:
        """End the load. If the checkpoint changed meanwhile, remove what was written: it may be of both states."""
        self._pool.shutdown()
        if self._written and not self._content.is_unchanged():
            logger.warning("a checkpoint changed while it was read; its packed weights are not kept")
            for path in self._written:
                with suppress(OSError):
                    path.unlink()
        elif self._used:
            read = len(self._used) - len(self._written)
            logger.info("packed weights in %s: %d read, %d written", self._folder, read, len(self._written))
            self._content.remember()

    def _path_of(self, content: str, question: str) -> tuple[Path, str]:
        """Return the matrix's file, and the whole question."""
        whole = f"{content} {_code()} {question}"
        return self._folder / f"{hashlib.sha256(whole.encode()).hexdigest()[:40]}{SUFFIX}", whole

    def _make_room(self, size: int) -> bool:
        """Remove the least recently used files, and return whether `size` bytes fit then. Raises OSError."""
        if self._others is None:
            kept = _files_of(self._folder)
            held, free = sum(one.num_bytes for one in kept), shutil.disk_usage(self._folder).free
            limit = (held + free) // _SHARE_OF_DISK if self._limit_bytes is None else self._limit_bytes
            self._room_bytes = min(limit - held, free)  # negative if the disk has shrunk
            self._others = sorted(kept, key=lambda one: one.used, reverse=True)
        while self._room_bytes < size and self._others:
            oldest = self._others.pop()
            if oldest.path not in self._used:
                with suppress(FileNotFoundError):
                    oldest.path.unlink()
                self._room_bytes += oldest.num_bytes
        return self._room_bytes >= size


def _files_of(folder: Path) -> Sequence[_KeptFile]:
    """Return the folder's files, and remove abandoned ones. Raises OSError."""
    found = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another rank was faster
            stat = path.stat()
            if path.name.endswith(SUFFIX):
                found.append(_KeptFile(path, stat.st_mtime, stat.st_size))
            elif time.time() - stat.st_mtime > _LASTS_S.get(path.suffix, math.inf):
                path.unlink()
    return found


@cache
def _code() -> str:
    """Return a digest of the code that reads and quantises."""
    formats = Path(hetero_api.__file__).parent
    sources = [*Path(__file__).parent.glob("*.py"), *(path for name in _FORMAT_SOURCES for path in formats.glob(name))]
    return f"{source_digest(sorted(sources))} torch {torch.__version__}"

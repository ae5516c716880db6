"""Packed weights kept on disk, so that a rank that starts again does not quantise and pack them again.

One file a matrix, named by a hash of all that its bytes depend on: the content of the checkpoint
(checkpoint_content.py), the code that reads and quantises, the layout of the kernels, and which slices of which
tensors it is made of. A matrix that differs in any of these is another file, so nothing is ever out of date; ranks,
groups and copies of a checkpoint share what is the same, and several may write at once.

The folder may go at any time, and nothing that is wrong with it ends a load: a file that cannot be read or whose sums
are not right is told of and packed anew; where none can be written, weights are packed as without a folder. It grows to
a quarter of what its disk has left without it; what was not used for longest goes first.
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
from typing import Final, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

import hetero_api
from hetero_api.weight_format import WeightFormat
from hetero_worker.memory.checkpoint_content import SUFFIX as CONTENT_SUFFIX
from hetero_worker.memory.checkpoint_content import CheckpointContent
from hetero_worker.memory.checkpoint_identity import ClockNs, checkpoint_identity
from hetero_worker.memory.packed_file import (
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
"""A file that is being written for longer is nobody's; what a directory holds is read anew after so long."""
_FORMAT_SOURCES: Final = ("weight_format.py", "packed_weights.py", "gguf_*.py")


@runtime_checkable
class PackedMatrix(Protocol):
    """A weight in some kernel's layout, in memory."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) features."""
        ...

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """uint8, all that it is."""
        ...


M = TypeVar("M", bound=PackedMatrix)


class PackedCache:
    """One folder. Nothing is made by looking."""

    def __init__(self, folder: Path, *, limit_bytes: int | None = None, clock_ns: ClockNs = time.time_ns) -> None:
        """`limit_bytes`: None is a share of the disk."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._clock_ns = clock_ns

    def of(self, directory: Path) -> KeptMatrices | None:
        """Of a model directory, as it is now; None where that cannot be told yet."""

        def identify() -> str | None:
            return checkpoint_identity(directory, clock_ns=self._clock_ns)

        state = identify()
        if state is None:
            logger.info("packed weights are not kept: %s was written to just now, or cannot be looked at", directory)
            return None
        content = CheckpointContent(directory, identify, state, folder=self._folder)
        return KeptMatrices(self._folder, content, limit_bytes=self._limit_bytes)


class _Kept(NamedTuple):
    path: Path
    used: float
    num_bytes: int


class KeptMatrices:
    """Those of one checkpoint, for one load; by one thread."""

    def __init__(self, folder: Path, content: CheckpointContent, *, limit_bytes: int | None = None) -> None:
        self._folder = folder
        self._content = content
        self._limit_bytes = limit_bytes
        self._pool = ThreadPoolExecutor(torch.get_num_threads())
        self._used: set[Path] = set()
        self._written: list[Path] = []
        self._others: list[_Kept] | None = None
        self._room_bytes = 0
        self._can_write = True

    def find(self, question: str, blank: Callable[[tuple[int, int], WeightFormat], M]) -> M | None:
        """What was kept under the question, which says all but the checkpoint; `blank` makes memory for it."""
        if (content := self._content.digest(self._pool.map)) is None:
            return None
        path, asked = self._path_of(content, question)
        try:
            with path.open("rb", buffering=0) as file:
                header, begin = read_header(file)
                if header.question != asked:
                    raise DamagedFileError("it is of another matrix")
                matrix = blank(header.shape, header.weights)
                read_parts(file, header, begin, matrix.memory, run=self._pool.map)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            logger.warning("packed weights in %s cannot be read, they are made anew: %s", path, error)
            return None
        except DamagedFileError as error:
            logger.warning("packed weights in %s are damaged, they are made anew: %s", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):  # a folder that is only to be read serves all the same
            os.utime(path)
        self._used.add(path)
        return matrix

    def keep(self, question: str, weights: WeightFormat, matrix: PackedMatrix) -> None:
        """For the next load. Says so, once, if it cannot be."""
        if not self._can_write or (content := self._content.digest(self._pool.map)) is None:
            return
        path, asked = self._path_of(content, question)
        size = sum(part.nbytes for part in matrix.memory)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self._make_room(size):
                logger.info("packed weights are not kept any more: %s may take no more of its disk", self._folder)
                self._can_write = False
                return
            header = PackedHeader.of(asked, weights, matrix.shape, matrix.memory, self._pool.map)
            write_packed(path, header, matrix.memory)
        except OSError as error:
            logger.warning("packed weights cannot be kept in %s: %s", self._folder, error)
            self._can_write = False
            return
        self._used.add(path)
        self._written.append(path)
        self._room_bytes -= size

    def close(self) -> None:
        """The load is over. What was kept of a checkpoint that changed meanwhile goes: it may be of both states."""
        self._pool.shutdown()
        if self._written and not self._content.is_as_it_was():
            logger.warning("a checkpoint changed while it was read; its packed weights are not kept")
            for path in self._written:
                with suppress(OSError):
                    path.unlink()
        elif self._used:
            read = len(self._used) - len(self._written)
            logger.info("packed weights in %s: %d read, %d written", self._folder, read, len(self._written))
            self._content.remember()

    def _path_of(self, content: str, question: str) -> tuple[Path, str]:
        """And the whole question."""
        whole = f"{content} {_code()} {question}"
        return self._folder / f"{hashlib.sha256(whole.encode()).hexdigest()[:40]}{SUFFIX}", whole

    def _make_room(self, size: int) -> bool:
        """Whether so much may be written, what others used longest ago removed. Raises OSError."""
        if self._others is None:
            kept = _kept_in(self._folder)
            held, free = sum(one.num_bytes for one in kept), shutil.disk_usage(self._folder).free
            limit = (held + free) // _SHARE_OF_DISK if self._limit_bytes is None else self._limit_bytes
            self._room_bytes = min(limit - held, free)  # less than nothing where the disk has shrunk
            self._others = sorted(kept, key=lambda one: one.used, reverse=True)
        while self._room_bytes < size and self._others:
            oldest = self._others.pop()
            if oldest.path not in self._used:
                with suppress(FileNotFoundError):
                    oldest.path.unlink()
                self._room_bytes += oldest.num_bytes
        return self._room_bytes >= size


def _kept_in(folder: Path) -> Sequence[_Kept]:
    """What is in it; what was begun and abandoned goes. Raises OSError."""
    found = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another rank was faster
            stat = path.stat()
            if path.name.endswith(SUFFIX):
                found.append(_Kept(path, stat.st_mtime, stat.st_size))
            elif time.time() - stat.st_mtime > _LASTS_S.get(path.suffix, math.inf):
                path.unlink()
    return found


@cache
def _code() -> str:
    """What reads and quantises."""
    formats = Path(hetero_api.__file__).parent
    sources = [*Path(__file__).parent.glob("*.py"), *(path for name in _FORMAT_SOURCES for path in formats.glob(name))]
    return f"{source_digest(sorted(sources))} torch {torch.__version__}"

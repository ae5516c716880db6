"""The shared memory that the ranks of one host exchange through.

Layout, in 128-byte lines (two cache lines, so that a prefetched neighbour is never another rank's):

    line 0        abort word: not 0 once any rank has aborted
    line 1 + r    counter of rank r: the round that it has published
    next page     areas: rank 0 even, rank 0 odd, rank 1 even, …

The file lives in /dev/shm, readable by its owner only, from `create` until `unlink`, which follows as soon as
all ranks have attached: a few milliseconds. Afterwards it has no name and the kernel frees it with the last
process that maps it, however that process ends. Space is reserved before it is mapped, so a full /dev/shm is an
error here and not a SIGBUS later.

The mapping is never closed by hand: tensors point into it, and it goes when the last of them does.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_worker.errors import ExchangeError

SHM_FOLDER: Final = Path("/dev/shm")
LINE_BYTES: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Where things are in a segment. `area_bytes` is a multiple of the page size."""

    world_size: int
    area_bytes: int

    def __post_init__(self) -> None:
        if self.area_bytes < 1 or self.area_bytes % mmap.PAGESIZE:
            raise ValueError(f"area_bytes must be a multiple of {mmap.PAGESIZE}, not {self.area_bytes}")

    @property
    def header_bytes(self) -> int:
        lines = (1 + self.world_size) * LINE_BYTES
        return -(-lines // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def total_bytes(self) -> int:
        return self.header_bytes + 2 * self.world_size * self.area_bytes

    def counter_word(self, rank: int) -> int:
        """Index of the rank's counter among the segment's 64-bit words."""
        return (1 + rank) * LINE_BYTES // 8

    def area_offset(self, rank: int, parity: int) -> int:
        """First byte of the rank's area for even (0) or odd (1) rounds."""
        return self.header_bytes + (2 * rank + parity) * self.area_bytes


@dataclass(frozen=True, slots=True)
class ShmSegment:
    """A mapped segment."""

    path: Path
    layout: SegmentLayout
    memory: mmap.mmap

    @classmethod
    def create(cls, name: str, layout: SegmentLayout, *, folder: Path = SHM_FOLDER) -> ShmSegment:
        """Make it, zeroed. Raises ExchangeError, and leaves no file, when it exists or there is no room."""
        path = _path(folder, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ExchangeError(f"{path}: cannot make the shared segment: {error.strerror}") from error
        try:
            os.posix_fallocate(fd, 0, layout.total_bytes)
            return cls(path, layout, mmap.mmap(fd, layout.total_bytes))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ExchangeError(_no_room(path, layout, error)) from error
        finally:
            os.close(fd)

    @classmethod
    def attach(cls, name: str, layout: SegmentLayout, *, folder: Path = SHM_FOLDER) -> ShmSegment:
        """Map what rank 0 made. Raises ExchangeError when it is missing, another user's or of another size."""
        path = _path(folder, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ExchangeError(
                f"{path}: cannot open rank 0's shared segment: {error.strerror}; ranks must share {folder}"
            ) from error
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or status.st_size != layout.total_bytes:
                raise ExchangeError(
                    f"{path}: not rank 0's segment: {status.st_size} bytes of user {status.st_uid}, "
                    f"expected {layout.total_bytes} of user {os.geteuid()}"
                )
            return cls(path, layout, mmap.mmap(fd, layout.total_bytes))
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Take the name away; the memory stays for those who map it. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def _path(folder: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ExchangeError(f"segment_name {name!r} is no plain file name of letters, digits, '.', '_' and '-'")
    return folder / name


def _no_room(path: Path, layout: SegmentLayout, error: OSError) -> str:
    needed = f"{path}: cannot reserve {layout.total_bytes} bytes of shared memory: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EFBIG):
        needed += f"; enlarge {path.parent} (in a pod: an emptyDir with medium Memory)"
    return needed

"""The shared memory that the ranks of one host exchange through.

Layout, in 128-byte lines (two cache lines, so that a prefetched neighbour is never another rank's):

    line 0        abort word: not 0 once any rank has aborted
    lines         a counter for each rank of the group, then for each of every subgroup: the round that it has published
    lines         for each link: a counter of what its source has sent, and of what each receiver has taken
    next page     areas: rank 0 even, rank 0 odd, rank 1 even, …, the same for subgroups, then LINK_DEPTH for each link

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

from hetero_worker.distributed.routes import NO_ROUTES, Link, Routes
from hetero_worker.errors import ExchangeError

SHM_FOLDER: Final = Path("/dev/shm")
LINE_BYTES: Final = 128
LINK_DEPTH: Final = 8
"""Messages that a link holds: so far may its source be ahead of a receiver."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True)
class RoundsLayout:
    """Where the rounds of one group or subgroup take place."""

    ranks: tuple[int, ...]
    counters: tuple[int, ...]
    """Index of each rank's counter among the segment's 64-bit words, in the order of `ranks`."""
    areas: tuple[tuple[int, int], ...]
    """First byte of each rank's area for even and for odd rounds."""


@dataclass(frozen=True, slots=True)
class LinkLayout:
    """Where one link's messages lie."""

    link: Link
    sent: int
    """Word: how many the source has published."""
    taken: tuple[int, ...]
    """Words: how many each receiver has read, in the order of `link.receivers`."""
    areas: tuple[int, ...]
    """First bytes; message n lies in area n mod LINK_DEPTH."""


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Where things are in a segment. `area_bytes` is a multiple of the page size."""

    world_size: int
    area_bytes: int
    routes: Routes = NO_ROUTES

    def __post_init__(self) -> None:
        if self.area_bytes < 1 or self.area_bytes % mmap.PAGESIZE:
            raise ValueError(f"area_bytes must be a multiple of {mmap.PAGESIZE}, not {self.area_bytes}")

    @property
    def header_bytes(self) -> int:
        link_lines = sum(1 + len(link.receivers) for link in self.routes.links)
        lines = (1 + self._num_seats + link_lines) * LINE_BYTES
        return -(-lines // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def total_bytes(self) -> int:
        num_areas = 2 * self._num_seats + LINK_DEPTH * len(self.routes.links)
        return self.header_bytes + num_areas * self.area_bytes

    def rounds(self) -> list[RoundsLayout]:
        """Of the whole group, then of each subgroup."""
        layouts, seat = [], 0
        for ranks in self._groups:
            seats = range(seat, seat + len(ranks))
            areas = tuple((self._area(2 * seat), self._area(2 * seat + 1)) for seat in seats)
            layouts.append(RoundsLayout(ranks, tuple(self._word(seat) for seat in seats), areas))
            seat += len(ranks)
        return layouts

    def links(self) -> list[LinkLayout]:
        """In the order of the routes' links."""
        layouts, line, area = [], self._num_seats, 2 * self._num_seats
        for link in self.routes.links:
            end = line + 1 + len(link.receivers)
            taken = tuple(self._word(i) for i in range(line + 1, end))
            areas = tuple(self._area(area + i) for i in range(LINK_DEPTH))
            layouts.append(LinkLayout(link, self._word(line), taken, areas))
            line, area = end, area + LINK_DEPTH
        return layouts

    @property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple(range(self.world_size)), *self.routes.subgroups

    @property
    def _num_seats(self) -> int:
        """Ranks, counted once for every group that they are in."""
        return sum(map(len, self._groups))

    def _word(self, line: int) -> int:
        return (1 + line) * LINE_BYTES // 8

    def _area(self, index: int) -> int:
        return self.header_bytes + index * self.area_bytes


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

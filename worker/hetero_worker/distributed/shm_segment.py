"""The shared memory that the ranks of one host exchange through.

Layout, in 128-byte lines (two cache lines, so that a prefetched neighbour is never another rank's):

    line 0        end word: not 0 once the exchange has ended for all (shm_rank.py)
    lines         a seat for each rank: the word that it sleeps on, whether it sleeps, its mark (native_exchange.h)
    lines         a counter for each rank of the group, then for each of every subgroup: the round that it has published
    lines         for each link: a counter of what its source has sent, and of what each receiver has taken
    next page     areas: rank 0 even, rank 0 odd, rank 1 even, …, the same for subgroups, then LINK_DEPTH for each link

The file lives in /dev/shm, readable by its owner only, from `create` until `unlink`, which follows as soon as
all ranks have attached: a few milliseconds. Afterwards it has no name and the kernel frees it with the last
process that maps it, however that process ends. Space is reserved before it is mapped, so a full /dev/shm is an
error here and not a SIGBUS later; every rank reserves the areas that it writes, so that they are its node's memory.

While a rank is there it holds a lock on one byte of the file, its own. The kernel lets go of it when the process ends,
however it ends and in whatever pid namespace; so peers can ask the file who is still there (`absent`).

Whether ranks that opened the same name share memory is proved, not assumed: each leaves its *mark*, made of a nonce
that they agreed upon elsewhere, and then looks for all others' (`unmarked`).

A device may be let copy from and to the segment by itself (`pin`); it is told that this is over when the rank leaves.

The mapping is never closed by hand: tensors point into it, and it goes when the last of them does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hetero_worker.distributed.native_exchange import LINE_BYTES, LINK_DEPTH
from hetero_worker.distributed.routes import NO_ROUTES, Link, Routes
from hetero_worker.errors import ExchangeError, SegmentNotShared
from hetero_worker.platforms.host_pins import HostPins

SHM_FOLDER: Final = Path("/dev/shm")
_MARK_OFFSET: Final = 8
"""Of a rank's mark in its seat, bytes."""
_FLOCK: Final = struct.Struct("@hhqqi0q")
"""struct flock: type, whence, start, length, pid."""
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
        lines = (1 + self.world_size + self._num_counters + link_lines) * LINE_BYTES
        return -(-lines // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def total_bytes(self) -> int:
        num_areas = 2 * self._num_counters + LINK_DEPTH * len(self.routes.links)
        return self.header_bytes + num_areas * self.area_bytes

    def written_by(self, rank: int) -> Iterator[tuple[int, int]]:
        """First byte and length of what a rank is to reserve: what it writes, and the header if it is rank 0."""
        if rank == 0:
            yield 0, self.header_bytes
        for group in self.rounds():
            for member, (even, _) in zip(group.ranks, group.areas, strict=True):
                if member == rank:
                    yield even, 2 * self.area_bytes
        for at in self.links():
            if at.link.source == rank:
                yield at.areas[0], LINK_DEPTH * self.area_bytes

    def mark_word(self, rank: int) -> int:
        """Index of a rank's mark among the segment's 64-bit words."""
        return ((1 + rank) * LINE_BYTES + _MARK_OFFSET) // 8

    def rounds(self) -> list[RoundsLayout]:
        """Of the whole group, then of each subgroup."""
        layouts, first = [], 0
        for ranks in self._groups:
            lines = range(first, first + len(ranks))
            areas = tuple((self._area(2 * line), self._area(2 * line + 1)) for line in lines)
            layouts.append(RoundsLayout(ranks, tuple(self._word(line) for line in lines), areas))
            first += len(ranks)
        return layouts

    def links(self) -> list[LinkLayout]:
        """In the order of the routes' links."""
        layouts, line, area = [], self._num_counters, 2 * self._num_counters
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
    def _num_counters(self) -> int:
        """Ranks, counted once for every group that they are in."""
        return sum(map(len, self._groups))

    def _word(self, line: int) -> int:
        return (1 + self.world_size + line) * LINE_BYTES // 8

    def _area(self, index: int) -> int:
        return self.header_bytes + index * self.area_bytes


@dataclass(frozen=True, slots=True)
class ShmSegment:
    """A segment, mapped by one rank that holds its lock."""

    path: Path
    layout: SegmentLayout
    rank: int
    memory: mmap.mmap
    fd: int
    _pinned: list[HostPins] = field(default_factory=list, compare=False)
    """Those that hold on to the memory."""

    @classmethod
    def create(cls, name: str, layout: SegmentLayout, *, folder: Path = SHM_FOLDER) -> ShmSegment:
        """Rank 0 makes it, zeroed. Raises ExchangeError, and leaves no file, when it exists or there is no room."""
        path = _path(folder, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ExchangeError(f"{path}: cannot make the shared segment: {error.strerror}") from error
        try:
            os.ftruncate(fd, layout.total_bytes)
            return cls._map(path, layout, rank=0, fd=fd)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise ExchangeError(_complaint(path, layout, rank=0, error=error)) from error

    @classmethod
    def attach(cls, name: str, layout: SegmentLayout, *, rank: int, folder: Path = SHM_FOLDER) -> ShmSegment:
        """Map what rank 0 made.

        Raises SegmentNotShared when it is missing, another user's or of another size, ExchangeError when there is no
        room.
        """
        path = _path(folder, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentNotShared(
                f"{path}: cannot open rank 0's shared segment: {error.strerror}; ranks must share {folder}"
            ) from error
        try:
            _check_origin(path, os.fstat(fd), layout)
            return cls._map(path, layout, rank=rank, fd=fd)
        except OSError as error:
            os.close(fd)
            raise ExchangeError(_complaint(path, layout, rank=rank, error=error)) from error
        except ExchangeError:
            os.close(fd)
            raise

    @classmethod
    def _map(cls, path: Path, layout: SegmentLayout, *, rank: int, fd: int) -> ShmSegment:
        """Reserve, lock, map. Raises OSError."""
        for begin, length in layout.written_by(rank):
            os.posix_fallocate(fd, begin, length)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0))
        return cls(path, layout, rank, mmap.mmap(fd, layout.total_bytes), fd)

    def unlink(self) -> None:
        """Take the name away; the memory stays for those who map it. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def pin(self, pins: HostPins) -> str:
        """Let a device copy from and to all of it, until `leave`. Why it cannot; empty if it can."""
        problem = pins.pin(self._address, len(self.memory))
        if not problem:
            self._pinned.append(pins)
        return problem

    def leave(self) -> None:
        """Let go of the lock: peers that wait for this rank find it gone. Call once; the memory stays mapped."""
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, self.rank, 1, 0))
        os.close(self.fd)
        while self._pinned:
            self._pinned.pop().unpin(self._address)

    def absent(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Those among other ranks that hold their lock no more: ended, or gone by `leave`. Some microseconds each."""
        return tuple(rank for rank in ranks if not self._is_locked(rank))

    def mark(self, nonce: int) -> None:
        """Leave this rank's mark."""
        with memoryview(self.memory).cast("Q") as words:
            words[self.layout.mark_word(self.rank)] = _mark(nonce, self.rank)

    def unmarked(self, nonce: int) -> tuple[int, ...]:
        """Ranks whose mark is not here. Once all have left theirs: empty if, and only if, all share this memory."""
        with memoryview(self.memory).cast("Q") as words:
            ranks = range(self.layout.world_size)
            return tuple(rank for rank in ranks if words[self.layout.mark_word(rank)] != _mark(nonce, rank))

    @property
    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def _is_locked(self, rank: int) -> bool:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind: int = _FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK


def _mark(nonce: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{nonce} {rank}".encode()).digest()[:8], "little")


def _check_origin(path: Path, status: os.stat_result, layout: SegmentLayout) -> None:
    if status.st_uid != os.geteuid() or status.st_size != layout.total_bytes:
        raise SegmentNotShared(
            f"{path}: not rank 0's segment: {status.st_size} bytes of user {status.st_uid}, "
            f"expected {layout.total_bytes} of user {os.geteuid()}"
        )


def _path(folder: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ExchangeError(f"segment_name {name!r} is no plain file name of letters, digits, '.', '_' and '-'")
    return folder / name


def _complaint(path: Path, layout: SegmentLayout, *, rank: int, error: OSError) -> str:
    if error.errno in (errno.EAGAIN, errno.EACCES):
        return f"{path}: rank {rank}'s place in the shared segment is taken by another process"
    needed = f"{path}: cannot reserve {layout.total_bytes} bytes of shared memory: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EFBIG):
        needed += f"; enlarge {path.parent} (in a pod: an emptyDir with medium Memory)"
    return needed

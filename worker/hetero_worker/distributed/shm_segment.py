"""The shared memory that the ranks of one host exchange through.

Layout, in 128-byte lines (two cache lines, so that a prefetched neighbour is never another rank's):

    line 0        end word: not 0 once the exchange has ended for all (shm_rank.py)
    lines         one seat per rank: the word that it sleeps on, whether it sleeps, its mark (native_exchange.h)
    lines         one counter per rank of the group, then of every subgroup: the round that it has published
    lines         for each link: a counter of what its source has sent, and of what each receiver has taken
    next page     areas: rank 0 even, rank 0 odd, rank 1 even, …; likewise for subgroups; LINK_DEPTH for each link

The file has a name in /dev/shm, readable by its owner only, from `create` until `unlink`, which follows as soon as all
ranks have attached: a few milliseconds. After that the kernel frees it with the last process that maps it, however that
process ends. Space is reserved before it is mapped, so a full /dev/shm is an error here and not a SIGBUS later. Every
rank reserves the areas that it writes, so they are memory of its NUMA node.

Each rank holds a lock on its own byte of the file. The kernel releases the lock when the process ends, in any way and
in any pid namespace, so peers can ask the file who is still alive (`absent`).

Ranks prove that they share the memory: each leaves its *mark*, made of a nonce that they agreed on elsewhere, and then
looks for the marks of all others (`unmarked`).

A device may copy from and to the segment by itself (`pin`), until the rank leaves.

The mapping is never closed by hand: tensors point into it, and it goes with the last of them.
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
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hetero_worker.distributed.native_exchange import LINE_BYTES, LINK_DEPTH
from hetero_worker.distributed.routes import NO_ROUTES, Link, Routes
from hetero_worker.errors import ExchangeError, SegmentNotShared
from hetero_worker.memory.streams import HostPins

SHM_FOLDER: Final = Path("/dev/shm")
_MARK_OFFSET: Final = 8
"""Offset of a rank's mark in its seat, bytes."""
_FLOCK: Final = struct.Struct("@hhqqi0q")
"""struct flock: type, whence, start, length, pid."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True)
class RoundsLayout:
    """Counters and areas of one group's or subgroup's rounds."""

    ranks: tuple[int, ...]
    counters: tuple[int, ...]
    """Index of each rank's counter among the segment's 64-bit words, in the order of `ranks`."""
    areas: tuple[tuple[int, int], ...]
    """First byte of each rank's area for even and for odd rounds."""


@dataclass(frozen=True, slots=True)
class LinkLayout:
    """Counters and areas of one link."""

    link: Link
    sent: int
    """Word that counts the messages that the source has published."""
    taken: tuple[int, ...]
    """Words that count the messages that each receiver has read, in the order of `link.receivers`."""
    areas: tuple[int, ...]
    """First byte of each area; message n lies in area n mod LINK_DEPTH."""


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Layout of a segment. `area_bytes` is a multiple of the page size; else ValueError."""

    world_size: int
    area_bytes: int
    routes: Routes = NO_ROUTES

    def __post_init__(self) -> None:
        if self.area_bytes < 1 or self.area_bytes % mmap.PAGESIZE:
            raise ValueError(f"area_bytes must be a multiple of {mmap.PAGESIZE}, not {self.area_bytes}")

    @property
    def header_bytes(self) -> int:
        """Bytes of all lines, in whole pages."""
        link_lines = sum(1 + len(link.receivers) for link in self.routes.links)
        lines = (1 + self.world_size + self._num_counters + link_lines) * LINE_BYTES
        return -(-lines // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def total_bytes(self) -> int:
        """Bytes of the segment."""
        num_areas = 2 * self._num_counters + LINK_DEPTH * len(self.routes.links)
        return self.header_bytes + num_areas * self.area_bytes

    def written_by(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield first byte and length of what a rank reserves: what it writes, and on rank 0 the header."""
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
        """Return the index of a rank's mark among the segment's 64-bit words."""
        return ((1 + rank) * LINE_BYTES + _MARK_OFFSET) // 8

    def rounds(self) -> list[RoundsLayout]:
        """Return the layouts of the whole group's rounds and of each subgroup's."""
        layouts, first = [], 0
        for ranks in self._groups:
            lines = range(first, first + len(ranks))
            areas = tuple((self._area(2 * line), self._area(2 * line + 1)) for line in lines)
            layouts.append(RoundsLayout(ranks, tuple(self._word(line) for line in lines), areas))
            first += len(ranks)
        return layouts

    def links(self) -> list[LinkLayout]:
        """Return the layouts of links, in the order of the routes."""
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
        """Number of ranks, each counted once for every group that it is in."""
        return sum(map(len, self._groups))

    def _word(self, line: int) -> int:
        return (1 + self.world_size + line) * LINE_BYTES // 8

    def _area(self, index: int) -> int:
        return self.header_bytes + index * self.area_bytes


@dataclass(frozen=True, slots=True)
class ShmSegment:
    """Segment, mapped by one rank that holds its lock."""

    path: Path
    layout: SegmentLayout
    rank: int
    memory: mmap.mmap
    fd: int
    _pinned: list[HostPins] = field(default_factory=list, compare=False)
    """Pins that hold the memory."""

    @classmethod
    def create(cls, name: str, layout: SegmentLayout, *, folder: Path = SHM_FOLDER) -> ShmSegment:
        """Create a zeroed segment on rank 0. Raises ExchangeError, and leaves no file, if it exists or has no room."""
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
        """Map rank 0's segment.

        Raises SegmentNotShared when it is missing, another user's or of another size, and ExchangeError when there is
        no room.
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
        memory = mmap.mmap(fd, layout.total_bytes)
        weakref.finalize(memory, os.close, fd).atexit = False
        return cls(path, layout, rank, memory, fd)

    def pin(self, pins: HostPins) -> str:
        """Let a device copy from and to the segment until `leave`. Return why it cannot; empty if it can."""
        problem = pins.pin(self._address, len(self.memory))
        if not problem:
            self._pinned.append(pins)
        return problem

    def leave(self) -> None:
        """Release the lock: peers that wait for this rank find it gone. Call once, from any thread.

        Memory and descriptor stay until nothing can use them any more.
        """
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, self.rank, 1, 0))
        while self._pinned:
            self._pinned.pop().unpin(self._address)

    def absent(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return which of these ranks, all others, hold no lock: they ended or left. Some microseconds per rank."""
        return tuple(rank for rank in ranks if not self._is_locked(rank))

    def mark(self, nonce: int) -> None:
        """Write this rank's mark."""
        with memoryview(self.memory).cast("Q") as words:
            words[self.layout.mark_word(self.rank)] = _mark(nonce, self.rank)

    def unmarked(self, nonce: int) -> tuple[int, ...]:
        """Return the ranks whose mark is missing. When all have marked, it is empty only if all share this memory."""
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


def unlink(name: str, *, folder: Path = SHM_FOLDER) -> None:
    """Remove a segment's name; the memory stays for those who map it. Idempotent, on any rank."""
    with contextlib.suppress(FileNotFoundError):
        _path(folder, name).unlink()


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

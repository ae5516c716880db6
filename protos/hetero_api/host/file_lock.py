"""Locks on files that end with their holder, however it ends (flock)."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LOOKS: Final = 5
LOOK_S: Final = 0.02


class FileLock:
    """An exclusive lock on `path`, which is created when missing and holds the holder's pid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def try_acquire(self) -> bool:
        """Take the lock unless another process, or another object here, holds it."""
        # `is_held` takes the lock for an instant to look; that must not be taken for a holder.
        for _ in range(LOOKS):
            if self._acquire(fcntl.LOCK_EX | fcntl.LOCK_NB):
                return True
            time.sleep(LOOK_S)
        return False

    def acquire(self) -> None:
        """Take the lock, waiting for its holder."""
        self._acquire(fcntl.LOCK_EX)

    def holder_pid(self) -> int | None:
        """Return the pid that the last holder wrote; None if there is none."""
        try:
            return int(self.path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @contextmanager
    def held(self, *, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the lock within the block; call `waiting` before waiting for another holder."""
        if not self.try_acquire():
            waiting()
            self.acquire()
        try:
            yield
        finally:
            self.release()

    def _acquire(self, operation: int) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, operation)
        except BlockingIOError:
            os.close(fd)
            return False
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._fd = fd
        return True


def is_held(path: Path) -> bool:
    """Whether some process holds the lock on `path` now."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # A shared lock is refused only while an exclusive one is held.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False

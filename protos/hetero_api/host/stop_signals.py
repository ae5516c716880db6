"""SIGINT, SIGTERM and SIGHUP as something to look at and to wait for, not an exception out of nowhere.

Whoever supervises processes is always somewhere between starting and stopping processes; an exception at a random line
could lose one of them. So a signal only sets a flag and makes `fileno()` readable.

The first process of a container never gets a signal that it has no handler for: the kernel drops it, and who sent it
waits for as long as it has patience. So programs that run there set one before anything that takes time, imports among
it: `StopSignals`, or `end_on_stop_signals` while there is nothing yet to stop in good order.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, NoReturn, Self

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_on_stop_signals(exit_code: Callable[[int], int]) -> None:
    """From now on a stop signal ends the process at once, with the exit code for its number, and nothing is put in
    order: threads are not waited for, files not flushed. In the main thread."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        os._exit(exit_code(number))

    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)


class StopSignals:
    """While entered, in the main thread, takes the stop signals over."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.count = 0
        self._previous: dict[int, Any] = {}
        self._read_fd, self._write_fd = -1, -1

    @property
    def impatient(self) -> bool:
        """Whether a second signal came: stop at once."""
        return self.count > 1

    def fileno(self) -> int:
        """Readable since the first signal."""
        return self._read_fd

    def __enter__(self) -> Self:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in STOP_SIGNALS:
            # Under nohup, SIGHUP is to stay ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.count += 1
        if self.first is None:
            self.first = number
            os.write(self._write_fd, b"!")

"""SIGINT, SIGTERM and SIGHUP as something to look at and to wait for, not an exception out of nowhere.

Whoever supervises processes is always somewhere between starting and stopping processes; an exception at a random line
could lose one of them. So a signal only sets a flag and makes `fileno()` readable.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any, Final, Self

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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

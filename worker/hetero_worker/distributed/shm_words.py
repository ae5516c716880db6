"""The counters of a shared segment, and how to wait for them.

Waiting: a short spin on the counter, then sched_yield, then sleeps that grow to 200 µs, so that ranks that share
cores with others let them run. Abort is a word in the segment: it ends the wait of every rank of the group, and
makes every later call raise. All is called from one thread; only `abort` and `close` may come from another.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from hetero_worker.distributed.shm_segment import ShmSegment
from hetero_worker.errors import ExchangeAborted, ExchangeTimeout

_ABORT_WORD: Final = 0
_SPINS: Final = 400
_YIELD_S: Final = 0.002
_SLEEP_MIN_S: Final = 20e-6
_SLEEP_MAX_S: Final = 200e-6

Complaint = Callable[[int], str]
"""Who is late for a number, for a person."""


class SharedWords:
    """The 64-bit words of one rank's mapping."""

    def __init__(self, segment: ShmSegment, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._words = memoryview(segment.memory).cast("Q")
        self._closed = False
        self._lock = threading.Lock()

    def __getitem__(self, word: int) -> int:
        return self._words[word]

    def __setitem__(self, word: int, number: int) -> None:
        self._words[word] = number

    def abort(self) -> None:
        """Every rank's blocked or later call raises ExchangeAborted."""
        with self._lock:
            if not self._closed:
                self._words[_ABORT_WORD] = 1

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._words = memoryview(b"\x01" * 8).cast("Q")  # a later call still finds an abort word that is set

    def check_open(self) -> None:
        if self._words[_ABORT_WORD]:
            raise ExchangeAborted("the exchange is closed" if self._closed else "the epoch was aborted")

    def await_all(self, words: Sequence[int], number: int, complaint: Complaint) -> None:
        """Until every word is at least `number`. Raises ExchangeAborted, ExchangeTimeout."""
        shared = self._words
        for word in words:
            if shared[word] < number:
                for _ in range(_SPINS):
                    if shared[word] >= number:
                        break
                else:
                    self._await_patiently(word, number, complaint)

    def _await_patiently(self, word: int, number: int, complaint: Complaint) -> None:
        """Yield, then sleep, until the counter comes, the epoch is aborted or the time is over."""
        shared = self._words
        began = time.monotonic()
        sleep_s = _SLEEP_MIN_S
        while shared[word] < number:
            if shared[_ABORT_WORD]:
                raise ExchangeAborted("the epoch was aborted while waiting for a peer")
            waited_s = time.monotonic() - began
            if waited_s < _YIELD_S:
                os.sched_yield()
            elif waited_s < self.timeout_s:
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _SLEEP_MAX_S)
            else:
                raise ExchangeTimeout(complaint(number))

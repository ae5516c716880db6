"""The counters of a shared segment, and how to wait for them without the native library.

Waiting: a short spin on the counter, then sched_yield, then sleeps that grow to 200 µs, so that ranks that share
cores with others let them run. All is called from one thread; only `abort` and `close` may come from another.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from hetero_worker.distributed.shm_peers import ABORTED, LOOK_EVERY_S, Late, Peers
from hetero_worker.distributed.shm_segment import ShmSegment

_END_WORD: Final = 0
_SPINS: Final = 400
_YIELD_S: Final = 0.002
_SLEEP_MIN_S: Final = 20e-6
_SLEEP_MAX_S: Final = 200e-6

Complaint = Callable[[int], Late]
"""Who is late for a number."""


class SharedWords:
    """The 64-bit words of one rank's mapping."""

    def __init__(self, segment: ShmSegment, *, timeout_s: float) -> None:
        self.peers = Peers(segment, timeout_s=timeout_s, end=self._end)
        self._words = memoryview(segment.memory).cast("Q")
        self._closed = False
        self._lock = threading.Lock()

    def __getitem__(self, word: int) -> int:
        return self._words[word]

    def __setitem__(self, word: int, number: int) -> None:
        self._words[word] = number

    def abort(self) -> None:
        """Every rank's blocked or later call raises ExchangeAborted."""
        self._end(ABORTED)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._words = memoryview(b"\x01" * 8).cast("Q")  # a later call still finds an end word that is set
            self.peers.close()

    def check_open(self) -> None:
        if self._words[_END_WORD]:
            raise self.peers.ended()

    def await_all(self, words: Sequence[int], number: int, complaint: Complaint) -> None:
        """Until every word is at least `number`. Raises ExchangeAborted, ExchangeTimeout, PeerLost."""
        shared = self._words
        for word in words:
            if shared[word] < number:
                for _ in range(_SPINS):
                    if shared[word] >= number:
                        break
                else:
                    self._await_patiently(word, number, complaint)

    def _await_patiently(self, word: int, number: int, complaint: Complaint) -> None:
        """Yield, then sleep, until the counter comes, the exchange has ended or the time is over."""
        shared = self._words
        began_s = looked_s = time.monotonic()
        sleep_s = _SLEEP_MIN_S
        while shared[word] < number:
            self.check_open()
            now_s = time.monotonic()
            if now_s - began_s < _YIELD_S:
                os.sched_yield()
            elif now_s - looked_s < min(LOOK_EVERY_S, self.peers.timeout_s):
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _SLEEP_MAX_S)
            else:
                self.peers.look(lambda: complaint(number), since_s=began_s)
                looked_s = now_s

    def _end(self, word: int) -> None:
        with self._lock:
            if not self._closed and not self._words[_END_WORD]:
                self._words[_END_WORD] = word

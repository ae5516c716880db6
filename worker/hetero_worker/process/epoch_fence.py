"""Delivery of an Abort to a main thread that is blocked in a collective, and the end of the process if that fails.

Two threads meet here. The main thread enters an epoch, adopts its groups and leaves the epoch; the thread that reads
the gateway's stream aborts epochs. An abort marks the epoch, wakes the groups, and starts a watchdog. If the main
thread has not left in time (a collective that cannot be interrupted, a kernel that hangs), `give_up` ends the process,
because a rank that neither works nor reports blocks its whole group.

An abort may overtake its epoch's own FormGroup, which still waits in the queue. Entering an epoch that is already
aborted raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hetero_worker.errors import ExchangeAborted


class EpochFence:
    """Guard of one rank's current epoch. Every method may be called from any thread."""

    def __init__(self, *, patience_s: float, give_up: Callable[[], None]) -> None:
        self._patience_s = patience_s
        self._give_up = give_up
        self._lock = threading.RLock()
        self._epoch: int | None = None
        self._aborted_through = 0
        self._closed = False
        self._abort_groups: Callable[[], None] | None = None
        self._patient = False
        self._watchdog: threading.Timer | None = None

    @property
    def aborted(self) -> bool:
        """Whether the epoch that was entered is aborted."""
        with self._lock:
            return self._closed or (self._epoch is not None and self._epoch <= self._aborted_through)

    def check(self) -> None:
        """Raise ExchangeAborted if the epoch is aborted."""
        if self.aborted:
            raise ExchangeAborted("the epoch was aborted")

    def enter(self, epoch: int) -> None:
        """Begin work in `epoch`, on the main thread. Raises ExchangeAborted if it is already aborted."""
        with self._lock:
            self._epoch = epoch
            self.check()

    def adopt(self, abort_groups: Callable[[], None]) -> None:
        """Let an abort wake the epoch's groups from now on, on any thread. Raises ExchangeAborted if it came before.

        `abort_groups` makes blocked and later calls raise ExchangeAborted, and does not block.
        """
        with self._lock:
            self._abort_groups = abort_groups
            self.check()

    def leave(self) -> None:
        """End work in the epoch: the main thread has freed everything that belongs to it."""
        with self._lock:
            self._epoch = self._abort_groups = None
            if self._watchdog is not None:
                self._watchdog.cancel()
                self._watchdog = None

    def abort(self, epoch: int) -> None:
        """End all epochs up to `epoch`."""
        with self._lock:
            self._aborted_through = max(self._aborted_through, epoch)
            if self.aborted:
                self._wake(watch=not self._patient)

    def close(self, *, patiently: bool = False) -> None:
        """End the current epoch and all later ones: the session with this gateway is over.

        `patiently` lets work within `patient` finish, as an abort does, because its result will be used.
        """
        with self._lock:
            self._closed = True
            if self._epoch is not None:
                self._wake(watch=not (patiently and self._patient))

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Let an abort wait for the block: work that needs no peer and is worth finishing, such as reading weights.

        The gateway limits how long that may take: it ends the stream of a rank that does not come back.
        """
        with self._lock:
            self._patient = True
        try:
            yield
        finally:
            with self._lock:
                self._patient = False
                if self.aborted:
                    self._wake(watch=True)

    def _wake(self, *, watch: bool) -> None:
        if self._abort_groups is not None:
            self._abort_groups()
        if watch and self._watchdog is None:
            self._watchdog = threading.Timer(self._patience_s, self._give_up)
            self._watchdog.daemon = True
            self._watchdog.start()

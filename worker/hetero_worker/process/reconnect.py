"""A rank that outlives its gateway: it keeps its weights and waits for the next gateway.

Each gateway gets a session of its own: a `state_machine.WorkerStateMachine`, which begins with a dial and ends with the
stream. The runner with the weights lasts over all sessions, so a gateway can be replaced without reading a byte of the
model again. A rank with a reconnect timeout of 0 has one session.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from hetero_api.contract import EXIT_OK

if TYPE_CHECKING:
    from hetero_worker.process.state_machine import WorkerStateMachine

_log = logging.getLogger(__name__)

FAREWELL_S: Final = 2.0
"""Longest that a gateway may take to close its side of the stream when the rank leaves."""
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 15.0


class ReconnectingRank:
    """Runs one session after another. `new_session` takes the longest wait for its gateway, in seconds."""

    def __init__(
        self,
        new_session: Callable[[float], WorkerStateMachine],
        *,
        connect_timeout_s: float,
        reconnect_timeout_s: float,
        first_pause_s: float = FIRST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._new_session = new_session
        self._connect_timeout_s = connect_timeout_s
        self._reconnect_timeout_s = reconnect_timeout_s
        self._first_pause_s = first_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._session: WorkerStateMachine | None = None

    def run(self) -> int:
        """Run all sessions; return the process's exit code, which is that of the last one."""
        patience_s, pause_s = self._connect_timeout_s, self._first_pause_s
        lost_s = self._clock()
        while True:
            exit_code, was_in_group, gateway_lost = self._run_session(patience_s)
            if not gateway_lost or not self._reconnect_timeout_s:
                return exit_code
            if self._leaving.is_set():
                return EXIT_OK
            if was_in_group:
                lost_s, pause_s = self._clock(), self._first_pause_s
            patience_s = self._reconnect_timeout_s - (self._clock() - lost_s)
            if patience_s <= 0:
                _log.error("no gateway has taken this rank within %g s", self._reconnect_timeout_s)
                return exit_code
            _log.warning("waiting up to %.0f s for a gateway that takes this rank; its weights stay", patience_s)
            if self._leaving.wait(pause_s):
                return EXIT_OK
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def request_leave(self, reason: str) -> None:
        """End soon, in good order. Callable from any thread."""
        with self._lock:
            self._leaving.set()
            if self._session is not None:
                self._session.request_leave(reason)

    def _run_session(self, patience_s: float) -> tuple[int, bool, bool]:
        """Run one session; return its exit code, whether it was in a group, and whether its gateway was lost."""
        with self._lock:
            if self._leaving.is_set():
                return EXIT_OK, False, False
            session = self._session = self._new_session(patience_s)
        try:
            return session.run(), session.was_in_group, session.gateway_lost
        finally:
            with self._lock:
                self._session = None
            session.hang_up(FAREWELL_S)

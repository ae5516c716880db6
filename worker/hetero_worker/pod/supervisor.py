"""The loop of a rank pod: passes output on, kills what hangs, starts anew what died, ends when it is told to or must.

One thread, the main one: children's death signals are tied to the thread that started them. Every wait is bounded, and
`turned_s` shows that the loop turns. It waits for orphans too, as the first process of a container has to; whether it
is the first makes no difference.

A rank that the kernel killed for want of memory ends the container: it would take as much again, and Kubernetes has a
word for it, which it says of containers only (OOMKilled).
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from hetero_api.contract import EXIT_OK
from hetero_api.host.death_signal import adopt_orphans
from hetero_api.host.memory import out_of_memory_kills
from hetero_api.host.stop_signals import StopSignals
from hetero_worker.pod.orphans import reap_orphans
from hetero_worker.pod.rank_process import RankProcess

_log = logging.getLogger(__name__)

_TURN_S: Final = 0.5
_LOOK_S: Final = 0.05
_KILLED: Final = 128 + signal.SIGKILL


def write_to_log(chunk: bytes) -> None:
    """Onto this process's standard error, whole."""
    sys.stderr.flush()
    left = memoryview(chunk)
    while left:
        left = left[os.write(sys.stderr.fileno(), left) :]


class PodSupervisor:
    """See the module. `write` takes the ranks' output."""

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        *,
        signals: StopSignals,
        stop_grace_s: float,
        write: Callable[[bytes], object] = write_to_log,
        clock: Callable[[], float] = time.monotonic,
        count_memory_kills: Callable[[], int] = out_of_memory_kills,
    ) -> None:
        self.turned_s = clock()
        """Monotonic time of the loop's last turn."""
        self._ranks = tuple(ranks)
        self._signals = signals
        self._stop_grace_s = stop_grace_s
        self._write = write
        self._clock = clock
        self._count_memory_kills = count_memory_kills
        self._memory_kills = count_memory_kills()

    def run(self) -> int:
        """Supervise until the end; the exit code."""
        adopt_orphans()
        try:
            while self._signals.first is None:
                self._start_due()
                self._turn(self._pause_s(), wake=self._signals.fileno())
                self._kill_hung()
                for rank in self._ranks:
                    if rank.has_ended() and (exit_code := self._bury(rank)) is not None:
                        return exit_code
                reap_orphans([rank.pid for rank in self._ranks if rank.pid is not None])
            _log.info("%s: asking the ranks to leave", signal.Signals(self._signals.first).name)
            self._stop()
            return EXIT_OK
        finally:
            self._kill()

    def _start_due(self) -> None:
        now_s = self._clock()
        for rank in self._ranks:
            if not rank.is_running and rank.due_s <= now_s:
                rank.start()
                _log.info("local_rank=%d started, pid %s", rank.local_rank, rank.pid)

    def _pause_s(self) -> float:
        """Until the next start, at most a turn."""
        due_s = [rank.due_s for rank in self._ranks if not rank.is_running]
        return max(0.0, min([_TURN_S, *(due - self._clock() for due in due_s)]))

    def _turn(self, timeout_s: float, *, wake: int | None = None) -> None:
        """Wait for a rank's output or end, or for `wake`; pass on what there is."""
        with selectors.DefaultSelector() as selector:
            for fd in [fd for rank in self._ranks for fd in rank.descriptors()]:
                selector.register(fd, selectors.EVENT_READ)
            if wake is not None:
                selector.register(wake, selectors.EVENT_READ)
            selector.select(timeout_s)
        self.turned_s = self._clock()
        for rank in self._ranks:
            rank.forward_output(self._write)

    def _kill_hung(self) -> None:
        """Its neighbours keep their weights, which they would not if the kubelet had to find out."""
        for rank in self._ranks:
            if why := rank.hung():
                _log.error("local_rank=%d %s; killing it", rank.local_rank, why)
                rank.signal(signal.SIGKILL)

    def _bury(self, rank: RankProcess) -> int | None:
        """A rank ended: plan its next start, or stop the others and return the exit code for all."""
        exit_code = rank.reap(self._write)
        if exit_code == _KILLED and self._count_memory_kills() > self._memory_kills:
            self._stop()
            _log.error(
                "local_rank=%d was killed by the kernel: the ranks of this pod took more memory than its limit; raise "
                "memoryPerRank, or give them less to hold",
                rank.local_rank,
            )
            return exit_code
        pause_s = rank.plan_restart(exit_code)
        if pause_s is not None:
            _log.warning(
                "local_rank=%d ended with exit code %d; starting it anew in %g s", rank.local_rank, exit_code, pause_s
            )
            return None
        self._stop()
        _log.error("local_rank=%d ended with exit code %d, and this container with it:", rank.local_rank, exit_code)
        self._write("".join(f"{line}\n" for line in rank.tail()).encode())
        return exit_code

    def _stop(self) -> None:
        """Ask the ranks to leave; kill those that do not in time, or when a second signal comes."""
        for rank in self._ranks:
            rank.signal(signal.SIGTERM)
        deadline_s = self._clock() + self._stop_grace_s
        while self._reap_ended() and self._clock() < deadline_s and not self._signals.impatient:
            self._turn(min(_LOOK_S, max(0.0, deadline_s - self._clock())))
        self._kill()

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
        while self._reap_ended():
            self._turn(_LOOK_S)

    def _reap_ended(self) -> bool:
        """Reap what has ended; whether any rank still runs."""
        for rank in self._ranks:
            if rank.has_ended():
                _log.info("local_rank=%d left with exit code %d", rank.local_rank, rank.reap(self._write))
        return any(rank.is_running for rank in self._ranks)

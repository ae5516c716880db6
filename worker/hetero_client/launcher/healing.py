"""Restarts of a running group's processes: whenever one ends or hangs.

    ends, permanently (exit codes 2, 3)   everything ends
    ends otherwise                        is restarted: at once, or after a pause if it could not get up (`restarts`)
    hangs, or is frozen                   is killed, which ends it
    ends once too often                   everything ends

The budget is the resource's: spec.recovery.maxRestarts within windowSeconds, over all processes of the group. A gateway
is restarted on the ports that it had, and ranks and clients find it there by themselves.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from hetero_api.host.restarts import RestartBudget, RestartPauses
from hetero_api.spec import RecoverySpec
from hetero_api.supervision.child import Child, Command
from hetero_api.supervision.service import Service, Services
from hetero_client.errors import ProcessDiedError, RestartsExhaustedError

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
RAN_WELL_S: Final = 60.0
"""Running time after which a process without a heartbeat counts as well; a rank does after its first step."""
LOG_TAIL_LINES: Final = 15
LOG_TAIL_BYTES: Final = 16 * 1024

Report = Callable[[str], None]
"""Takes a line for the user."""


def new_service(command: Command) -> Service:
    """Return a service of a local group, which `Services.add` starts."""
    return Service(command, RestartPauses(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S))


class Healing:
    """Restarts the services of a running group, within limits."""

    def __init__(self, services: Services, *, limits: RecoverySpec, report: Report) -> None:
        self._services = services
        self._limits = limits
        self._report = report
        self._budget = RestartBudget(max_restarts=limits.max_restarts, window_s=limits.window_seconds)

    def handle(self, ended: Sequence[Child]) -> bool:
        """Schedule restarts of children that ended, kill what hangs, start what is due.

        Returns whether a service ended or was started. Raises ProcessDiedError or RestartsExhaustedError when the group
        must end.
        """
        served = {child: service for child in ended if (service := self._services.find(child)) is not None}
        for child in sorted(served, key=lambda child: child.failed_permanently, reverse=True):
            self._schedule_restart(served[child], child)
        for child, why in self._services.kill_hung():
            self._report(f"{child.name} (pid {child.pid}) {why}; it is killed")
        return bool(self._services.start_due(on_error=self._try_later) or served)

    def _try_later(self, service: Service, error: OSError) -> None:
        """Plan another start of a service that the system has no process, memory or log for now."""
        pause_s = self._services.schedule_restart(service, did_well=False)
        when = f"in {pause_s:g} s" if pause_s else "at once"
        self._report(f"{service.name} cannot be started: {error}; it is tried again {when}")

    def _schedule_restart(self, service: Service, child: Child) -> None:
        if child.failed_permanently:
            raise died(child)
        if not self._budget.spend():
            raise self._exhausted(child)
        beat = child.beat()
        did_well = beat.steps > 0 if beat is not None else time.monotonic() - service.started_s >= RAN_WELL_S
        pause_s = self._services.schedule_restart(service, did_well=did_well)
        when = f" in {pause_s:g} s" if pause_s else ""
        self._report(f"{child.name} (pid {child.pid}) {how_it_ended(child)}; it is restarted{when}")

    def _exhausted(self, child: Child) -> RestartsExhaustedError:
        return RestartsExhaustedError(
            f"{child.name} {how_it_ended(child)}, and processes of the group were restarted "
            f"{self._limits.max_restarts} times within {self._limits.window_seconds} s, which is all that "
            f"spec.recovery.maxRestarts allows; its log is {child.log_path}",
            exit_status=child.exit_status or 0,
            log_tail=log_tail(child.log_path),
        )


def how_it_ended(child: Child) -> str:
    """Return "was killed by SIGKILL", "ended with exit code 1" and the like."""
    status = child.exit_status or 0
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"


def died(child: Child) -> ProcessDiedError:
    """Return the error for a process whose end ends the group."""
    status = child.exit_status or 0
    tail = log_tail(child.log_path)
    if child.failed_permanently and tail:
        return ProcessDiedError(tail[-1], exit_status=status, permanent=True)
    return ProcessDiedError(
        f"{child.name} {how_it_ended(child)}; its log is {child.log_path}", exit_status=status, log_tail=tail
    )


def log_tail(path: Path | None) -> list[str]:
    """Return the last lines of a log; [] if it cannot be read."""
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-LOG_TAIL_LINES:]

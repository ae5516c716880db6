"""What becomes of the processes of a running group when they end or hang: they are started anew.

    ends, permanently (exit codes 2, 3)   everything ends
    ends otherwise                        is started anew: at once, or after a pause if it could not get up (`restarts`)
    hangs, or is frozen                   is killed, which ends it
    ends once too often                   everything ends

The budget is the resource's: spec.recovery.maxRestarts within windowSeconds, over all processes of the group. A gateway
is started on the ports that it had; ranks and clients find it there by themselves.

A rank is started by itself or, which is quicker, forked by the group's forkserver (`forkserver.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from hetero_api.host.restarts import RestartBudget, RestartPauses
from hetero_client.launcher.failures import died, exhausted, how_it_ended, is_permanent
from hetero_client.launcher.forkserver import Forkserver
from hetero_client.launcher.supervisor import Child, Command, Supervisor

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
RAN_WELL_S: Final = 60.0
"""A process without a heartbeat did well when it ran for so long; a rank when it did a step."""

Report = Callable[[str], None]


@dataclass(slots=True)
class Service:
    """A process that is to run: how it is started, and the present one."""

    command: Command
    child: Child
    started_s: float
    pauses: RestartPauses = field(
        default_factory=lambda: RestartPauses(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
    )
    due_s: float = 0.0
    """When it is to be started; of no meaning while it runs."""

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def is_running(self) -> bool:
        return self.child.exit_status is None


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """spec.recovery's."""

    max_restarts: int
    window_s: float


class Healing:
    """See the module. `report` is told what was done, in lines for a person."""

    def __init__(
        self,
        supervisor: Supervisor,
        services: Sequence[Service],
        *,
        limits: RestartLimits,
        report: Report,
        forkserver: Forkserver | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.services = tuple(services)
        self._supervisor = supervisor
        self._limits = limits
        self._report = report
        self._forkserver = forkserver
        self._clock = clock
        self._budget = RestartBudget(max_restarts=limits.max_restarts, window_s=limits.window_s, clock=clock)

    @property
    def all_run(self) -> bool:
        return all(service.is_running for service in self.services)

    @property
    def pids(self) -> dict[str, int]:
        """By name; of one that waits for its next start, that of the last."""
        return {service.name: service.child.pid for service in self.services}

    def heal(self, ended: Sequence[Child]) -> bool:
        """What is to be done about children that ended, and now; whether anything was started.

        Raises ProcessDiedError or RestartsExhaustedError when the group is to end.
        """
        for child in sorted(ended, key=is_permanent, reverse=True):
            self._bury(child)
        self._kill_hung()
        return self._start_due()

    def pause_s(self, longest_s: float) -> float:
        """Until the next start, at most so long."""
        due_s = [service.due_s for service in self.services if not service.is_running]
        return max(0.0, min([longest_s, *(due - self._clock() for due in due_s)]))

    def prepare(self) -> None:
        """The group is well: prepare for when it is not."""
        if self._forkserver is not None:
            self._forkserver.prepare()

    def _bury(self, child: Child) -> None:
        for service in self.services:
            if service.child is child:
                self._plan_restart(service)

    def _plan_restart(self, service: Service) -> None:
        child = service.child
        if is_permanent(child):
            raise died(child)
        if not self._budget.spend():
            raise exhausted(child, max_restarts=self._limits.max_restarts, window_s=self._limits.window_s)
        pause_s = service.pauses.next_pause_s(did_well=self._did_well(service))
        service.due_s = self._clock() + pause_s
        when = f" in {pause_s:g} s" if pause_s else ""
        self._report(f"{service.name} (pid {child.pid}) {how_it_ended(child)}; it is started anew{when}")

    def _did_well(self, service: Service) -> bool:
        beat = service.child.beat()
        return beat.steps > 0 if beat is not None else self._clock() - service.started_s >= RAN_WELL_S

    def _kill_hung(self) -> None:
        now_s = self._clock()
        for child in list(self._supervisor.alive):
            if why := child.hung(now_s):
                self._report(f"{child.name} (pid {child.pid}) {why}; it is killed")
                child.kill()

    def _start_due(self) -> bool:
        now_s = self._clock()
        due = [service for service in self.services if not service.is_running and service.due_s <= now_s]
        for service in due:
            service.child, service.started_s = self._successor(service.command), now_s
        return bool(due)

    def _successor(self, command: Command) -> Child:
        forked = self._forkserver.fork(command) if self._forkserver is not None and command.has_heartbeat else None
        return forked or self._supervisor.start(command)

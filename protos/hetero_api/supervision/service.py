"""Processes that have to run: the present child of each, and when the next one is started."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_api.host.heartbeat import Beat
from hetero_api.host.restarts import RestartPauses
from hetero_api.supervision.child import Child, Command
from hetero_api.supervision.forkserver import Forkserver
from hetero_api.supervision.supervisor import Supervisor


@dataclass(slots=True)
class Service:
    """A process that has to run. `beat`, `is_running` and `restarts` may be read from any thread."""

    command: Command
    pauses: RestartPauses
    child: Child | None = None
    """The present process, or the last one; None before the first start."""
    started_s: float = 0.0
    due_s: float = 0.0
    """Monotonic time of the next start, while it does not run."""
    restarts: int = 0

    @property
    def name(self) -> str:
        """Name of the process."""
        return self.command.name

    @property
    def is_running(self) -> bool:
        """Whether the process runs, or its end has not been seen."""
        return self.child is not None and self.child.is_running

    def beat(self) -> Beat | None:
        """Return the heartbeat of the running process; None while it does not run or has none."""
        child = self.child
        return child.beat() if child is not None and child.is_running else None


class Services:
    """All services of one supervisor. A service is forked if that is possible, and started directly otherwise."""

    def __init__(
        self,
        supervisor: Supervisor,
        forkserver: Forkserver | None = None,
        *,
        services: Sequence[Service] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.all = list(services)
        self._supervisor = supervisor
        self._forkserver = forkserver
        self._clock = clock

    def add(self, service: Service) -> None:
        """Start a further service. Raises OSError."""
        self._start(service)
        self.all.append(service)

    def start_due(self, *, on_error: Callable[[Service, OSError], None] | None = None) -> list[Service]:
        """Start the services whose time has come, and return them.

        `on_error` plans the next start of one that cannot be started; without it, raises OSError.
        """
        now_s = self._clock()
        due = [service for service in self.all if not service.is_running and service.due_s <= now_s]
        for service in due:
            try:
                self._start(service)
            except OSError as error:
                if on_error is None:
                    raise
                on_error(service, error)
        return [service for service in due if service.is_running]

    def find(self, child: Child) -> Service | None:
        """Return the service that the child belongs to; None for another child, such as the forkserver."""
        return next((service for service in self.all if service.child is child), None)

    def schedule_restart(self, service: Service, *, did_well: bool) -> float:
        """Plan the next start of a service that ended, and return the seconds until then."""
        pause_s = service.pauses.next_pause_s(did_well=did_well)
        service.due_s = self._clock() + pause_s
        service.restarts += 1
        return pause_s

    def seconds_to_next_start(self, longest_s: float) -> float:
        """Return the seconds until a start is due, from 0 to `longest_s`."""
        due_s = [service.due_s for service in self.all if not service.is_running]
        return max(0.0, min([longest_s, *(due - self._clock() for due in due_s)]))

    def kill_hung(self) -> list[tuple[Child, str]]:
        """Kill children that hang or are frozen; return each with the reason."""
        now_s = self._clock()
        hung = [(child, why) for child in self._supervisor.children if (why := child.why_hung(now_s))]
        for child, _ in hung:
            child.kill()
        return hung

    def _start(self, service: Service) -> None:
        forked = self._forkserver.fork(service.command) if self._forkserver is not None else None
        service.child = forked or self._supervisor.start(service.command)
        service.started_s = self._clock()

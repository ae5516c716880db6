"""The forkserver, seen from its supervisor: ranks and successors of lost ranks without the seconds of a start.

It is one process (`hetero_worker.process.forkserver`) that imports what a rank needs, once for all ranks, and forks a
rank for every order on its standard input. Ranks share the imported memory. A rank can always be started directly
instead, which only takes longer. A forkserver that dies is started again, a few times.
"""

from __future__ import annotations

import json
import os
import select
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Final

from hetero_api.contract import ENV_HEARTBEAT_FILE
from hetero_api.host.heartbeat import HeartbeatMemory
from hetero_api.supervision.child import Child, Command, Output
from hetero_api.supervision.supervisor import Supervisor

READY: Final = "ready"
"""The forkserver's first line."""
TRIES: Final = 3
ANSWER_S: Final = 2.0
"""Longest wait for a fork, which takes milliseconds."""


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """A rank to be forked."""

    arguments: list[str]
    """The rank's command line, without the program."""
    environment: dict[str, str]
    """Variables in addition to the forkserver's own."""
    log: str
    """File that the rank's output is appended to."""
    adopter: int
    """Pid of the process that becomes its parent."""
    death_signal: int
    """Signal that the rank gets when the adopter dies."""

    @classmethod
    def from_json(cls, line: str) -> ForkOrder:
        """Parse a line that `to_json` made."""
        return cls(**json.loads(line))

    def to_json(self) -> str:
        """Return the order as one line."""
        return json.dumps(asdict(self))


class Forkserver:
    """Starts the forkserver process and has it fork ranks."""

    def __init__(self, supervisor: Supervisor, command: Command) -> None:
        self._supervisor = supervisor
        self._command = command
        self._child: Child | None = None
        self._orders: IO[bytes] | None = None
        self._answers: IO[bytes] | None = None
        self._is_ready = False
        self._tries = 0

    def ensure_started(self) -> None:
        """Start the process unless it runs or has been tried TRIES times."""
        if self._child is not None and not self._child.is_running:
            self._clear()
        if self._child is None and self._tries < TRIES:
            self._tries += 1
            self._child, self._orders, self._answers = self._supervisor.start_with_pipes(self._command)

    @property
    def is_warming_up(self) -> bool:
        """Return whether it runs and is not ready yet."""
        return self._child is not None and self._child.is_running and not self._check_ready()

    def fork(self, command: Command) -> Child | None:
        """Fork a rank; None if the command cannot be forked, or the forkserver is not ready or does not answer."""
        if command.forked_argv is None or not self._check_ready():
            return None
        heartbeat = HeartbeatMemory()
        output = Output() if command.log_path is None else None
        log = output.path if output is not None else str(command.log_path)
        pid = self._order(
            ForkOrder(
                arguments=list(command.forked_argv),
                environment={ENV_HEARTBEAT_FILE: heartbeat.path_from_outside},
                log=log,
                adopter=os.getpid(),
                death_signal=int(self._supervisor.death_signal),
            )
        )
        if pid is not None:
            return self._supervisor.adopt(command, pid, heartbeat, output)
        heartbeat.release()
        if output is not None:
            output.close(lambda _: None)
        return None

    def _check_ready(self) -> bool:
        if self._child is None or not self._child.is_running:
            return False
        self._is_ready = self._is_ready or self._answer(0.0) == READY
        return self._is_ready

    def _order(self, order: ForkOrder) -> int | None:
        try:
            if self._orders is not None:
                self._orders.write(order.to_json().encode() + b"\n")
                self._orders.flush()
            return int(self._answer(ANSWER_S))
        except (OSError, ValueError):
            # Kill it: a rank that it still forks would be a second one in its place. It may have told of one by now.
            if self._child is not None:
                self._child.kill()
            pid = self._answer(ANSWER_S)
            return int(pid) if pid.isdecimal() else None

    def _answer(self, timeout_s: float) -> str:
        """Return the next line; "" if there is none in time."""
        if self._answers is None or not select.select([self._answers], [], [], timeout_s)[0]:
            return ""
        return self._answers.readline().decode().strip()

    def _clear(self) -> None:
        for pipe in (self._orders, self._answers):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._child = self._orders = self._answers = None
        self._is_ready = False

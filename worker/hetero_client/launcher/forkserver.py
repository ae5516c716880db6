"""The forkserver of a group: where its ranks come from, and successors of lost ones without the seconds of a start.

It is one process (hetero_worker's forkserver), which imports what a rank needs while the gateway starts, once for all
ranks, and is told over its standard input to fork one. What it has loaded they share with it. Whatever it cannot do, a
rank that is started by itself can: it is a matter of time only. A forkserver that dies is begun again, some times.
"""

from __future__ import annotations

import json
import os
import select
from contextlib import suppress
from typing import IO, Final

from hetero_api.contract import ENV_HEARTBEAT_FILE
from hetero_api.host.heartbeat import HeartbeatMemory
from hetero_client.launcher.commands import GroupCommands
from hetero_client.launcher.supervisor import Child, Command, Supervisor

TRIES: Final = 3
ANSWER_S: Final = 2.0
"""Longest wait for a fork, which takes milliseconds."""


class Forkserver:
    """See the module."""

    def __init__(self, supervisor: Supervisor, commands: GroupCommands) -> None:
        self._supervisor = supervisor
        self._commands = commands
        self._child: Child | None = None
        self._orders: IO[bytes] | None = None
        self._answers: IO[bytes] | None = None
        self._is_ready = False
        self._tries = 0

    def prepare(self) -> None:
        """Begin one, if there is none."""
        if self._child is not None and self._child.exit_status is not None:
            self._forget()
        if self._child is None and self._tries < TRIES:
            self._tries += 1
            self._child, self._orders, self._answers = self._supervisor.start_servant(self._commands.forkserver())

    @property
    def is_coming(self) -> bool:
        """It runs, and is not ready yet."""
        return self._runs and not self._await_readiness()

    def fork(self, command: Command) -> Child | None:
        """A rank of that command; None if there is no forkserver, or not yet."""
        if not self._await_readiness():
            return None
        heartbeat = HeartbeatMemory()
        pid = self._order(command, heartbeat)
        if pid is None:
            heartbeat.release()
            return None
        return self._supervisor.adopt(command, pid, heartbeat)

    @property
    def _runs(self) -> bool:
        return self._child is not None and self._child.exit_status is None

    def _await_readiness(self) -> bool:
        if not self._runs:
            return False
        self._is_ready = self._is_ready or self._answer(0.0) == "ready"
        return self._is_ready

    def _order(self, command: Command, heartbeat: HeartbeatMemory) -> int | None:
        order = {
            "arguments": self._commands.arguments(command),
            "environment": {ENV_HEARTBEAT_FILE: heartbeat.path_from_outside},
            "log": str(command.log_path),
            "adopter": os.getpid(),
        }
        try:
            if self._orders is not None:
                self._orders.write(json.dumps(order).encode() + b"\n")
                self._orders.flush()
            return int(self._answer(ANSWER_S))
        except (OSError, ValueError):
            # It is no good any more: what it might still fork would find another in its place.
            if self._child is not None:
                self._child.kill()
            return None

    def _answer(self, timeout_s: float) -> str:
        """The next line; "" if there is none in time."""
        if self._answers is None or not select.select([self._answers], [], [], timeout_s)[0]:
            return ""
        return self._answers.readline().decode().strip()

    def _forget(self) -> None:
        for pipe in (self._orders, self._answers):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._child = self._orders = self._answers = None
        self._is_ready = False

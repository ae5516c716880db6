"""A rank pod's supervisor with small stand-ins for its ranks, so that its promises can be tested in milliseconds.

    python -m tests.support.stand_in_pod direct|forking GRACE_S BEHAVIOUR [BEHAVIOUR ...]    one rank each
    python -m tests.support.stand_in_pod rank N BEHAVIOUR
    python -m tests.support.stand_in_pod forkserver

Ranks of a forking pod come from a forkserver.

A stand-in says "rank N runs as PID" and does as it is told: "serve" until SIGTERM, "ignore-term", "exit:CODE:LINES"
(lines separated by "|"), "exit-once:CODE" (serves when it is started again), "out-of-memory" (is killed as the kernel
kills for want of memory), "orphan" (leaves a process without a parent, which says "orphan PID of rank N" and soon ends,
and serves).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero_api.host.heartbeat import Heartbeat, RankState
from hetero_api.host.stop_signals import StopSignals
from hetero_api.supervision.child import Command
from hetero_worker.pod.supervisor import PodSupervisor
from hetero_worker.process.forkserver import serve

KILLS = "memory-kills"


def supervise(grace_s: float, behaviours: list[str], *, forks: bool) -> int:
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(message)s")
    program = (sys.executable, "-m", "tests.support.stand_in_pod")
    commands = [
        Command(str(number), (*program, *arguments), has_heartbeat=True, forked_argv=arguments)
        for number, behaviour in enumerate(behaviours)
        for arguments in [("rank", str(number), behaviour)]
    ]
    with tempfile.TemporaryDirectory() as folder, StopSignals() as signals:
        kills = Path(folder) / KILLS
        return PodSupervisor(
            commands,
            environment={**os.environ, "STAND_IN_FOLDER": folder},
            signals=signals,
            stop_grace_s=grace_s,
            forkserver=Command("forkserver", (*program, "forkserver"), takes_orders=True) if forks else None,
            first_pause_s=0.02,
            longest_pause_s=0.08,
            count_memory_kills=lambda: int(kills.exists()),
        ).run()


def be(arguments: Sequence[str], _: Mapping[str, str]) -> int:
    return be_a_rank(int(arguments[1]), arguments[2])


def be_a_rank(number: int, behaviour: str) -> int:
    leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if behaviour == "ignore-term" else leave.set())
    heartbeat = Heartbeat.open(Path(os.environ["HETERO_HEARTBEAT_FILE"]))
    heartbeat.keep_pulse()
    heartbeat.enter(RankState.SERVING, epoch=1)
    print(f"rank {number} runs as {os.getpid()}", flush=True)
    kind, _, rest = behaviour.partition(":")
    before = Path(os.environ["STAND_IN_FOLDER"]) / f"ran-{number}"
    if kind == "exit" or (kind == "exit-once" and not before.exists()):
        before.touch()
        code, _, lines = rest.partition(":")
        print(lines.replace("|", "\n"), file=sys.stderr, flush=True)
        return int(code)
    if kind == "out-of-memory":
        before.with_name(KILLS).touch()  # the kernel counts, then kills
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "orphan":
        leave_an_orphan(number)
    leave.wait()
    print(f"rank {number} leaves", flush=True)
    return 0


def leave_an_orphan(number: int) -> None:
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:
            print(f"orphan {os.getpid()} of rank {number}", flush=True)
            time.sleep(0.1)
        os._exit(0)
    os.waitpid(parent, 0)


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "forkserver":
        serve(be, orders=sys.stdin, answers=sys.stdout)
    elif kind == "rank":
        sys.exit(be(sys.argv[1:], os.environ))
    else:
        sys.exit(supervise(float(rest[0]), rest[1:], forks=kind == "forking"))

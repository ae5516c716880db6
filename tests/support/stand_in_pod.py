"""A rank pod's supervisor with small stand-ins for its ranks, so that its promises can be tested in milliseconds.

    python -m tests.support.stand_in_pod GRACE_S BEHAVIOUR [BEHAVIOUR ...]    one rank each
    python -m tests.support.stand_in_pod rank N BEHAVIOUR

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
from pathlib import Path

from hetero_api.host.heartbeat import Heartbeat, Standing
from hetero_api.host.restarts import RestartPauses
from hetero_api.host.stop_signals import StopSignals
from hetero_worker.pod.rank_process import RankProcess
from hetero_worker.pod.supervisor import PodSupervisor

KILLS = "memory-kills"


def supervise(grace_s: float, behaviours: list[str]) -> int:
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder, StopSignals() as signals:
        ranks = [
            RankProcess(
                number,
                argv=(sys.executable, "-m", "tests.support.stand_in_pod", "rank", str(number), behaviour),
                environment={**os.environ, "STAND_IN_FOLDER": folder},
                pauses=RestartPauses(first_s=0.02, longest_s=0.08),
            )
            for number, behaviour in enumerate(behaviours)
        ]
        kills = Path(folder) / KILLS
        return PodSupervisor(
            ranks, signals=signals, stop_grace_s=grace_s, count_memory_kills=lambda: int(kills.exists())
        ).run()


def be_a_rank(number: int, behaviour: str) -> int:
    leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if behaviour == "ignore-term" else leave.set())
    heartbeat = Heartbeat.open(Path(os.environ["HETERO_HEARTBEAT_FILE"]))
    heartbeat.keep_pulse()
    heartbeat.stand(Standing.SERVING, epoch=1)
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
    if sys.argv[1] == "rank":
        sys.exit(be_a_rank(int(sys.argv[2]), sys.argv[3]))
    sys.exit(supervise(float(sys.argv[1]), sys.argv[2:]))

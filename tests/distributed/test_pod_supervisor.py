"""What a rank pod's supervisor promises about processes, with stand-ins for the ranks."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hetero_api.contract import EXIT_OK, EXIT_PERMANENT, EXIT_USAGE
from tests.support.local_group import alive, wait_for

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 30.0
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")
"""Where the supervisor is the first process, as in a container."""
MODES = pytest.mark.parametrize("mode", ["direct", "forking"])
"""How ranks are started: each by itself, or by the pod's forkserver."""
_RUNS = re.compile(r"rank (\d) runs as (\d+)")


class Pod:
    """A supervisor as a process, and all that it has written."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def pids(self, rank: int) -> list[int]:
        """Of every start of a rank, in order."""
        found = [_RUNS.search(line) for line in list(self.lines)]
        return [int(match.group(2)) for match in found if match and int(match.group(1)) == rank]

    def until_started(self, rank: int, *, times: int = 1) -> int:
        wait_for(lambda: len(self.pids(rank)) >= times, PATIENCE_S, lambda: "\n".join(self.lines))
        return self.pids(rank)[-1]

    def first(self) -> psutil.Process:
        """The supervisor: what was started, or its only child where that made a namespace."""
        started = psutil.Process(self.process.pid)
        return started.children()[0] if started.name() == "unshare" else started

    def is_forked(self, pid: int) -> bool:
        """Whether a child of the supervisor came from the forkserver, whose command line it has then."""
        process = psutil.Process(pid)
        assert process.ppid() == self.first().pid
        return process.cmdline()[-1] == "forkserver"

    def exit_code(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def left_over(self) -> list[int]:
        return [pid for rank in range(2) for pid in self.pids(rank) if alive(pid)]


def needs(wrapper: tuple[str, ...]) -> None:
    if subprocess.run([*wrapper, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("a namespace of processes cannot be made here")


@contextmanager
def pod(*behaviours: str, grace_s: float = 20.0, wrapper: tuple[str, ...] = (), mode: str = "direct") -> Iterator[Pod]:
    process = subprocess.Popen(
        [*wrapper, sys.executable, "-m", "tests.support.stand_in_pod", mode, str(grace_s), *behaviours],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Pod(process)
        finally:
            process.kill()


@MODES
def test_a_rank_that_dies_is_restarted_and_its_neighbour_is_left_alone(mode: str) -> None:
    with pod("exit-once:1", "serve", mode=mode) as running:
        running.until_started(0, times=2)
        neighbour = running.until_started(1)
        assert running.is_forked(neighbour) == (mode == "forking")
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == EXIT_OK
    assert running.pids(1) == [neighbour]
    assert "local_rank=0 ended with exit code 1; restarting it in 0 s" in running.lines


@pytest.mark.parametrize(("code", "mode"), [(EXIT_PERMANENT, "direct"), (EXIT_USAGE, "forking")])
def test_what_a_restart_cannot_cure_ends_the_pod_with_the_ranks_last_lines(code: int, mode: str) -> None:
    with pod("serve", f"exit:{code}:Traceback|ModelError: model.safetensors: is cut short", mode=mode) as running:
        assert running.exit_code() == code
        assert running.left_over() == []
    told = running.lines.index(f"local_rank=1 ended with exit code {code}, and this container with it:")
    assert running.lines[told + 2 :] == ["Traceback", "ModelError: model.safetensors: is cut short"]


def test_a_rank_that_dies_again_and_again_ends_the_pod_with_its_exit_code() -> None:
    with pod("exit:7:out of luck") as running:
        assert running.exit_code() == 7
    assert len(set(running.pids(0))) == 5  # twice at once, then after 0.02, 0.04 and 0.08 s
    assert running.lines[-1] == "out of luck"


def test_a_killed_rank_is_restarted() -> None:
    with pod("serve", "serve", mode="forking") as running:
        subprocess.run(["kill", "-KILL", str(running.until_started(1))], check=True)
        running.until_started(1, times=2)
        assert running.pids(0) == [running.until_started(0)]
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == EXIT_OK
    assert "local_rank=1 ended with exit code 137; restarting it in 0 s" in running.lines


def test_a_rank_that_wanted_too_much_memory_ends_the_pod_which_says_so_last() -> None:
    with pod("serve", "out-of-memory") as running:
        assert running.exit_code() == 128 + signal.SIGKILL
        assert running.left_over() == []
    assert len(running.pids(1)) == 1
    assert running.lines[-1].startswith("local_rank=1 was killed by the kernel: the ranks of this pod took more memory")


def test_a_frozen_rank_is_killed_and_restarted() -> None:
    with pod("serve", "serve") as running:
        neighbour = running.until_started(0)
        subprocess.run(["kill", "-STOP", str(running.until_started(1))], check=True)
        running.until_started(1, times=2)
        assert running.pids(0) == [neighbour]
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == EXIT_OK
    assert any(re.fullmatch(r"local_rank=1 has been frozen for \d\.\d s; killing it", line) for line in running.lines)


def test_without_its_forkserver_a_rank_is_started_directly() -> None:
    with pod("serve", "serve", mode="forking") as running:
        rank = running.until_started(0)
        running.until_started(1)
        (forkserver,) = (
            child for child in running.first().children() if child.pid not in running.pids(0) + running.pids(1)
        )
        forkserver.send_signal(signal.SIGSTOP)  # it takes no orders any more
        psutil.Process(rank).kill()
        assert not running.is_forked(running.until_started(0, times=2))
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == EXIT_OK
    assert "forkserver ended with exit code 137" in running.lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_are_asked_to_leave_when_the_pod_is(number: signal.Signals) -> None:
    with pod("serve", "serve") as running:
        running.until_started(0)
        running.until_started(1)
        running.process.send_signal(number)
        assert running.exit_code() == EXIT_OK
        assert running.left_over() == []
    assert {"rank 0 leaves", "rank 1 leaves"} <= set(running.lines)


def test_a_rank_that_does_not_leave_is_killed_after_the_grace_time() -> None:
    with pod("ignore-term", "serve", grace_s=0.3) as running:
        running.until_started(0)
        running.until_started(1)
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == EXIT_OK
        assert running.left_over() == []
    assert "rank 1 leaves" in running.lines


def test_a_second_signal_does_not_wait_for_the_grace_time() -> None:
    with pod("ignore-term", grace_s=600) as running:
        running.until_started(0)
        began_s = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        wait_for(lambda: any("asking the ranks" in line for line in running.lines), PATIENCE_S, lambda: "")
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == EXIT_OK
        assert time.monotonic() - began_s < 20
        assert running.left_over() == []


@pytest.mark.parametrize("wrapper", [(), NAMESPACE], ids=["among others", "first process"])
def test_a_process_that_lost_its_parent_is_waited_for_and_no_rank_is_missed_over_it(wrapper: tuple[str, ...]) -> None:
    needs(wrapper)
    with pod("orphan", "serve", wrapper=wrapper) as running:
        running.until_started(0)
        running.until_started(1)
        wait_for(lambda: any("orphan" in line for line in running.lines), PATIENCE_S, lambda: str(running.lines))
        first = running.first()

        def only_ranks() -> bool:
            return len(first.children(recursive=True)) == 2

        wait_for(only_ranks, PATIENCE_S, lambda: str(first.children(recursive=True)))
        min(first.children(), key=lambda child: child.create_time()).kill()
        wait_for(lambda: any("exit code 137" in line for line in running.lines), PATIENCE_S, lambda: str(running.lines))
        wait_for(only_ranks, PATIENCE_S, lambda: str(first.children(recursive=True)))
        first.send_signal(signal.SIGTERM)
        assert running.exit_code() == EXIT_OK


@MODES
def test_no_rank_outlives_a_supervisor_that_is_killed(mode: str) -> None:
    with pod("ignore-term", "serve", mode=mode) as running:
        running.until_started(0)
        running.until_started(1)
        running.process.kill()
        running.exit_code()
        wait_for(lambda: not running.left_over(), PATIENCE_S, lambda: str(running.left_over()))

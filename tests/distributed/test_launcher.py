"""The local launcher's promises about processes, with small stand-ins for gateway and ranks.

Whatever happens, and however the launcher ends, no process of a group stays behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hetero_api.contract import EXIT_FAILURE, EXIT_OK, EXIT_PERMANENT, EXIT_USAGE
from hetero_client.home import HeteroHome
from hetero_client.launcher.run_directory import GroupRecord, RunDirectory, running_groups

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

REPOSITORY = Path(__file__).parents[2]
MANIFEST = """
apiVersion: heteroinference.io/v1alpha1
kind: HeteroInference
metadata: {name: stand-in}
spec:
  model: {uri: "file:///nowhere"}
  pools: [{name: cpu, type: CPU, ranks: 2, cpu: {coresPerRank: 1, memoryPerRank: 1Gi}}]
  recovery: {rendezvousTimeoutSeconds: 5}
"""
PATIENCE_S = 30.0


class Launcher:
    """One launcher process in a home folder of its own, and the processes that it was seen to have."""

    def __init__(self, folder: Path) -> None:
        self.home = HeteroHome(folder / "home")
        self.run = RunDirectory.of(self.home, "stand-in")
        self.manifest = folder / "manifest.yaml"
        self.manifest.write_text(MANIFEST, encoding="utf-8")
        self.process: subprocess.Popen[str] | None = None
        self.seen: set[int] = set()

    def start(self, *, port: int = 0, prompt: str | None = None, **environment: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "tests.support.stand_in_up", str(self.manifest), str(port)]
        self.process = subprocess.Popen(
            argv if prompt is None else [*argv, prompt],
            cwd=REPOSITORY,
            env={**os.environ, "HETERO_HOME": str(self.home.root), "PYTHONPATH": str(REPOSITORY), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def until_ready(self) -> GroupRecord:
        self.wait_for(lambda: (record := self.run.read_record()) is not None and record.phase == "ready")
        record = self.run.read_record()
        assert record is not None
        self.see()
        return record

    def see(self) -> None:
        """Remember the launcher's processes: gateway, ranks, warden."""
        assert self.process is not None
        self.seen |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, self.end()
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.02)

    def left_over(self) -> list[int]:
        return [pid for pid in self.seen if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    if launcher.process is not None and launcher.process.poll() is None:
        launcher.process.kill()
        launcher.process.communicate()
    for pid in launcher.left_over():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_once_ready_stops_everything_and_exits_0(launcher: Launcher, number: signal.Signals) -> None:
    process = launcher.start()
    record = launcher.until_ready()
    assert len(launcher.seen) == 4
    assert [group.name for group in running_groups(launcher.home)] == ["stand-in"]
    began_s = time.monotonic()
    process.send_signal(number)
    code, _, err = launcher.end()
    assert (code, launcher.left_over()) == (EXIT_OK, [])
    assert time.monotonic() - began_s < 5
    assert f"ready: {record.inference}" in err
    assert "cpu-1: ready" in err
    assert running_groups(launcher.home) == []
    assert not launcher.run.token_path.exists()


def test_ranks_get_their_place_cores_and_memory(launcher: Launcher) -> None:
    process = launcher.start()
    launcher.until_ready()
    mode = launcher.run.token_path.stat().st_mode & 0o777
    log = launcher.run.log_path("cpu-1").read_text(encoding="utf-8")
    process.send_signal(signal.SIGINT)
    launcher.end()
    assert mode == 0o600
    assert "--pool cpu --ordinal 1 --local-rank 0 --pod-name cpu-1 --cores 1 --num-threads 1" in log
    assert f"--numa-policy BestEffort --memory-bytes {2**30}" in log


def test_signal_before_ready_exits_130(launcher: Launcher) -> None:
    process = launcher.start(STAND_IN_GATEWAY="never-ready")
    launcher.wait_for(launcher.run.record_path.exists)
    launcher.see()
    process.send_signal(signal.SIGINT)
    code, _, err = launcher.end()
    assert (code, launcher.left_over()) == (128 + signal.SIGINT, [])
    assert "interrupted" in err


def test_killed_rank_ends_the_group_and_is_named(launcher: Launcher) -> None:
    launcher.start()
    record = launcher.until_ready()
    os.kill(record.processes["cpu-1"], signal.SIGKILL)
    code, _, err = launcher.end()
    assert (code, launcher.left_over()) == (EXIT_FAILURE, [])
    assert "cpu-1 was killed by SIGKILL" in err


def test_rank_that_ends_shows_its_last_lines(launcher: Launcher) -> None:
    launcher.start(STAND_IN_RANKS="cpu-0=exit:1")
    code, _, err = launcher.end()
    assert code == EXIT_FAILURE
    assert "cpu-0 ended with exit code 1" in err
    assert "| ERROR the stand-in rank was told to end" in err


def test_permanent_failure_prints_the_reason_alone(launcher: Launcher) -> None:
    launcher.start(STAND_IN_RANKS="cpu-0=fail:model.safetensors: is cut short")
    code, _, err = launcher.end()
    assert code == EXIT_PERMANENT
    assert err.splitlines()[-1] == "hetero: model.safetensors: is cut short"


def test_gateway_with_a_permanent_error_prints_its_last_line(launcher: Launcher) -> None:
    launcher.start(STAND_IN_GATEWAY="exit:3")
    code, _, err = launcher.end()
    assert code == EXIT_PERMANENT
    assert err.splitlines()[-1] == "hetero: ERROR the stand-in gateway was told to end"


def test_group_that_never_gets_ready_ends_in_time(launcher: Launcher) -> None:
    launcher.start(STAND_IN_GATEWAY="never-ready")
    code, _, err = launcher.end()
    assert code == EXIT_FAILURE
    assert "not ready within 5 s (spec.recovery.rendezvousTimeoutSeconds)" in err


def test_processes_that_ignore_sigterm_are_killed(launcher: Launcher) -> None:
    process = launcher.start(STAND_IN_GATEWAY="ignore-term", STAND_IN_RANKS="cpu-1=hang")
    launcher.until_ready()
    process.send_signal(signal.SIGINT)
    code, _, _ = launcher.end()
    assert (code, launcher.left_over()) == (EXIT_OK, [])


def test_second_signal_does_not_wait_for_the_grace_time(launcher: Launcher) -> None:
    process = launcher.start(STAND_IN_GATEWAY="ignore-term", STAND_IN_RANKS="cpu-1=hang")
    launcher.until_ready()
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    launcher.end()
    assert time.monotonic() - began_s < 2.5
    assert launcher.left_over() == []


def test_nothing_survives_a_killed_launcher(launcher: Launcher) -> None:
    process = launcher.start(STAND_IN_GATEWAY="ignore-term", STAND_IN_RANKS="cpu-1=hang")
    launcher.until_ready()
    assert len(launcher.seen) == 4
    process.kill()
    process.communicate()
    deadline = time.monotonic() + PATIENCE_S
    while launcher.left_over():
        assert time.monotonic() < deadline, launcher.left_over()
        time.sleep(0.05)
    assert running_groups(launcher.home) == []


def test_second_launcher_of_one_name_is_told_the_pid(launcher: Launcher) -> None:
    first = launcher.start()
    launcher.until_ready()
    launcher.process = None
    second = launcher.start()
    code, _, err = launcher.end()
    assert code == EXIT_USAGE
    assert f"group 'stand-in' is running already (pid {first.pid})" in err
    assert second.pid != first.pid
    launcher.process = first
    launcher.until_ready()  # The first one's files are untouched.
    first.send_signal(signal.SIGINT)
    assert launcher.end()[0] == EXIT_OK


def test_taken_port_is_told(launcher: Launcher) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        launcher.start(port=port)
        code, _, err = launcher.end()
    assert code == EXIT_USAGE
    assert f"port {port} on 127.0.0.1 cannot be used" in err


def test_run_streams_one_answer_and_leaves_nothing(launcher: Launcher) -> None:
    launcher.start(prompt="echo hello world")
    code, out, err = launcher.end()
    assert code == EXIT_OK, err
    answer, figures = out.splitlines()
    assert answer == "hello world "
    assert figures.startswith("prompt 3 tokens (1 cached) · output 2 tokens · first token ")
    assert "load to first token" in figures
    assert running_groups(launcher.home) == []


def test_run_ends_when_a_rank_dies_during_the_answer(launcher: Launcher) -> None:
    launcher.start(prompt="hang")
    record = launcher.until_ready()
    os.kill(record.processes["cpu-0"], signal.SIGKILL)
    code, _, err = launcher.end()
    assert (code, launcher.left_over()) == (EXIT_FAILURE, [])
    assert "cpu-0 was killed by SIGKILL" in err


def test_run_is_interrupted_by_a_signal(launcher: Launcher) -> None:
    process = launcher.start(prompt="hang")
    launcher.until_ready()
    process.send_signal(signal.SIGINT)
    code, _, _ = launcher.end()
    assert (code, launcher.left_over()) == (128 + signal.SIGINT, [])

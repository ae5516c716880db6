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
from contextlib import suppress
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
  recovery: {rendezvousTimeoutSeconds: 5, windowSeconds: 60, RECOVERY}
"""
PATIENCE_S = 30.0


class Launcher:
    """One launcher process in a home folder of its own, and the processes that it was seen to have."""

    def __init__(self, folder: Path) -> None:
        self.home = HeteroHome(folder / "home")
        self.run = RunDirectory.for_group(self.home, "stand-in")
        self.manifest = folder / "manifest.yaml"
        self.process: subprocess.Popen[str] | None = None
        self.seen: set[int] = set()

    def start(
        self,
        *,
        port: int = 0,
        prompt: str | None = None,
        recovery: str = "maxRestarts: 20",
        forkserver: str = "yes",
        manifest: str = MANIFEST,
        **environment: str,
    ) -> subprocess.Popen[str]:
        self.manifest.write_text(manifest.replace("RECOVERY", recovery), encoding="utf-8")
        argv = [sys.executable, "-m", "tests.support.stand_in_up", str(self.manifest), str(port), forkserver]
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

    def until_replaced(self, name: str, before: GroupRecord) -> GroupRecord:
        """Ready again, with another process of that name."""

        def is_replaced() -> bool:
            record = self.run.read_record()
            assert record is not None
            return record.phase == "ready" and record.processes[name] != before.processes[name]

        self.wait_for(is_replaced)
        return self.until_ready()

    def forkserver(self, record: GroupRecord) -> psutil.Process:
        """The process that ranks are forked from; they have its command line."""
        (forkserver,) = (child for child in self.children("forkserver") if child.pid not in record.processes.values())
        return forkserver

    def children(self, option: str) -> list[psutil.Process]:
        """Processes of the launcher that were started with the option."""
        assert self.process is not None
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found += [child] if option in child.cmdline() else []
        return found

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
    assert len(launcher.seen) >= 4
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
    assert "--pool cpu --ordinal 1 --local-rank 0 --pod-name cpu-1 --device cpu --cores 1 " in log
    assert "--num-threads 1 " in log
    assert f"--numa-policy BestEffort --memory-bytes {2**30}" in log


GPU_MANIFEST = MANIFEST.replace(
    "pools: [", "pools: [{name: gpu, type: GPU, ranks: 2, ranksPerPod: 2, gpu: {coresPerRank: 1}}, "
)


def devices(launcher: Launcher, record: GroupRecord) -> dict[str, tuple[str, str | None]]:
    """Device and numbering of every rank, by name."""
    found = {}
    for name in record.processes.keys() - {"gateway"}:
        told = launcher.run.log_path(name).read_text(encoding="utf-8").split()
        environment = psutil.Process(record.processes[name]).environ()
        found[name] = (told[told.index("--device") + 1], environment.get("CUDA_DEVICE_ORDER"))
    return found


def test_gpu_ranks_get_devices_numbered_as_the_launcher_counts_them(launcher: Launcher) -> None:
    process = launcher.start(manifest=GPU_MANIFEST, STAND_IN_GPUS="4")
    assert devices(launcher, launcher.until_ready()) == {
        "gpu-0": ("cuda:0", "PCI_BUS_ID"), "gpu-1": ("cuda:1", "PCI_BUS_ID"),
        "cpu-0": ("cpu", "PCI_BUS_ID"), "cpu-1": ("cpu", "PCI_BUS_ID"),
    }  # fmt: skip
    process.send_signal(signal.SIGINT)
    assert launcher.end()[0] == EXIT_OK


def test_a_second_group_of_a_manifest_runs_beside_the_first_on_other_devices(launcher: Launcher) -> None:
    first = launcher.start(manifest=GPU_MANIFEST, STAND_IN_GPUS="4")
    launcher.until_ready()
    launcher.run = RunDirectory.for_group(launcher.home, "stand-in.1")
    second = launcher.start(manifest=GPU_MANIFEST, STAND_IN_GPUS="4", STAND_IN_DP="1")
    record = launcher.until_ready()
    assert [(name, device) for name, (device, _) in sorted(devices(launcher, record).items())] == [
        ("cpu-0", "cpu"), ("cpu-1", "cpu"), ("gpu-0", "cuda:2"), ("gpu-1", "cuda:3"),
    ]  # fmt: skip
    assert [group.name for group in running_groups(launcher.home)] == ["stand-in", "stand-in.1"]
    for process in (first, second):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == EXIT_OK


def test_signal_before_ready_exits_130(launcher: Launcher) -> None:
    process = launcher.start(STAND_IN_GATEWAY="never-ready")
    launcher.wait_for(launcher.run.record_path.exists)
    launcher.see()
    process.send_signal(signal.SIGINT)
    code, _, err = launcher.end()
    assert (code, launcher.left_over()) == (128 + signal.SIGINT, [])
    assert "interrupted" in err


def test_a_killed_process_is_restarted_and_the_others_are_left_alone(launcher: Launcher) -> None:
    process = launcher.start()
    before = launcher.until_ready().processes
    for name in ("cpu-1", "gateway", "cpu-0"):
        killed = launcher.until_ready()
        os.kill(killed.processes[name], signal.SIGKILL)
        launcher.until_replaced(name, killed)
    after = launcher.until_ready()
    assert all(before[name] != after.processes[name] for name in before)
    process.send_signal(signal.SIGINT)
    code, _, err = launcher.end()
    assert (code, launcher.left_over()) == (EXIT_OK, [])
    assert f"cpu-1 (pid {before['cpu-1']}) was killed by SIGKILL; it is restarted" in err
    assert f"gateway (pid {before['gateway']}) was killed by SIGKILL; it is restarted" in err
    assert "ready again, epoch" in err


def test_a_gateway_is_restarted_on_the_ports_and_with_the_manifest_that_it_had(launcher: Launcher) -> None:
    process = launcher.start()
    before = launcher.until_ready()
    assert (before.cores, before.memory_bytes) == ("0-1", 2 << 30)
    launcher.manifest.write_text("{}", encoding="utf-8")  # as a person edits it meanwhile
    os.kill(before.processes["gateway"], signal.SIGKILL)
    after = launcher.until_replaced("gateway", before)
    assert (after.inference, after.admin) == (before.inference, before.admin)
    assert {name for name in before.processes if before.processes[name] == after.processes[name]} == {"cpu-0", "cpu-1"}
    process.send_signal(signal.SIGINT)
    assert launcher.end()[0] == EXIT_OK


def test_a_gateway_that_waits_for_its_restart_is_not_said_to_serve(launcher: Launcher) -> None:
    process = launcher.start(recovery="maxRestarts: 10")
    for _ in range(4):  # after pauses of 0, 0.5, 1 and 2 s
        before = launcher.until_ready()
        os.kill(before.processes["gateway"], signal.SIGKILL)
        time.sleep(0.75)
        after = launcher.run.read_record()
        assert after is not None
        assert (after.phase, after.processes["gateway"]) != ("ready", before.processes["gateway"])
        launcher.until_replaced("gateway", before)
    process.send_signal(signal.SIGINT)
    assert launcher.end()[0] == EXIT_OK


def test_a_rank_that_cannot_be_started_now_is_started_later(launcher: Launcher) -> None:
    process = launcher.start(forkserver="no")
    before = launcher.until_ready()
    log = launcher.run.log_path("cpu-1")
    log.unlink()
    log.mkdir()  # as a log that cannot be opened
    os.kill(before.processes["cpu-1"], signal.SIGKILL)
    time.sleep(2)  # for some tries
    log.rmdir()
    launcher.until_replaced("cpu-1", before)
    process.send_signal(signal.SIGINT)
    code, _, err = launcher.end()
    assert code == EXIT_OK
    assert err.count(f"cpu-1 cannot be started: [Errno 21] Is a directory: '{log}'; it is tried again") in (2, 3)


def test_a_frozen_rank_is_killed_and_restarted(launcher: Launcher) -> None:
    process = launcher.start()
    before = launcher.until_ready()
    began_s = time.monotonic()
    os.kill(before.processes["cpu-0"], signal.SIGSTOP)
    launcher.until_replaced("cpu-0", before)
    assert time.monotonic() - began_s < 10
    process.send_signal(signal.SIGINT)
    code, _, err = launcher.end()
    assert (code, launcher.left_over()) == (EXIT_OK, [])
    assert f"cpu-0 (pid {before.processes['cpu-0']}) has been frozen for" in err


def test_a_rank_that_is_late_with_its_work_is_killed_and_restarted(launcher: Launcher) -> None:
    launcher.start(STAND_IN_RANKS="cpu-1=stuck", recovery="maxRestarts: 1")
    code, _, err = launcher.end()
    assert (code, launcher.left_over()) == (EXIT_FAILURE, [])
    assert err.count("late with its work; it is killed") == 2
    assert "maxRestarts" in err


def test_a_forkserver_forks_ranks_and_their_successors(launcher: Launcher) -> None:
    process = launcher.start()
    record = launcher.until_ready()
    forkserver = launcher.forkserver(record)
    for name in ("cpu-0", "cpu-1", "cpu-0", "cpu-1"):
        forked = psutil.Process(record.processes[name])
        assert (forked.ppid(), "forkserver" in forked.cmdline()) == (process.pid, True)
        log = launcher.run.log_path(name).read_text(encoding="utf-8")
        assert f"INFO rank {name} pid {forked.pid} args" in log
        os.kill(record.processes[name], signal.SIGKILL)
        record = launcher.until_replaced(name, record)
    assert launcher.forkserver(record) == forkserver
    launcher.see()
    process.send_signal(signal.SIGINT)
    code, _, err = launcher.end()
    assert (code, launcher.left_over()) == (EXIT_OK, [])
    assert err.count("was killed by SIGKILL; it is restarted") == 4


def test_a_rank_that_was_forked_does_not_survive_a_killed_launcher(launcher: Launcher) -> None:
    process = launcher.start()
    record = launcher.until_ready()
    assert "forkserver" in psutil.Process(record.processes["cpu-1"]).cmdline()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + PATIENCE_S
    while launcher.left_over():
        assert time.monotonic() < deadline, launcher.left_over()
        time.sleep(0.05)


def test_without_its_forkserver_a_rank_is_started_by_itself(launcher: Launcher) -> None:
    process = launcher.start()
    before = launcher.until_ready()
    launcher.forkserver(before).send_signal(signal.SIGSTOP)  # it takes no orders any more
    os.kill(before.processes["cpu-1"], signal.SIGKILL)
    after = launcher.until_replaced("cpu-1", before)
    assert "forkserver" not in psutil.Process(after.processes["cpu-1"]).cmdline()
    launcher.see()
    process.send_signal(signal.SIGINT)
    assert (launcher.end()[0], launcher.left_over()) == (EXIT_OK, [])


@pytest.mark.parametrize(("forkserver", "state"), [("no", "sound"), ("yes", "broken")])
def test_a_group_starts_without_a_sound_forkserver(launcher: Launcher, forkserver: str, state: str) -> None:
    process = launcher.start(forkserver=forkserver, STAND_IN_FORKSERVER=state)
    record = launcher.until_ready()
    lines = [psutil.Process(record.processes[name]).cmdline() for name in ("cpu-0", "cpu-1")]
    assert not any("forkserver" in line for line in lines)
    process.send_signal(signal.SIGINT)
    assert (launcher.end()[0], launcher.left_over()) == (EXIT_OK, [])


def test_a_rank_that_dies_again_and_again_is_started_ever_later_until_the_budget_is_used_up(launcher: Launcher) -> None:
    launcher.start(STAND_IN_RANKS="cpu-0=later-exit:7", recovery="maxRestarts: 4", forkserver="no")
    record = launcher.until_ready()
    began_s = time.monotonic()
    os.kill(record.processes["cpu-0"], signal.SIGKILL)
    code, _, err = launcher.end()
    took_s = time.monotonic() - began_s
    assert (code, launcher.left_over()) == (EXIT_FAILURE, [])
    starts = [line for line in err.splitlines() if line.endswith("restarted") or " it is restarted in " in line]
    assert [line.rpartition("restarted")[2] for line in starts] == ["", " in 0.5 s", " in 1 s", " in 2 s"]
    assert took_s > 3.5
    assert "restarted 4 times within 60 s, which is all that spec.recovery.maxRestarts allows" in err
    assert "| ERROR the stand-in rank was told to end" in err


def test_a_replaced_rank_with_a_permanent_error_ends_the_group_at_once(launcher: Launcher) -> None:
    launcher.start(STAND_IN_RANKS="cpu-0=later-exit:3")
    record = launcher.until_ready()
    os.kill(record.processes["cpu-0"], signal.SIGKILL)
    code, _, err = launcher.end()
    assert (code, launcher.left_over()) == (EXIT_PERMANENT, [])
    assert err.splitlines()[-1] == "hetero: ERROR the stand-in rank was told to end"


def test_a_rank_that_dies_before_the_group_is_ready_ends_it(launcher: Launcher) -> None:
    launcher.start(STAND_IN_GATEWAY="never-ready")
    launcher.wait_for(launcher.run.record_path.exists)
    launcher.see()
    record = launcher.run.read_record()
    assert record is not None
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
    assert "not ready within 5 s of its start or last progress (spec.recovery.rendezvousTimeoutSeconds)" in err


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
    assert len(launcher.seen) >= 4
    process.kill()
    process.communicate()
    deadline = time.monotonic() + PATIENCE_S
    while launcher.left_over():
        assert time.monotonic() < deadline, launcher.left_over()
        time.sleep(0.05)
    assert running_groups(launcher.home) == []


def test_a_killed_warden_is_replaced_and_knows_all_processes(launcher: Launcher) -> None:
    launcher.start(STAND_IN_GATEWAY="ignore-term", STAND_IN_RANKS="cpu-1=hang")
    record = launcher.until_ready()
    for _ in range(2):
        (warden,) = launcher.children("-S")
        warden.kill()
        launcher.wait_for(lambda gone=warden: launcher.children("-S") not in ([], [gone]))  # type: ignore[misc]
    os.kill(record.processes["cpu-0"], signal.SIGKILL)
    launcher.until_replaced("cpu-0", record)
    assert launcher.process is not None
    launcher.process.kill()
    launcher.process.communicate()
    deadline = time.monotonic() + PATIENCE_S
    while launcher.left_over() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert launcher.left_over() == []


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


def test_run_goes_on_when_a_rank_dies_during_the_answer_and_ends_when_the_budget_does(launcher: Launcher) -> None:
    launcher.start(prompt="hang", recovery="maxRestarts: 1")
    before = launcher.until_ready()
    os.kill(before.processes["cpu-0"], signal.SIGKILL)
    os.kill(launcher.until_replaced("cpu-0", before).processes["cpu-0"], signal.SIGKILL)
    code, _, err = launcher.end()
    assert (code, launcher.left_over()) == (EXIT_FAILURE, [])
    assert "cpu-0 was killed by SIGKILL, and processes of the group were restarted 1 times" in err


def test_run_ends_its_processes_though_nobody_reads_the_answer(launcher: Launcher) -> None:
    process = launcher.start(prompt="echo " + f"{'w' * 999} " * 100)  # more than a pipe holds
    launcher.until_ready()
    assert process.stdout is not None
    process.stdout.read(1)
    time.sleep(1)  # until the pipe is full
    process.send_signal(signal.SIGINT)
    launcher.wait_for(lambda: launcher.left_over() == [])
    assert launcher.end()[0] == 128 + signal.SIGINT


def test_run_is_interrupted_by_a_signal(launcher: Launcher) -> None:
    process = launcher.start(prompt="hang")
    launcher.until_ready()
    process.send_signal(signal.SIGINT)
    code, _, _ = launcher.end()
    assert (code, launcher.left_over()) == (128 + signal.SIGINT, [])

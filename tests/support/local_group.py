"""A real group for tests: `hetero up` as a process, its gateway and ranks below it.

Each group has a home folder of its own, so that tests never meet a group that a person runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import psutil
import yaml

from hetero_api.group_state import GroupState
from hetero_client import AdminClient, HeteroClient
from hetero_client.errors import RequestError
from hetero_client.home import HeteroHome
from hetero_client.launcher.run_directory import GroupRecord, RunDirectory

REPOSITORY = Path(__file__).parents[2]
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class GroupFile:
    """A manifest written for one test."""

    name: str
    path: Path


def write_manifest(
    folder: Path,
    *,
    model: Path,
    name: str = "test",
    ranks: int = 2,
    ranks_per_pod: int = 1,
    cores: int = 1,
    mode: str = "Tensor",
    shares: Mapping[str, list[int]] | None = None,
    experts: str = "Auto",
    engine: Mapping[str, Any] | None = None,
    memory: str = "2Gi",
    max_model_len: int | None = 2048,
    recovery: Mapping[str, Any] | None = None,
    idle: Mapping[str, Any] | None = None,
) -> GroupFile:
    """A HeteroInference of `ranks` unbound CPU ranks (tests share two cores) over a model directory."""
    pool = {
        "name": "cpu",
        "type": "CPU",
        "ranks": ranks,
        "ranksPerPod": ranks_per_pod,
        "cpu": {"coresPerRank": cores, "memoryPerRank": memory, "numa": {"policy": "None"}},
    }
    spec: dict[str, Any] = {
        "model": {"uri": f"file://{model}", "dtype": "float32"},
        "pools": [pool],
        "placement": {"mode": mode, "shares": dict(shares or {}), "experts": experts},
        "engine": dict(engine or {}),
        "recovery": dict(recovery or {}),
        "idle": dict(idle or {}),
    }
    if max_model_len is not None:
        spec["model"]["maxModelLen"] = max_model_len
    resource = {
        "apiVersion": "heteroinference.io/v1alpha1",
        "kind": "HeteroInference",
        "metadata": {"name": name},
        "spec": spec,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(resource), encoding="utf-8")
    return GroupFile(name, path)


def _share(home: HeteroHome, kept: HeteroHome) -> None:
    for own, shared in ((home.measured, kept.measured), (home.packed, kept.packed)):
        if not own.is_symlink():
            shared.mkdir(parents=True, exist_ok=True)
            own.symlink_to(shared)


class LocalGroupProcess:
    """`hetero up FILE --port 0`, ready when entered. `module` may be another one with the same command line."""

    kept: ClassVar[Path | None] = None
    """Folder with what later starts may use of earlier ones, measurements and packed weights; None: nothing."""

    def __init__(
        self,
        manifest: GroupFile,
        *,
        home: Path,
        module: str = "tests.support.measured_up",
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._manifest = manifest
        self._home = home
        self._argv = [sys.executable, "-m", module, "up", str(manifest.path), "--port", "0", *options]
        self._environment = dict(environment or {})
        self._run = RunDirectory.for_group(HeteroHome(home), manifest.name)
        self._process: subprocess.Popen[str] | None = None
        self.output = ""

    @property
    def record(self) -> GroupRecord:
        """Pids and addresses."""
        record = self._run.read_record()
        assert record is not None, self.describe()
        return record

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start without waiting."""
        self._home.mkdir(parents=True, exist_ok=True)
        if self.kept is not None:
            _share(HeteroHome(self._home), HeteroHome(self.kept))
        self._process = subprocess.Popen(
            self._argv,
            cwd=REPOSITORY,
            env={**os.environ, "HETERO_HOME": str(self._home), "NO_COLOR": "1", **self._environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.describe()
            record = self._run.read_record()
            return record is not None and record.phase == "ready"

        wait_for(ready, READY_TIMEOUT_S, self.describe)

    def wait_ready_again(self, *, after_epoch: int, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Until the group serves in a later epoch; when that was seen, monotonic seconds."""
        with self.admin() as admin:

            def ready() -> bool:
                assert self.process.poll() is None, self.describe()
                try:
                    seen = admin.topology(timeout_s=1.0, wait_for_ready=True)
                except RequestError:
                    return False
                return seen.state == GroupState.READY and seen.epoch > after_epoch

            wait_for(ready, timeout_s, self.describe)
            return time.monotonic()

    def client(self) -> HeteroClient:
        return HeteroClient(self.record.inference)

    def admin(self) -> AdminClient:
        return AdminClient(self.record.admin)

    def descendants(self) -> set[int]:
        """Pids of all processes of the group."""
        return {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}

    def stop(self) -> int:
        """Ctrl-C; the exit status. Kills what does not end in time, and fails then."""
        self.process.send_signal(signal.SIGINT)
        return self.wait_end(STOP_TIMEOUT_S)

    def wait_end(self, timeout_s: float) -> int:
        try:
            self.output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode

    def describe(self) -> str:
        """Output and the logs' ends, for a failure's message."""
        logs = [f"--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted(self._run.path.glob("*.log"))]
        if self._process is not None and self._process.poll() is not None and not self.output:
            self.output, _ = self._process.communicate()
        return "\n".join([self.output, *logs])

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.stop()


def wait_for(condition: Callable[[], bool], timeout_s: float, describe: Callable[[], str]) -> None:
    """Poll until the condition holds; fail with the description when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s:\n{describe()}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs (one that ended but was not reaped does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_segments() -> set[str]:
    """Names in /dev/shm that are ours."""
    return {path.name for path in Path("/dev/shm").glob("hetero-*") if path.is_file()}

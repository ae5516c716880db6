"""What a test run leaves behind when it ends without a word: nothing."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import janitor
from tests.e2e.harness.cgroups import hierarchies, make_cgroup
from tests.support.kube.polling import poll
from tests.support.kube.spawned import Spawned, alive

SLEEP = "import time; time.sleep(600)"
DONE_TIMEOUT_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Of a cluster that nobody started. Root is needed for what is put there."""
    assert os.geteuid() == 0, "real nodes need root"
    made = tmp_path / f"he2e-{secrets.token_hex(3)}"
    made.mkdir()
    yield made
    shutil.rmtree(made, ignore_errors=True)


def hire(folder: Path, logs: Path) -> Spawned:
    command = [sys.executable, "-I", janitor.__file__, str(folder), str(logs)]
    return Spawned.start(command, log=logs / "janitor.log", environment=os.environ)


def start(folder: Path, *arguments: str) -> Spawned:
    command = [sys.executable, "-c", SLEEP, *arguments]
    return Spawned.start(command, log=folder / "program.log", environment=os.environ)


def test_processes_mounts_cgroups_namespaces_and_files_go_and_logs_stay(folder: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    with (folder / janitor.USERS).open("a") as users:
        fcntl.flock(users, fcntl.LOCK_EX)
        hired = hire(folder, logs)
        cgroup = f"{folder.name}-n0"
        make_cgroup(cgroup)
        server, container, stranger = start(folder, f"{folder}/server.yaml"), start(folder), start(folder)
        for hierarchy in hierarchies():
            (hierarchy / cgroup / "cgroup.procs").write_text(str(container.pid))
        (folder / "volume").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder / "volume"], check=True)
        subprocess.run(["ip", "netns", "add", f"{folder.name}-net"], check=True)
        (folder / "server.log").write_text("what it said")
        assert all(alive(one.pid) for one in (hired, server, container, stranger)), "as long as the run holds it"
    try:
        poll(lambda: not hired.running, timeout_s=DONE_TIMEOUT_S, describe=(logs / "janitor.log").read_text)
        assert hired.status == 0, (logs / "janitor.log").read_text()
        assert (server.running, container.running, stranger.running) == (False, False, True)
    finally:
        stranger.send(signal.SIGKILL)
        stranger.wait(DONE_TIMEOUT_S)
    assert not folder.exists()
    assert not [path for top in hierarchies() for path in top.glob(f"{folder.name}*")]
    assert not list(janitor.NAMESPACES.glob(f"{folder.name}*"))
    assert (logs / "server.log").read_text() == "what it said"

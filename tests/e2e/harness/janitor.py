"""The process that takes a cluster's nodes away, whatever becomes of the test run.

The run holds a lock on the file `users` in the cluster's folder; the kernel drops it when the run ends, come what may.
The janitor waits for the lock and then ends kubelets before containers, containers before containerd, and all processes
before what they stand on: mounts, cgroups, network namespaces, files. A regular end takes the same way, so this is
tested all the time. Logs are kept in the folder that was named; what could not be taken away is told, with status 1.

Run as a script, with nothing but the standard library: `python janitor.py FOLDER LOGS`. The name of the folder is the
name of the cluster: the prefix of its namespaces and cgroups.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

USERS = "users"
KEEPER = b"/keeper.py"
MADE = "made-folders"
PATIENCE_S = 20.0
INTERVAL_S = 0.05
NAMESPACES = Path("/run/netns")
CGROUPS = Path("/sys/fs/cgroup")


def main(folder: Path, logs: Path) -> int:
    with (folder / USERS).open("a") as users:
        fcntl.flock(users, fcntl.LOCK_EX)
    left = []
    for step in (_end_processes, _unmount, _remove_cgroups, _remove_namespaces, _remove_made_folders):
        started = time.monotonic()
        left += step(folder)
        print(f"{step.__name__}: {time.monotonic() - started:.1f} s", flush=True)
    _keep_logs(folder, logs)
    left += _remove(folder)
    for thing in left:
        print(f"left behind: {thing}", file=sys.stderr)
    return 1 if left else 0


def kill_all(folder: Path, cgroups: str) -> list[int]:
    """Kill the programs that have their files in the folder, and what runs in cgroups whose name begins so.

    Kubelets and the like go first, so that nothing is started anew; containerd last. Return who lives on.
    """
    _kill(pid for pid in _processes_of(folder) if "containerd" not in _name(pid))
    _until_none(lambda: _in_cgroups(cgroups))
    return _until_none(lambda: _processes_of(folder))


def _end_processes(folder: Path) -> list[str]:
    """End all processes. The control plane's own keeper, which knows where etcd's data are, is waited for."""
    left = kill_all(folder, f"{folder.name}-n")
    deadline = time.monotonic() + PATIENCE_S
    while (keepers := _processes_of(folder, keepers=True)) and time.monotonic() < deadline:
        time.sleep(INTERVAL_S)
    return [f"process {pid}" for pid in (*left, *keepers)]


def _until_none(find: Callable[[], list[int]]) -> list[int]:
    """Kill what is found until nothing is; what is left after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := find()) and time.monotonic() < deadline:
        _kill(found)
        time.sleep(INTERVAL_S)
    return found


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes_of(folder: Path, *, keepers: bool = False) -> list[int]:
    """Processes whose command line names a file in the folder: our servers, and containerd's shims. Or the keeper."""
    needle = os.fsencode(folder) + b"/"
    lines = {pid: _read(pid, "cmdline") for pid in _pids() if pid != os.getpid()}
    return [pid for pid, line in lines.items() if needle in line and (KEEPER in line) == keepers]


def _in_cgroups(prefix: str) -> list[int]:
    """Processes in cgroups of nodes: the containers."""
    return [pid for pid in _pids() if f"/{prefix}".encode() in _read(pid, "cgroup")]


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:  # it has ended
        return b""


def _name(pid: int) -> str:
    return _read(pid, "comm").decode(errors="replace")


def _unmount(folder: Path) -> list[str]:
    for point in _mounts(folder):
        subprocess.run(["umount", "--lazy", point], capture_output=True, check=False)
    return [f"mount {point}" for point in _mounts(folder)]


def _mounts(folder: Path) -> list[str]:
    """Mount points in the folder, the innermost first."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    points = [line.split()[1].encode().decode("unicode_escape") for line in lines]
    return sorted((point for point in points if point.startswith(f"{folder}/")), reverse=True)


def _remove_cgroups(folder: Path) -> list[str]:
    cluster = folder.name
    tops = [*CGROUPS.glob(f"{cluster}-n*"), *CGROUPS.glob(f"*/{cluster}-n*")]
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and any(top.exists() for top in tops):
        for top in tops:
            for current, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):  # busy until the kernel is done with its last process
                    os.rmdir(current)
        time.sleep(INTERVAL_S)
    return [str(top) for top in tops if top.exists()]


def _remove_namespaces(folder: Path) -> list[str]:
    cluster = folder.name
    for path in NAMESPACES.glob(f"{cluster}-*"):
        subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, check=False)
    return [str(path) for path in NAMESPACES.glob(f"{cluster}-*")]


def _remove_made_folders(folder: Path) -> list[str]:
    """Remove folders that had to be made, unless another cluster is there.

    Its mounts on them would go with them: Linux detaches what is mounted on a folder that is removed.
    """
    prefix = folder.name.partition("-")[0]
    if any(other != folder for other in folder.parent.glob(f"{prefix}-*")):
        return []
    record = folder / MADE
    for line in record.read_text().splitlines() if record.exists() else []:
        with contextlib.suppress(OSError):  # somebody else uses it by now
            os.rmdir(line)
    return []


def _remove(folder: Path) -> list[str]:
    """The folder with all images: some 10 GB in many files."""
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    print(f"files: {time.monotonic() - started:.1f} s", flush=True)
    return [str(folder)] if folder.exists() else []


def _keep_logs(folder: Path, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for log in folder.rglob("*.log"):
        if log.parent == folder or log.parent.parent == folder:
            target = "-".join(log.relative_to(folder).parts)
            with contextlib.suppress(OSError):
                shutil.copyfile(log, logs / target)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

"""Faults of a host that can be switched on and off: a broken or full disk, a clock that jumps, a network that drops.

A disk's errors and the clock are played by `shim.c`, which all processes of a group load. Networks and small file
systems are the kernel's own, in namespaces that the whole run lives in: nothing of them outlives it or touches others.
Memory runs out in a cgroup of the process's own, where the kernel kills it as it kills a container that is too large.
"""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

import psutil

from hetero_api.host.memory import out_of_memory_kills

_CONTROL: Final = struct.Struct("<qii496s")
_NAMESPACES: Final = ("--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
_INSIDE: Final = "HETERO_CHAOS_INSIDE"
SHARED_MEMORY: Final = Path("/dev/shm")
SHARED_MEMORY_BYTES: Final = 256 * 1024 * 1024
_CGROUPS: Final = Path("/sys/fs/cgroup")
_LEFT_BYTES: Final = 32 * 1024 * 1024
_KILLED_WITHIN_S: Final = 20.0
_HOG: Final = """
import os, sys
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
held = []
while True:
    held.append(bytearray(b"x") * (1 << 20))
"""


def enter_namespaces(arguments: Sequence[str]) -> int | None:
    """Run this program again in namespaces of its own; return its status, or None if this is it, or cannot be."""
    if os.environ.get(_INSIDE):
        _prepare()
        return None
    if os.geteuid() != 0 or subprocess.run(["unshare", *_NAMESPACES, "true"], check=False).returncode:
        return None
    command = ["unshare", *_NAMESPACES, sys.executable, "-m", "tests.chaos", *arguments]
    return subprocess.run(command, env={**os.environ, _INSIDE: "1"}, check=False).returncode


def is_inside() -> bool:
    """Whether the kernel's own faults can be played: file systems and networks are ours alone."""
    return bool(os.environ.get(_INSIDE))


def _prepare() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    mount_small(SHARED_MEMORY, SHARED_MEMORY_BYTES)


def mount_small(folder: Path, num_bytes: int) -> None:
    """Mount a file system in memory of that size."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "chaos", str(folder)], check=True)


def unmount(folder: Path) -> None:
    """Take it out of the way, whoever still has a file of it open."""
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Leave no byte free in the file system of a folder."""
    ballast = folder / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(1 << 16))
                except OSError:
                    break
        yield
    finally:
        ballast.unlink()


@contextmanager
def dropped(*rules: Sequence[str]) -> Iterator[None]:
    """Drop the packets on loopback that any of the rules (in iptables' words) matches."""
    for rule in rules:
        subprocess.run(["iptables", "-w", "-A", "INPUT", *rule, "-j", "DROP"], check=True)
    try:
        yield
    finally:
        subprocess.run(["iptables", "-w", "-F", "INPUT"], check=True)


@cache
def can_limit_memory() -> bool:
    """Return whether cgroups that limit memory can be made here."""
    try:
        with _memory_limited():
            return True
    except OSError:
        return False


def run_out_of_memory(pid: int) -> None:
    """Let the kernel kill a process for want of memory; return when it has.

    The process goes into a cgroup that allows little more, which another one there takes up; of the two, the kernel
    is told to choose the process. What it had before stays charged to the cgroup that it comes from.
    """
    process = psutil.Process(pid)
    with _memory_limited() as cgroup:
        (cgroup / "cgroup.procs").write_text(str(pid))
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        hog = subprocess.Popen([sys.executable, "-I", "-S", "-c", _HOG, str(cgroup / "cgroup.procs")])
        try:
            _wait_gone(process)
        finally:
            hog.kill()
            hog.wait()
        kills = out_of_memory_kills(cgroup_events=(cgroup / "memory.events", cgroup / "memory.oom_control"))
        assert kills >= 1, f"process {pid} ended, and the kernel did not kill it"


@contextmanager
def _memory_limited() -> Iterator[Path]:
    """Make a cgroup, of version 1 or 2, that little memory is left in. Raises OSError where that cannot be."""
    is_unified = (_CGROUPS / "cgroup.controllers").exists()
    if is_unified:
        (_CGROUPS / "cgroup.subtree_control").write_text("+memory")
    cgroup = Path(tempfile.mkdtemp(prefix="chaos-", dir=_CGROUPS if is_unified else _CGROUPS / "memory"))
    try:
        (cgroup / ("memory.max" if is_unified else "memory.limit_in_bytes")).write_text(str(_LEFT_BYTES))
        if (swap := cgroup / "memory.swap.max").exists():
            swap.write_text("0")
        yield cgroup
    finally:
        _remove(cgroup)


def _wait_gone(process: psutil.Process) -> None:
    deadline_s = time.monotonic() + _KILLED_WITHIN_S
    with suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s, f"process {process.pid} is not killed"
            time.sleep(0.01)


def _remove(cgroup: Path) -> None:
    """Let go of whoever is still in a cgroup, and remove it: one that was killed takes a moment to leave."""
    deadline_s = time.monotonic() + _KILLED_WITHIN_S
    while True:
        for pid in (cgroup / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (cgroup.parent / "cgroup.procs").write_text(pid)
        try:
            return cgroup.rmdir()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(0.01)


class Shim:
    """The library that plays faults inside processes, and the memory by which it is steered."""

    def __init__(self, folder: Path) -> None:
        self._library, self._control = folder / "shim.so", folder / "control"
        source = Path(__file__).with_name("shim.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", self._library, source, "-ldl"], check=True)
        self._control.write_bytes(_CONTROL.pack(0, 0, 0, b""))
        with self._control.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _CONTROL.size)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "HETERO_CHAOS_CONTROL": str(self._control)}

    @contextmanager
    def disk(self, folder: Path, *, reads: int = 0, writes: int = 0) -> Iterator[None]:
        """Fail reads and writes of files below a folder, with these error numbers."""
        self._set(0, reads, writes, str(folder.resolve()).encode())
        try:
            yield
        finally:
            self._set()

    @contextmanager
    def clock(self, offset_s: float) -> Iterator[None]:
        """Set the wall clock of all processes forwards or back."""
        self._set(int(offset_s * 1e9))
        try:
            yield
        finally:
            self._set()

    def _set(self, offset_ns: int = 0, reads: int = 0, writes: int = 0, folder: bytes = b"") -> None:
        self._memory[:] = _CONTROL.pack(offset_ns, reads, writes, folder)

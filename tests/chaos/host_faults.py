"""Faults of a host that can be switched on and off: a broken or full disk, a clock that jumps, a network that drops.

A disk's errors and the clock are played by `shim.c`, which all processes of a group load. Networks and small file
systems are the kernel's own, in namespaces that the whole run lives in: nothing of them outlives it or touches others.
"""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_CONTROL: Final = struct.Struct("<qii496s")
_NAMESPACES: Final = ("--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
_INSIDE: Final = "HETERO_CHAOS_INSIDE"
SHARED_MEMORY: Final = Path("/dev/shm")
SHARED_MEMORY_BYTES: Final = 256 * 1024 * 1024


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

"""Two hosts on this machine: network namespaces, joined by a veth pair or by a wire that delays. Needs root and `ip`.

The wire is two TUN devices and a process that carries each packet from one to the other when DELAY_S have passed, for
kernels without netem. Everything goes with the context.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

DELAY_S: Final = 100e-6
"""Time that a packet takes in either direction, at least."""
_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_PR_SET_TIMERSLACK: Final = 29
_IFF_TUN_NO_PI: Final = 0x1001
_TUN_MTU: Final = 65000
_FOLDER: Final = Path("/var/run/netns")


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace and its address on the wire."""

    name: str
    address: str

    def enter(self) -> None:
        """Move the calling thread, and all that it starts, into the namespace. Raises OSError."""
        with (_FOLDER / self.name).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.name}")


@contextmanager
def two_hosts(*, delayed: bool) -> Iterator[tuple[Host, Host]]:
    """Make two hosts. Raises CalledProcessError without the rights for it."""
    hosts = tuple(Host(f"hetero-bench-{os.getpid()}-{n}", f"10.213.7.{n}") for n in (1, 2))
    with ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "delete", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        if delayed:
            stack.enter_context(_carrier(hosts))
        else:
            _join(hosts)
        yield hosts[0], hosts[1]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _give_address(host: Host, device: str) -> None:
    _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", device)
    _ip("-n", host.name, "link", "set", device, "up")


def _join(hosts: Sequence[Host]) -> None:
    first, second = hosts
    ends = ("type", "veth", "peer", "name", "wire", "netns", second.name)
    _ip("link", "add", "wire", "netns", first.name, *ends)
    for host in hosts:
        _give_address(host, "wire")


@contextmanager
def _carrier(hosts: Sequence[Host]) -> Iterator[None]:
    context = get_context("fork")
    ready = context.Event()
    process = context.Process(target=_carry, args=(hosts, ready), daemon=True)
    process.start()
    try:
        if not ready.wait(10.0):
            raise RuntimeError("the wire between the hosts was not made")
        for host in hosts:
            _ip("-n", host.name, "link", "set", "wire", "mtu", str(_TUN_MTU))
            _give_address(host, "wire")
        yield
    finally:
        process.kill()
        process.join()


def _carry(hosts: Sequence[Host], ready: object) -> None:
    """Carry packets until the process is killed. It sleeps in between and goes before others: they have the cores."""
    ends = [_open_tun(host) for host in hosts]
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    ready.set()  # type: ignore[attr-defined]
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        left_s = max(0.0, under_way[0][0] - time.perf_counter()) if under_way else None
        for end in select.select(ends, [], [], left_s)[0]:
            other = ends[end == ends[0]]
            with suppress(BlockingIOError):
                while True:
                    under_way.append((time.perf_counter() + DELAY_S, other, os.read(end, 1 << 16)))
        while under_way and under_way[0][0] <= time.perf_counter():
            _, other, packet = under_way.popleft()
            with suppress(OSError):  # its device is not up yet
                os.write(other, packet)


def _open_tun(host: Host) -> int:
    host.enter()
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", b"wire", _IFF_TUN_NO_PI))
    return tun

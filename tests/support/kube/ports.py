"""Free ports on loopback, from below the kernel's ephemeral range.

A server that stops and comes back on its port must find it free: a port from the ephemeral range could meanwhile have
become the local end of somebody's outgoing connection.
"""

from __future__ import annotations

import os
import random
import socket

from tests.support.kube.errors import ComponentFailed

HOST = "127.0.0.1"
RANGE = range(18000, 32000)
ATTEMPTS = 200
_given: set[int] = set()


def ports_of(worker: str, count: int) -> range:
    """The ports that one of pytest-xdist's `count` workers gives: two workers never give the same one."""
    return RANGE[int(worker.removeprefix("gw")) :: count]


_OURS = ports_of(os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def free_port() -> int:
    """A port that nobody listens at now, and that no worker gave before."""
    for _ in range(ATTEMPTS):
        port = random.choice(_OURS)
        if port in _given:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            _given.add(port)
            return port
    raise ComponentFailed(f"no free port on {HOST} between {RANGE.start} and {RANGE.stop}")

"""Exchanges over TCP with threads for ranks, each with connections of its own; and both native kinds by name."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from hetero_worker.distributed.rendezvous import StoreListener, Wait
from hetero_worker.distributed.routes import NO_ROUTES, Routes
from hetero_worker.distributed.tcp.connecting import Door, Wire, wires_of
from hetero_worker.distributed.tcp.exchange import TcpExchange
from tests.support import shm_threads
from tests.support.shm_threads import PAGE, native_library

HOST = "127.0.0.1"
RING_BYTES = 1024


def has_ipv6() -> bool:
    """Whether this machine has IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


MakeExchanges = Callable[..., AbstractContextManager[list[Any]]]
"""Makes every rank's exchange, in rank order, from the arguments of `exchanges`."""


def wires_of_all(world_size: int, routes: Routes = NO_ROUTES, host: str = HOST) -> list[dict[Wire, int]]:
    """Connect all ranks; file descriptors of each."""
    secret, listeners = secrets.token_bytes(32), [StoreListener(host) for _ in range(world_size)]
    addresses = [listener.open() for listener in listeners]

    def connect(rank: int) -> dict[Wire, int]:
        door = Door(rank, host, 1, secret, Wait(20.0, lambda: False))
        return door.connect(listeners[rank], wires_of(rank, world_size, routes), addresses)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(connect, range(world_size)))


@contextmanager
def exchanges(
    folder: Path, world_size: int = 2, *, timeout_s: float = 20.0, routes: Routes = NO_ROUTES
) -> Iterator[list[TcpExchange]]:
    """Every rank's, in rank order; `folder` is for other kinds. Rings are short, so that messages go around."""
    made = [
        TcpExchange(
            wires, routes, rank=rank, world_size=world_size, timeout_s=timeout_s, area_bytes=PAGE,
            library=native_library(), ring_bytes=RING_BYTES,
        )
        for rank, wires in enumerate(wires_of_all(world_size, routes))
    ]  # fmt: skip
    yield made
    for exchange in made:
        exchange.close()


NATIVE: dict[str, MakeExchanges] = {"shm": shm_threads.exchanges, "tcp": exchanges}

"""The rendezvous store of one epoch.

Rank 0 hosts it, on a socket that every rank binds before it says Hello: the address that it told is then bound
until the store runs on it, and no port can be lost in between. It starts to listen only with the store, so that
others are refused, and try again, instead of hanging on a store that never speaks. All waits are short polls:
an Abort that comes meanwhile ends them. Only when all ranks have met do they enter Gloo, which cannot be
interrupted.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from torch.distributed import PrefixStore as PrefixStore  # type: ignore[attr-defined]  # as below; others take it from here
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs omit them

from hetero_worker.errors import ExchangeAborted, ExchangeError, ExchangeTimeout

_POLL_S: Final = 0.01
_BACKLOG: Final = 128
_CONNECT: Final = timedelta(seconds=2)
"""Longest single try to connect."""


class StoreListener:
    """A bound socket on `host`, on a port of the system's choice, that listens once it is handed over."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._socket: socket.socket | None = None

    def open(self) -> str:
        """Bind; returns "host:port". Raises ExchangeError when the host is no address of this machine."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((self._host, 0))
        except OSError as error:
            listener.close()
            raise ExchangeError(
                f"--store-host {self._host}: cannot listen: {error.strerror}; give an address of this machine"
            ) from error
        self._socket = listener
        return format_address(self._host, listener.getsockname()[1])

    def detach(self) -> int:
        """Listen, and hand over the file descriptor; the caller closes it."""
        if self._socket is None:
            raise ExchangeError("the store's socket is not open")
        listener, self._socket = self._socket, None
        listener.listen(_BACKLOG)
        return listener.detach()

    def close(self) -> None:
        """Idempotent; does nothing to a descriptor that was handed over."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """ "host:port" or "[v6]:port". Raises ExchangeError."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit():
        raise ExchangeError(f"store_address {address!r} is no host:port")
    return host.strip("[]"), int(port)


def open_store(
    *,
    address: str,
    listener: StoreListener,
    epoch: int,
    rank: int,
    world_size: int,
    timeout_s: float,
    aborted: Callable[[], bool],
) -> PrefixStore:
    """Host (rank 0) or join the store and wait for all ranks; keys are the epoch's own.

    Raises ExchangeTimeout naming the ranks that did not come, ExchangeAborted, ExchangeError.
    """
    host, port = parse_address(address)
    wait = Wait.begin(timeout_s, aborted)
    try:
        if rank == 0:
            store = _host_store(host, port, listener)
        else:
            _await_listening(host, port, wait)
            store = TCPStore(host, port, is_master=False, timeout=_CONNECT, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=timeout_s))
        shared = PrefixStore(f"epoch-{epoch}", store)
        await_all(shared, "here", rank=rank, world_size=world_size, wait=wait)
    except RuntimeError as error:  # torch's DistError
        reason = str(error).partition("\n")[0]
        raise ExchangeError(f"rendezvous store {address}: {reason}") from error
    return shared


@dataclass(frozen=True, slots=True)
class Wait:
    """One bounded wait in polls that an Abort ends."""

    deadline_s: float
    timeout_s: float
    aborted: Callable[[], bool]

    @classmethod
    def begin(cls, timeout_s: float, aborted: Callable[[], bool]) -> Wait:
        return cls(time.monotonic() + timeout_s, timeout_s, aborted)

    def pause(self, missing: str) -> None:
        if self.aborted():
            raise ExchangeAborted("the epoch was aborted while ranks were meeting")
        if time.monotonic() > self.deadline_s:
            raise ExchangeTimeout(f"{missing} did not come to the rendezvous within {self.timeout_s:g} s")
        time.sleep(_POLL_S)


def _host_store(host: str, port: int, listener: StoreListener) -> TCPStore:
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=_CONNECT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _await_listening(host: str, port: int, wait: Wait) -> None:
    while True:
        try:
            socket.create_connection((host, port), timeout=_CONNECT.total_seconds()).close()
            return
        except OSError:
            wait.pause("rank 0")


def await_all(store: PrefixStore, what: str, *, rank: int, world_size: int, wait: Wait) -> None:
    """Until every rank is here for `what`, each of which is met for once. Raises as Wait.pause, and RuntimeError."""
    store.set(f"{what}-{rank}", "here")
    missing = list(range(world_size))
    while missing := [peer for peer in missing if not store.check([f"{what}-{peer}"])]:
        wait.pause(f"rank(s) {', '.join(map(str, missing))}")

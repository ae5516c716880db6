"""How ranks connect over TCP, and that strangers at their ports neither get in nor hold them up."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from hetero_worker.distributed.native_ends import NativeExchange
from hetero_worker.distributed.rendezvous import StoreListener, Wait, parse_address
from hetero_worker.distributed.routes import NO_ROUTES, Link, Routes
from hetero_worker.distributed.tcp.connecting import CONTROL, STRANGERS, Door, Wire, wires_of
from hetero_worker.distributed.tcp.exchange import TcpExchange
from hetero_worker.errors import ExchangeAborted, ExchangeTimeout
from tests.support.shm_threads import native_library, on_every_rank
from tests.support.tcp_threads import HOST, exchanges, has_ipv6, wires_of_all

pytestmark = pytest.mark.unit

SECRET = secrets.token_bytes(32)
WIRES = [Wire(1, 0), Wire(1, 1)]
"""Those of rank 0, in a group that needs no more."""


def door(rank: int, *, timeout_s: float = 20.0, aborted: threading.Event | None = None) -> Door:
    is_aborted = (aborted or threading.Event()).is_set
    return Door(rank, HOST, 7, SECRET, Wait(timeout_s, is_aborted), handshake_s=0.3)


@dataclass
class Forming:
    """Rank 0 while it waits for rank 1."""

    address: str
    wires: Future[dict[Wire, int]]

    def call(self) -> socket.socket:
        """Connect as soon as rank 0 listens."""
        deadline = time.monotonic() + 5.0
        while True:
            try:
                return socket.create_connection(parse_address(self.address), timeout=5.0)
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise

    def finish(self) -> None:
        """Let rank 1 come; a byte must go through."""
        listener = StoreListener(HOST)
        listener.open()
        theirs = door(1).connect(listener, [replace(wire, peer=0) for wire in WIRES], [self.address])
        for wire, descriptor in self.wires.result(5.0).items():
            there = theirs[replace(wire, peer=0)]
            os.write(there, b"x")
            os.set_blocking(descriptor, True)
            assert os.read(descriptor, 2) == b"x"
            os.close(there)
            os.close(descriptor)


@contextmanager
def forming(**options: object) -> Iterator[Forming]:
    listener = StoreListener(HOST)
    address = listener.open()
    with ThreadPoolExecutor(1) as pool:
        yield Forming(address, pool.submit(door(0, **options).connect, listener, WIRES, [address]))  # type: ignore[arg-type]


def is_dropped(stranger: socket.socket) -> bool:
    """Whether all that comes is a greeting, and then the end; within the socket's timeout."""
    try:
        while stranger.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ranks_connect_over_both_versions_of_ip(host: str) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    routes = Routes(((0, 1),), (Link(0, 2, (0, 1)),))
    made = wires_of_all(3, routes, host)

    for rank, wires in enumerate(made):
        assert sorted(wires) == wires_of(rank, 3, routes)
        for descriptor in wires.values():
            with socket.socket(fileno=descriptor) as connection:
                assert connection.getsockname()[0] == connection.getpeername()[0] == host
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, b"HETEROX\0"])
def test_a_stranger_is_dropped_and_the_ranks_connect(said: bytes) -> None:
    with forming() as group:
        with group.call() as stranger:
            began = time.monotonic()
            stranger.sendall(said)
            assert is_dropped(stranger)
            assert time.monotonic() - began < 2.0
        group.finish()


def test_whoever_knows_everything_but_the_secret_is_a_stranger() -> None:
    with forming() as group:
        knows = replace(door(1), secret=secrets.token_bytes(32))
        with group.call() as stranger:
            challenge = stranger.recv(28)[-16:]
            hello = knows.hello(1, 0, Wire(0, 1))
            stranger.sendall(hello + knows.sign(b"dialled", challenge, hello))
            assert is_dropped(stranger)
        group.finish()


@pytest.mark.parametrize(
    "hello",
    [
        replace(door(1), epoch=6).hello(1, 0, Wire(0, 1)),
        door(1).hello(2, 0, Wire(0, 1)),
        door(1).hello(1, 0, Wire(0, 5)),
        door(1).hello(1, 0, Wire(0, 1, lane=3)),
    ],
    ids=["another epoch", "another rank", "another purpose", "another lane"],
)
def test_a_rank_that_nobody_expects_is_dropped(hello: bytes) -> None:
    with forming() as group:
        with group.call() as stranger:
            challenge = stranger.recv(28)[-16:]
            stranger.sendall(hello + door(1).sign(b"dialled", challenge, hello))
            assert is_dropped(stranger)
        group.finish()


def test_a_hello_that_was_overheard_is_of_no_use_again() -> None:
    with forming() as group:
        with group.call() as first, group.call() as second:
            hello = door(1).hello(1, 0, Wire(0, 1))
            overheard = hello + door(1).sign(b"dialled", first.recv(28)[-16:], hello)
            second.sendall(overheard)
            assert is_dropped(second)
        group.finish()


def test_strangers_that_say_nothing_do_not_hold_up_the_ranks() -> None:
    with forming() as group:
        silent = [group.call() for _ in range(STRANGERS + 20)]
        group.finish()
        for stranger in silent:
            assert is_dropped(stranger)
            stranger.close()


def test_whoever_answers_without_the_secret_is_no_rank() -> None:
    with socket.create_server((HOST, 0)) as impostor, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(b"HETEROX\0" + (1).to_bytes(4, "little") + bytes(16))
                connection.recv(4096)
                connection.sendall(bytes(32))

        answering = pool.submit(answer)
        listener = StoreListener(HOST)
        listener.open()
        address = f"{HOST}:{impostor.getsockname()[1]}"
        with pytest.raises(ExchangeTimeout, match=rf"rank 0, which listens on {address}, did not come"):
            door(1, timeout_s=0.3).connect(listener, [Wire(0, 0)], [address])
        answering.result(5.0)


def test_nobody_listens_once_all_are_connected() -> None:
    with forming() as group:
        group.finish()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(parse_address(group.address), timeout=5.0)


def test_a_rank_that_does_not_come_is_named() -> None:
    with forming(timeout_s=0.2) as group, pytest.raises(ExchangeTimeout, match=r"rank\(s\) 1 did not come"):
        group.wires.result(5.0)


def test_an_abort_ends_the_waiting() -> None:
    aborted = threading.Event()
    with forming(aborted=aborted) as group:
        aborted.set()
        with pytest.raises(ExchangeAborted):
            group.wires.result(2.0)


def no_files(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_process_that_may_open_no_more_files_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that a rank did not come."""
    with forming() as group, group.call():
        monkeypatch.setattr(socket.socket, "accept", no_files)
        with suppress(ConnectionError), group.call():  # it may have met the first call already
            pass
        with pytest.raises(OSError, match="Too many open files"):
            group.wires.result(5.0)
    monkeypatch.setattr(socket, "create_connection", no_files)
    listener = StoreListener(HOST)
    address = listener.open()
    with pytest.raises(OSError, match="Too many open files"):
        door(1).connect(listener, [replace(wire, peer=0) for wire in WIRES], [address])


def test_all_lengths_from_a_byte_to_eight_megabytes_are_summed(tmp_path: Path) -> None:
    """Much longer than any buffer, and both ways at once."""

    def add(exchange: NativeExchange) -> list[bool]:
        right = []
        for size in (1, 255, 4096, 65_536, 65_537, 1 << 20, (8 << 20) // 4):
            tensor = torch.arange(size, dtype=torch.float32) * (exchange.rank + 1)
            exchange.all_reduce(tensor, (0, 1, 2))
            right.append(torch.equal(tensor, torch.arange(size, dtype=torch.float32) * 6))
            single = torch.full((size,), exchange.rank, dtype=torch.uint8)
            exchange.broadcast(single, 2)
            right.append(bool((single == 2).all()))
        return right

    with exchanges(tmp_path, 3) as ranks:
        assert on_every_rank(ranks, add) == [[True] * 14] * 3


def test_ranks_that_send_to_each_other_more_than_buffers_hold_get_through(tmp_path: Path) -> None:
    """The rings have room for as much as was promised; what the kernel holds comes on top."""
    there, back = Link(0, 0, (1,)), Link(1, 1, (0,))
    size, count = 16 * 1024, 600

    def run(exchange: NativeExchange) -> float:
        out, home = (there, back) if exchange.rank == 0 else (back, there)
        tensor = torch.ones(size // 4)
        total = 0.0
        for _ in range(count):
            exchange.send(tensor, out)
            total += float(exchange.receive(torch.empty(size // 4), home).wait().sum())
        return total

    with exchanges(tmp_path, 2, routes=Routes(links=(there, back))) as ranks:
        assert on_every_rank(ranks, run) == [count * size / 4] * 2


def test_a_rank_that_waits_takes_in_what_is_sent_to_it(tmp_path: Path) -> None:
    """Rank 0 sends as much as the link promises to hold, while rank 1 waits for a round that follows."""
    link = Link(0, 0, (1,))
    made = wires_of_all(2, Routes(links=(link,)))
    ranks = [
        TcpExchange(
            wires, Routes(links=(link,)), rank=rank, world_size=2, timeout_s=20.0, area_bytes=2 << 20,
            library=native_library(),
        )
        for rank, wires in enumerate(made)
    ]  # fmt: skip
    tensor = torch.arange((16 << 20) // 4, dtype=torch.float32)

    def run(exchange: NativeExchange) -> bool:
        if exchange.rank == 0:
            exchange.send(tensor, link)
            exchange.all_reduce(torch.ones(1), (0, 1))
            return True
        receipt = exchange.receive(torch.empty_like(tensor), link)
        exchange.all_reduce(torch.ones(1), (0, 1))
        return torch.equal(receipt.wait(), tensor)

    assert on_every_rank(ranks, run) == [True, True]
    for exchange in ranks:
        exchange.close()


def test_connections_close_with_the_last_that_can_use_them() -> None:
    wires = wires_of_all(2)
    for rank, of_rank in enumerate(wires):
        exchange = TcpExchange(
            of_rank, NO_ROUTES, rank=rank, world_size=2, timeout_s=1.0, area_bytes=4096, library=native_library()
        )
        call = exchange.among((0, 1)).all_reduce_call(torch.ones(1), (0, 1))  # type: ignore[attr-defined]
        exchange.close()
        del exchange
        assert all(_is_open(descriptor) for descriptor in of_rank.values())
        del call
        assert not any(_is_open(descriptor) for descriptor in of_rank.values())


def test_what_an_abort_says_is_said_before_the_rank_leaves(tmp_path: Path) -> None:
    """Or the others would take it for lost."""
    with exchanges(tmp_path) as ranks, ThreadPoolExecutor(3) as pool:
        in_abort = threading.Event()

        class Slow:
            """The library, in which an abort takes its time."""

            def __getattr__(self, name: str) -> object:
                return getattr(native_library(), name)

            def hx_tcp_end(self, *arguments: object) -> None:
                in_abort.set()
                time.sleep(0.3)
                native_library().hx_tcp_end(*arguments)

        ranks[1]._native_rank.library = Slow()
        waiting = pool.submit(ranks[0].all_reduce, torch.ones(1), (0, 1))
        aborting = pool.submit(ranks[1].abort)
        assert in_abort.wait(5.0)
        ranks[1].close()
        aborting.result(5.0)
        with pytest.raises(ExchangeAborted, match="the epoch was aborted"):
            waiting.result(5.0)


def test_a_signal_does_not_keep_a_rank_from_the_last_word_of_another(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with exchanges(tmp_path) as ranks, ThreadPoolExecutor(1) as pool:
            thread = pool.submit(threading.get_ident).result(5.0)
            waiting = pool.submit(ranks[0].all_reduce, torch.ones(1), (0, 1))
            for wire, descriptor in ranks[1]._native_rank.wires.items():  # type: ignore[attr-defined]
                if wire.purpose != CONTROL:
                    with socket.socket(fileno=os.dup(descriptor)) as shut:
                        shut.shutdown(socket.SHUT_RDWR)
            time.sleep(0.2)  # it waits for that word now
            signal.pthread_kill(thread, signal.SIGUSR1)
            time.sleep(0.1)
            ranks[1].abort()
            with pytest.raises(ExchangeAborted, match="the epoch was aborted"):
                waiting.result(5.0)
    finally:
        signal.signal(signal.SIGUSR1, before)


def _is_open(descriptor: int) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").exists()

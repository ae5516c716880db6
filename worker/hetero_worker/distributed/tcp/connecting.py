"""Connects the ranks of an epoch with one another over TCP, so that nobody else can take part.

Every rank listens on its host's address alone, on a port that the system chooses, and stops as soon as all are
connected. Addresses and a new secret travel through the epoch's agreement. The higher rank of a pair dials; a rank
dials first and answers then, so that nobody waits in a circle. A connection begins with

    answering rank   magic, version, challenge (random, for this connection alone)
    dialling rank    magic, version, epoch, its rank, the other's, purpose, lane, and an HMAC over challenge and these
    answering rank   an HMAC over the same

and from then on carries nothing but what ranks exchange. Whoever cannot say this is a stranger: it is read no further
than the length of a hello, dropped within HANDSHAKE_S, and holds one of STRANGERS places at most. A place that is
needed is the oldest one's. A rank whose connection is dropped by that dials again, until the time is over.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from hetero_worker.distributed.native_exchange import MAX_LANES
from hetero_worker.distributed.rendezvous import POLL_S, StoreListener, Wait, parse_address
from hetero_worker.distributed.routes import Ranks, Routes

HANDSHAKE_S: Final = 2.0
"""Longest time that a connection may take to say who it is."""
STRANGERS: Final = 64
"""Most connections that have not said yet who they are."""
SECRET_BYTES: Final = 32
VERSION: Final = 1
_NO_FILES: Final = (errno.EMFILE, errno.ENFILE)
"""Errors of a process, or a machine, that has opened as many files as it may: trying again does not help."""
_MAGIC: Final = b"HETEROX\0"
_GREETING: Final = struct.Struct("<8sI16s")
"""Magic, version, challenge."""
_HELLO: Final = struct.Struct("<8sIQIIII")
"""Magic, version, epoch, dialling rank, answering rank, purpose, lane."""
_MAC_BYTES: Final = hashlib.sha256().digest_size
_HELLO_BYTES: Final = _HELLO.size + _MAC_BYTES
_DIALLED, _ANSWERED = b"dialled", b"answered"


@dataclass(frozen=True, slots=True, order=True)
class Wire:
    """Name of one connection of this rank."""

    peer: int
    purpose: int
    """CONTROL, or what `group_purpose` and `link_purpose` say."""
    lane: int = 0


CONTROL: Final = 0
"""Purpose of the connection that tells a rank's end."""


def group_purpose(group: int) -> int:
    """Return the purpose of the connections of a group: 0 is the whole, the others follow as the routes name them."""
    return 1 + group


def link_purpose(link: int, routes: Routes) -> int:
    """Return the purpose of the connections of the routes' link of this index."""
    return group_purpose(1 + len(routes.subgroups)) + link


def groups_of(world_size: int, routes: Routes) -> list[Ranks]:
    """Return all groups that have rounds, in the order of their purposes."""
    return [tuple(range(world_size)), *routes.subgroups]


def wires_of(rank: int, world_size: int, routes: Routes) -> list[Wire]:
    """Return all connections of a rank, ascending."""
    wires = [Wire(peer, CONTROL) for peer in range(world_size) if peer != rank]
    for number, ranks in enumerate(groups_of(world_size, routes)):
        peers = [peer for peer in ranks if peer != rank] if rank in ranks else []
        wires += [Wire(peer, group_purpose(number), lane) for peer in peers for lane in range(MAX_LANES)]
    for index, link in enumerate(routes.links):
        if rank in link.ranks:
            peers = list(link.receivers) if rank == link.source else [link.source]
            wires += [Wire(peer, link_purpose(index, routes)) for peer in peers]
    return sorted(wires)


class _Dropped(Exception):
    """A connection that did not begin as it must."""


@dataclass(frozen=True, slots=True)
class Door:
    """One rank's part in connecting all ranks. `epoch`, `secret` are the same on all of them."""

    rank: int
    host: str
    epoch: int
    secret: bytes
    wait: Wait
    """Bound on all of it."""
    handshake_s: float = HANDSHAKE_S

    def connect(self, listener: StoreListener, wires: Sequence[Wire], addresses: Sequence[str]) -> dict[Wire, int]:
        """Return the file descriptor of each wire, which the caller closes.

        `listener` is open, and used up. `addresses` are the ranks' listeners'. Raises ExchangeTimeout that names who is
        missing, ExchangeAborted, ExchangeError.
        """
        made: dict[Wire, socket.socket] = {}
        try:
            with closing(socket.socket(fileno=listener.detach())) as listening:
                for wire in (wire for wire in wires if wire.peer < self.rank):
                    made[wire] = self._dial(wire, addresses[wire.peer])
                expected = [wire for wire in wires if wire.peer > self.rank]
                made.update(_Answering(self, listening, expected).answer())
            for connection in made.values():
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            for connection in made.values():
                connection.close()
            raise
        return {wire: connection.detach() for wire, connection in made.items()}

    def _dial(self, wire: Wire, address: str) -> socket.socket:
        """Connect, again and again while the other rank does not answer as it must."""
        who = f"rank {wire.peer}, which listens on {address},"
        while True:
            try:
                return self._try_to_dial(wire, address, who)
            except (OSError, _Dropped) as error:
                if isinstance(error, OSError) and error.errno in _NO_FILES:
                    raise
                self.wait.pause(who)

    def _try_to_dial(self, wire: Wire, address: str, who: str) -> socket.socket:
        connection = socket.create_connection(parse_address(address), self.handshake_s, source_address=(self.host, 0))
        try:
            self._introduce(connection, wire, who)
        except BaseException:
            connection.close()
            raise
        return connection

    def _introduce(self, connection: socket.socket, wire: Wire, who: str) -> None:
        connection.settimeout(POLL_S)
        magic, version, challenge = _GREETING.unpack(self._read(connection, _GREETING.size, who))
        if (magic, version) != (_MAGIC, VERSION):
            raise _Dropped
        hello = self.hello(self.rank, wire.peer, wire)
        connection.sendall(hello + self.sign(_DIALLED, challenge, hello))
        if not hmac.compare_digest(self._read(connection, _MAC_BYTES, who), self.sign(_ANSWERED, challenge, hello)):
            raise _Dropped

    def _read(self, connection: socket.socket, size: int, who: str) -> bytes:
        """Read as many bytes. Raises _Dropped, OSError when the other end goes."""
        got = b""
        while len(got) < size:
            self.wait.check(who)
            try:
                part = connection.recv(size - len(got))
            except TimeoutError:
                continue
            if not part:
                raise _Dropped
            got += part
        return got

    def hello(self, dialling: int, answering: int, wire: Wire) -> bytes:
        """Return the hello for a wire, without its HMAC."""
        return _HELLO.pack(_MAGIC, VERSION, self.epoch, dialling, answering, wire.purpose, wire.lane)

    def sign(self, who: bytes, challenge: bytes, hello: bytes) -> bytes:
        """Return the HMAC of the dialling or the answering rank."""
        return hmac.digest(self.secret, who + challenge + hello, "sha256")


@dataclass(slots=True)
class _Caller:
    """Connection that has not said yet who it is."""

    connection: socket.socket
    deadline_s: float
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    said: bytes = b""


class _Answering:
    """A rank's part in answering those that dial it."""

    def __init__(self, door: Door, listener: socket.socket, expected: Sequence[Wire]) -> None:
        self._door = door
        self._listener = listener
        self._missing = {door.hello(wire.peer, door.rank, wire): wire for wire in expected}
        self._callers: dict[socket.socket, _Caller] = {}
        self._made: dict[Wire, socket.socket] = {}

    def answer(self) -> Mapping[Wire, socket.socket]:
        """Return all expected connections. Raises as Door.connect."""
        self._listener.setblocking(False)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                while self._missing:
                    self._answer_once(selector)
        except BaseException:
            for connection in self._made.values():
                connection.close()
            raise
        finally:
            for caller in self._callers.values():
                caller.connection.close()
        return self._made

    def _answer_once(self, selector: selectors.BaseSelector) -> None:
        late = sorted({wire.peer for wire in self._missing.values()})
        self._door.wait.check(f"rank(s) {', '.join(map(str, late))}")
        for key, _ in selector.select(POLL_S):
            if key.fileobj is self._listener:
                self._accept(selector)
            elif (caller := self._callers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                self._listen(caller, selector)
        for caller in list(self._late_callers()):
            self._drop(caller, selector)

    def _late_callers(self) -> Iterator[_Caller]:
        now_s = time.monotonic()
        return (caller for caller in self._callers.values() if caller.deadline_s < now_s)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_FILES:  # it stays in the queue
                raise
            return  # it has gone already
        if len(self._callers) >= STRANGERS:
            self._drop(next(iter(self._callers.values())), selector)
        connection.setblocking(False)
        caller = self._callers[connection] = _Caller(connection, time.monotonic() + self._door.handshake_s)
        selector.register(connection, selectors.EVENT_READ)
        self._try(lambda: connection.send(_GREETING.pack(_MAGIC, VERSION, caller.challenge)), caller, selector)

    def _listen(self, caller: _Caller, selector: selectors.BaseSelector) -> None:
        self._try(lambda: self._hear(caller, selector), caller, selector)

    def _hear(self, caller: _Caller, selector: selectors.BaseSelector) -> None:
        """Read on. Raises _Dropped unless it is, so far, what an expected rank says."""
        part = caller.connection.recv(_HELLO_BYTES - len(caller.said))
        caller.said += part
        if not part:
            raise _Dropped
        if len(caller.said) < _HELLO_BYTES:
            return
        hello, signed = caller.said[: _HELLO.size], caller.said[_HELLO.size :]
        expected = self._door.sign(_DIALLED, caller.challenge, hello)
        if not hmac.compare_digest(signed, expected) or hello not in self._missing:
            raise _Dropped
        caller.connection.send(self._door.sign(_ANSWERED, caller.challenge, hello))
        selector.unregister(caller.connection)
        del self._callers[caller.connection]
        self._made[self._missing.pop(hello)] = caller.connection

    def _try(self, action: Callable[[], object], caller: _Caller, selector: selectors.BaseSelector) -> None:
        try:
            action()
        except BlockingIOError:
            return
        except (OSError, _Dropped):
            self._drop(caller, selector)

    def _drop(self, caller: _Caller, selector: selectors.BaseSelector) -> None:
        selector.unregister(caller.connection)
        del self._callers[caller.connection]
        caller.connection.close()

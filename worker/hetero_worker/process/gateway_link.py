"""A rank's one stream to its gateway.

A thread of its own reads the stream into a queue for the main thread. The main thread's messages go through another
queue, in order, without blocking. An observer sees every event on the reading thread before it is queued, so that an
Abort can act while the main thread is busy.

The sending thread also sends a heartbeat whenever one is due. So the gateway knows that this process is alive, however
long the main thread computes.

gRPC's threads inherit the affinity of the reading thread, which first moves to the CPUs that it was given: the
process's own from before it was pinned. So they need not share a core with a compute thread where there are others.

The stream ends once, and the link does not dial again. A rank that lost its gateway exits and is restarted by its
supervisor, or makes another link and keeps its weights (`reconnect.py`).
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

import grpc

from hetero_api.contract import AUTHORIZATION_KEY, MAX_RANKS_MESSAGE_BYTES
from hetero_api.v1 import ranks_pb2, ranks_pb2_grpc
from hetero_worker.process.link_tls import LinkTls

_log = logging.getLogger(__name__)

_CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_RANKS_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_RANKS_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # A gateway whose machine vanished closes no socket.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_KNOCK_S: Final = 2.0
"""Longest single attempt to reach the gateway."""
_KNOCK_PAUSE_S: Final = 0.05
_LONGEST_KNOCK_PAUSE_S: Final = 1.0
_REFUSALS: Final = frozenset(
    {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED}
)
"""Statuses for a wrong token or program: a new process with the same ones is refused too."""


class Arrival(NamedTuple):
    """A message of the gateway and its time of arrival (time.monotonic)."""

    arrived_s: float
    message: ranks_pb2.GatewayMessage


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """End of the stream; nothing follows."""

    reason: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """Request to end this process, by a signal."""

    reason: str


Event = Arrival | StreamEnded | LeaveRequested


@dataclass(frozen=True, slots=True)
class _Pulse:
    """Heartbeats: their interval, and the function that makes one."""

    interval_s: float
    beat: Callable[[], ranks_pb2.RankMessage]


class _Signal(Enum):
    """Notes to the sending thread, in between messages."""

    FINISH = auto()
    LOOK_AGAIN = auto()
    """The pulse has changed."""


class GatewayLink:
    """The stream and its two queues.

    `cpus` is where gRPC's threads may run; None leaves them on the caller's CPUs. With `tls`, gateway and rank know one
    another by certificates before the token is sent.
    """

    def __init__(
        self,
        *,
        target: str,
        token: str,
        connect_timeout_s: float,
        cpus: Iterable[int] | None = None,
        tls: LinkTls | None = None,
    ) -> None:
        self._target = target
        self._tls = tls
        self._trouble = ""
        self._metadata = ((AUTHORIZATION_KEY, f"Bearer {token}"),)
        self._connect_timeout_s = connect_timeout_s
        self._cpus = None if cpus is None else frozenset(cpus)
        self._incoming: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[ranks_pb2.RankMessage | _Signal] = queue.SimpleQueue()
        self._returned: Event | None = None
        self._pulse: _Pulse | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._hang_up: Callable[[], object] = self._closing.set

    def start(self, observer: Callable[[Event], None]) -> None:
        """Dial, and wait for the gateway for up to the connect timeout. `observer` runs on the reading thread."""
        self._thread = threading.Thread(target=self._read_all, args=(observer,), name="gateway-link", daemon=True)
        self._thread.start()

    def receive(self) -> Event:
        """Return the next event; block until there is one."""
        event, self._returned = self._returned, None
        return self._incoming.get() if event is None else event

    def wait(self, timeout_s: float) -> bool:
        """Return whether there is an event to receive, or one comes within `timeout_s`."""
        if self._returned is None:
            try:
                self._returned = self._incoming.get(block=timeout_s > 0, timeout=timeout_s)
            except queue.Empty:
                return False
        return True

    def peek(self) -> Event | None:
        """Return the event that `receive` would return now, and leave it there; None if there is none."""
        return self._returned if self.wait(0.0) else None

    def put_back(self, event: Event) -> None:
        """Return the last event to the queue's front, so that `receive` returns it next."""
        self._returned = event

    def send(self, message: ranks_pb2.RankMessage) -> None:
        """Queue a message. It is lost if the stream has ended, which StreamEnded reports."""
        self._outgoing.put(message)

    def start_heartbeats(self, interval_s: float, beat: Callable[[], ranks_pb2.RankMessage]) -> None:
        """Send `beat()` now and every `interval_s` until `stop_heartbeats`. It runs on the sending thread."""
        self._pulse = _Pulse(interval_s, beat)
        self._outgoing.put(_Signal.LOOK_AGAIN)

    def stop_heartbeats(self) -> None:
        """Send no more heartbeats."""
        self._pulse = None

    def inject(self, event: LeaveRequested) -> None:
        """Queue an event of this process itself."""
        self._incoming.put(event)

    def finish(self, timeout_s: float) -> None:
        """Send what is queued, close this side, and give the gateway `timeout_s` to close its own."""
        self._outgoing.put(_Signal.FINISH)
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._hang_up()

    def _read_all(self, observer: Callable[[Event], None]) -> None:
        def deliver(event: Event) -> None:
            observer(event)
            self._incoming.put(event)

        try:
            if self._cpus:
                with suppress(OSError):  # the cpuset has changed meanwhile and allows none of them
                    os.sched_setaffinity(0, self._cpus)
            ended = self._read_stream(deliver)
        except Exception as error:  # noqa: BLE001 — the thread's top: the main thread must know
            _log.exception("gateway=%s: the link failed", self._target)
            ended = StreamEnded(f"the link failed: {type(error).__name__}: {error}", permanent=False)
        deliver(ended)

    def _read_stream(self, deliver: Callable[[Event], None]) -> StreamEnded:
        if not self._await_gateway():
            reason = f"no gateway at {self._target} within {self._connect_timeout_s:g} s{self._trouble}"
            return StreamEnded(reason, permanent=False)
        with self._channel() as channel:
            call = ranks_pb2_grpc.RanksStub(channel).Join(self._messages(), metadata=self._metadata)
            self._hang_up = call.cancel
            try:
                for message in call:
                    arrived_s = time.monotonic()
                    for each in one_by_one(message):
                        deliver(Arrival(arrived_s, each))
            except grpc.RpcError as error:
                return _ended_by(error)
        return StreamEnded("the gateway closed the stream", permanent=False)

    def _channel(self) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(self._target, options=_CHANNEL_OPTIONS)
        return grpc.secure_channel(self._target, self._tls.credentials(), options=_CHANNEL_OPTIONS)

    def _messages(self) -> Iterator[ranks_pb2.RankMessage]:
        """Yield queued messages, and a heartbeat whenever one is due; on gRPC's thread."""
        pulse, due_s = self._pulse, 0.0
        while True:
            try:
                timeout_s = None if pulse is None else max(0.0, due_s - time.monotonic())
                message = self._outgoing.get(timeout=timeout_s)
            except queue.Empty:
                message = _Signal.LOOK_AGAIN
            if message is _Signal.FINISH:
                return
            if not isinstance(message, _Signal):
                yield message
            if pulse is not self._pulse:
                pulse, due_s = self._pulse, 0.0
            if pulse is not None and time.monotonic() >= due_s:
                due_s = time.monotonic() + pulse.interval_s
                yield pulse.beat()

    def _await_gateway(self) -> bool:
        """Knock until someone listens. gRPC's own waiting leaves a thread behind that fails when it closes."""
        deadline = time.monotonic() + self._connect_timeout_s
        pause_s = _KNOCK_PAUSE_S
        while not self._closing.wait(pause_s):
            try:
                _knock(self._target, self._tls)
                return True
            except OSError as error:
                self._note(error)
                if time.monotonic() > deadline:
                    _log.error("gateway=%s: %s", self._target, error)
                    return False
            pause_s = min(2 * pause_s, _LONGEST_KNOCK_PAUSE_S, max(_KNOCK_PAUSE_S, deadline - time.monotonic()))
        return False

    def _note(self, error: OSError) -> None:
        """Log why the gateway and this rank do not trust one another, once for each reason, and keep it."""
        trouble = f": {error}" if self._tls is not None and not isinstance(error, ConnectionRefusedError) else ""
        if trouble and trouble != self._trouble:
            _log.warning("gateway=%s%s", self._target, trouble)
        self._trouble = trouble


def one_by_one(message: ranks_pb2.GatewayMessage) -> Iterator[ranks_pb2.GatewayMessage]:
    """Split a message with several plans into one message for each; yield others as they are. Changes `message`."""
    further = [ranks_pb2.GatewayMessage(epoch=message.epoch, step_plan=plan) for plan in message.further_plans]
    message.ClearField("further_plans")
    yield message
    yield from further


def _knock(target: str, tls: LinkTls | None) -> None:
    """Connect, with `tls` find out whether both trust one another, and hang up. Raises OSError."""
    if target.startswith("unix:"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(target.removeprefix("unix:"))
    else:
        host, _, port = target.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S) as connection:
            if tls is not None:
                tls.shake_hands(connection, host.strip("[]"))


def _ended_by(error: grpc.RpcError) -> StreamEnded:
    if not isinstance(error, grpc.Call):
        return StreamEnded(f"the stream broke: {error}", permanent=False)
    code = error.code()
    return StreamEnded(f"the stream ended with {code.name}: {error.details()}", permanent=code in _REFUSALS)

"""Connections that do not behave, at any port of a gateway. None of them may disturb anybody else."""

from __future__ import annotations

import json
import os
import random
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from signal import SIGKILL, SIGSTOP
from typing import Any, Final

import grpc
import psutil

from hetero_api.contract import AUTHORIZATION_KEY
from hetero_api.v1 import ranks_pb2, ranks_pb2_grpc
from tests.chaos.scene import Scene
from tests.support.local_group import REPOSITORY

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""With an empty SETTINGS frame."""
HOLD_S: Final = 0.7
NUM_SLOW: Final = 20
NUM_IDLE: Final = 150
_RESET: Final = struct.pack("ii", 1, 0)
Stranger = Callable[[Scene], None]


def _dial(address: str, *, small: bool = False) -> socket.socket:
    host, _, port = address.rpartition(":")
    dialled = socket.socket()
    if small:
        dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    dialled.settimeout(20)
    dialled.connect((host, int(port)))
    return dialled


@contextmanager
def _http(scene: Scene, *, small: bool = False) -> Iterator[socket.socket]:
    """A connection to the HTTP door, within TLS where it asks for that."""
    with ExitStack() as stack:
        dialled: socket.socket = stack.enter_context(_dial(scene.record.http, small=small))
        tls: ssl.SSLContext | None = scene.doors().tls
        yield dialled if tls is None else stack.enter_context(tls.wrap_socket(dialled, server_hostname="127.0.0.1"))


def _request(scene: Scene, *, max_tokens: int = 400, stream: bool = True) -> bytes:
    doors = scene.doors()
    body = json.dumps(
        {
            "model": doors.model, "prompt": "a stranger", "max_tokens": max_tokens, "stream": stream, "temperature": 0,
            "ignore_eos": True,
        }
    ).encode()  # fmt: skip
    key = f"Authorization: Bearer {doors.access.api_key}\r\n" if doors.access.api_key else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\n{key}Content-Type: application/json\r\nContent-Length: "
    return head.encode() + f"{len(body)}\r\n\r\n".encode() + body


def http_slow_head(scene: Scene) -> None:
    _say_slowly(scene, _request(scene)[:40])


def http_slow_body(scene: Scene) -> None:
    request = _request(scene)
    head = request.index(b"\r\n\r\n") + 4
    with _http(scene) as connection:
        connection.sendall(request[:head])
        for byte in request[head:-1]:
            connection.sendall(bytes([byte]))
            time.sleep(HOLD_S / len(request))


def _say_slowly(scene: Scene, text: bytes) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(_http(scene)) for _ in range(NUM_SLOW)]
        for byte in text:
            for connection in connections:
                connection.sendall(bytes([byte]))
            time.sleep(HOLD_S / len(text))


def http_half_closed(scene: Scene) -> None:
    """Asks, closes its own direction, and reads what comes."""
    with _http(scene) as connection:
        connection.sendall(_request(scene, max_tokens=30))
        if not isinstance(connection, ssl.SSLSocket):
            connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while connection.recv(4096):
                pass


def http_reset(scene: Scene) -> None:
    """Breaks the connection in the middle of its answer, unread bytes and all."""
    with _http(scene) as connection:
        connection.sendall(_request(scene))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def http_unread(scene: Scene) -> None:
    """Asks for long answers and reads nothing of them."""
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(_http(scene, small=True)).sendall(_request(scene))
        time.sleep(2 * HOLD_S)


def http_garbage(scene: Scene) -> None:
    _say_garbage(scene.record.http)


def grpc_garbage(scene: Scene) -> None:
    _say_garbage(scene.record.inference)


def admin_garbage(scene: Scene) -> None:
    _say_garbage(scene.record.admin)


def ranks_garbage(scene: Scene) -> None:
    _say_garbage(ranks_address(scene))


def _say_garbage(address: str) -> None:
    drawn = random.Random(address)
    for start in (b"", PREFACE, b"GET / HTTP/1.1\r\n"):
        with _dial(address) as connection, suppress(ConnectionError):
            connection.sendall(start + drawn.randbytes(5000))
            connection.recv(1000)


def grpc_silent(scene: Scene) -> None:
    """Begins HTTP/2, and then says no more."""
    with ExitStack() as stack:
        for _ in range(NUM_SLOW):
            stack.enter_context(_dial(scene.record.inference)).sendall(PREFACE)
        time.sleep(HOLD_S)


def grpc_half_closed(scene: Scene) -> None:
    with _dial(scene.record.inference) as connection, suppress(ConnectionError):
        connection.sendall(PREFACE)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def idle_connections(scene: Scene) -> None:
    """Many that say nothing, at every port."""
    record = scene.record
    with ExitStack() as stack:
        for address in (record.inference, record.http, record.admin, ranks_address(scene)):
            for _ in range(NUM_IDLE):
                stack.enter_context(_dial(address))
        time.sleep(HOLD_S)


def client_killed(scene: Scene) -> None:
    """A real client of ours, as a process, ended by SIGKILL in the middle of its streams."""
    _end_client(scene, freeze=False)


def client_frozen(scene: Scene) -> None:
    """The same, frozen before, so that it takes nothing of what is sent."""
    _end_client(scene, freeze=True)


def _end_client(scene: Scene, *, freeze: bool) -> None:
    doors = scene.doors()
    command = [sys.executable, "-m", "tests.chaos.strangers", doors.grpc]
    environment = {**os.environ, "HETERO_API_KEY": doors.access.api_key}
    if scene.certificates is not None:
        authority = scene.folder / "ca.pem"
        authority.write_bytes(doors.access.ca or b"")
        environment["HETERO_CA_FILE"] = str(authority)
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        client.stdout.readline()  # it streams
        if freeze:
            client.send_signal(SIGSTOP)
            time.sleep(HOLD_S)
        client.send_signal(SIGKILL)


def ranks_address(scene: Scene) -> str:
    """The port that ranks dial, which only the launcher and they are told."""
    argv = psutil.Process(scene.group.record.processes["gateway"]).cmdline()
    if (port := argv[argv.index("--ranks-port") + 1]) != "0":
        return f"127.0.0.1:{port}"  # of a gateway that was restarted
    state = scene.group._run.read_gateway_state()
    assert state is not None
    return str(state["ranks"])


def false_rank(scene: Scene) -> None:
    """Says that it is a rank, with another token."""
    with grpc.insecure_channel(ranks_address(scene)) as channel:
        stub: Any = ranks_pb2_grpc.RanksStub(channel)
        metadata = ((AUTHORIZATION_KEY, "Bearer stolen"),)
        try:
            list(stub.Join(iter([ranks_pb2.RankMessage()]), metadata=metadata, timeout=10))
        except grpc.RpcError as error:
            code = error.code()
            assert code is grpc.StatusCode.UNAUTHENTICATED, code
        else:
            raise AssertionError("a rank with another token was let in")


STRANGERS: Final[tuple[Stranger, ...]] = (
    http_slow_head, http_slow_body, http_half_closed, http_reset, http_unread, http_garbage, grpc_garbage, grpc_silent,
    grpc_half_closed, idle_connections, client_killed, client_frozen, admin_garbage, ranks_garbage, false_rank,
)  # fmt: skip


def _stream_until_killed(address: str) -> None:
    from hetero_client import Delta, HeteroClient, SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    with HeteroClient(address) as client:
        for event in client.generate("a client", sampling=sampling):
            if isinstance(event, Delta):
                print("streams", flush=True)


if __name__ == "__main__":
    _stream_until_killed(sys.argv[1])

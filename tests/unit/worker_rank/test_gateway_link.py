from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from hetero_api.v1 import ranks_pb2
from hetero_worker.process.gateway_link import Arrival, Event, GatewayLink, StreamEnded
from tests.support.scripted_gateway import TOKEN, ScriptedGateway

pytestmark = pytest.mark.unit


def dial(
    gateway: ScriptedGateway,
    *,
    token: str = TOKEN,
    connect_timeout_s: float = 20.0,
    cpus: tuple[int, ...] = (),
    observer: Callable[[Event], None] = lambda event: None,
) -> GatewayLink:
    link = GatewayLink(target=gateway.target, token=token, connect_timeout_s=connect_timeout_s, cpus=cpus)
    link.start(observer)
    return link


def hello(pool: str) -> ranks_pb2.RankMessage:
    return ranks_pb2.RankMessage(hello=ranks_pb2.Hello(pool=pool))


def test_messages_pass_both_ways_in_order(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        link = dial(gateway)
        link.send(hello("a"))
        link.send(hello("b"))
        gateway.tell(1, abort=ranks_pb2.Abort(reason="x"))
        gateway.tell(2, shutdown=ranks_pb2.Shutdown(reason="y"))

        assert [gateway.expect("hello").hello.pool for _ in range(2)] == ["a", "b"]
        events = [link.receive(), link.receive()]
        link.finish(5)
        assert [event.message.epoch for event in events if isinstance(event, Arrival)] == [1, 2]


def test_a_cpuset_that_allows_none_of_the_links_cpus_does_not_end_it(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        link = dial(gateway, cpus=(1023,))
        link.send(hello("a"))
        assert gateway.expect("hello").hello.pool == "a"
        link.finish(5)


def test_an_event_that_was_waited_for_is_the_next_to_receive(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        link = dial(gateway)
        assert not link.wait(0.0)
        for epoch in (1, 2):
            gateway.tell(epoch, abort=ranks_pb2.Abort(reason="x"))
        assert link.wait(20.0)
        assert link.wait(0.0)
        events = [link.receive(), link.receive()]
        assert not link.wait(0.0)
        link.finish(5)
    assert [event.message.epoch for event in events if isinstance(event, Arrival)] == [1, 2]


def test_waits_for_a_gateway_that_is_not_up_yet(tmp_path: Path) -> None:
    gateway = ScriptedGateway(tmp_path)
    link = dial(gateway)
    link.send(hello("early"))

    with gateway:
        assert gateway.expect("hello").hello.pool == "early"
        link.finish(5)


def test_gateway_that_never_comes_up_ends_the_wait(tmp_path: Path) -> None:
    link = dial(ScriptedGateway(tmp_path), connect_timeout_s=0.3)

    event = link.receive()

    assert isinstance(event, StreamEnded)
    assert "no gateway at" in event.reason
    assert "within 0.3 s" in event.reason
    assert not event.permanent
    link.finish(5)


def test_leaving_while_there_is_no_gateway_takes_no_time(tmp_path: Path) -> None:
    link = dial(ScriptedGateway(tmp_path), connect_timeout_s=600)

    link.finish(10)

    assert isinstance(link.receive(), StreamEnded)


@pytest.mark.parametrize(
    ("code", "permanent"),
    [
        (grpc.StatusCode.UNAVAILABLE, False),
        (grpc.StatusCode.ALREADY_EXISTS, False),
        (grpc.StatusCode.FAILED_PRECONDITION, False),
        (grpc.StatusCode.PERMISSION_DENIED, True),
    ],
)
def test_status_that_ends_the_stream_says_whether_trying_again_helps(
    code: grpc.StatusCode, permanent: bool, tmp_path: Path
) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        link = dial(gateway)
        gateway.hang_up(code)

        event = link.receive()

        link.finish(5)
        assert event == StreamEnded(f"the stream ended with {code.name}: as the test says", permanent)


def test_wrong_token_is_permanent(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        link = dial(gateway, token="guess")

        event = link.receive()

        link.finish(5)
        assert isinstance(event, StreamEnded)
        assert event.permanent
        assert "UNAUTHENTICATED" in event.reason


def test_observer_sees_an_abort_before_anyone_takes_it(tmp_path: Path) -> None:
    seen = threading.Event()
    with ScriptedGateway(tmp_path) as gateway:
        link = dial(gateway, observer=lambda event: seen.set())
        gateway.tell(1, abort=ranks_pb2.Abort())

        assert seen.wait(20)
        link.finish(5)


def test_what_was_sent_before_finishing_arrives(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        link = dial(gateway)
        gateway.tell(1, abort=ranks_pb2.Abort())
        link.receive()
        for number in range(100):
            link.send(hello(str(number)))
        link.finish(20)

        assert [gateway.expect("hello").hello.pool for _ in range(100)] == [str(n) for n in range(100)]

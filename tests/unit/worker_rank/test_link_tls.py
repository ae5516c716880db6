"""A rank and its gateway know one another by certificates, or the rank says why they do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from hetero_api.v1 import ranks_pb2
from hetero_gateway.server.access.tls import ServerTls, TlsFiles
from hetero_worker.process.gateway_link import Arrival, GatewayLink, StreamEnded
from hetero_worker.process.link_tls import LinkTls
from tests.support.inside_certificates import EXPIRED, Inside
from tests.support.scripted_gateway import TOKEN, ScriptedGateway

pytestmark = pytest.mark.unit

OURS, THEIRS, OLD = Inside.new(), Inside.new(), Inside.new(age=EXPIRED)


def dial(gateway: ScriptedGateway, folder: Path, *, connect_timeout_s: float = 20.0) -> GatewayLink:
    target = gateway.target.replace("127.0.0.1", "localhost")
    link = GatewayLink(target=target, token=TOKEN, connect_timeout_s=connect_timeout_s, tls=LinkTls(folder))
    link.start(lambda event: None)
    return link


def encrypted(folder: Path) -> ScriptedGateway:
    """A gateway with the product's own server side."""
    return ScriptedGateway(credentials=ServerTls(TlsFiles(folder, folder)).grpc_credentials())


def careless(inside: Inside) -> ScriptedGateway:
    """A gateway that does not try its certificate first."""
    authority, certificate, key = inside.values("ca.crt", "gateway.crt", "gateway.key")
    return ScriptedGateway(
        credentials=grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
    )


def test_messages_pass_both_ways_where_both_have_certificates_of_the_group(tmp_path: Path) -> None:
    with encrypted(OURS.gateway(tmp_path / "gateway")) as gateway:
        link = dial(gateway, OURS.rank(tmp_path / "rank"))
        link.send(ranks_pb2.RankMessage(hello=ranks_pb2.Hello(pool="a")))
        gateway.tell(1, abort=ranks_pb2.Abort(reason="x"))
        assert gateway.expect("hello").hello.pool == "a"
        event = link.receive()
        link.finish(5)
    assert isinstance(event, Arrival)
    assert event.message.epoch == 1


def posing_as_gateway(inside: Inside) -> Inside:
    """A rank that shows its own certificate as a gateway's."""
    certificate, key = inside.values("rank.crt", "rank.key")
    return Inside({**inside.data, "gateway.crt": certificate, "gateway.key": key})


REFUSALS: dict[str, tuple[Callable[[], ScriptedGateway], Inside, str]] = {
    "the gateway is of another authority": (lambda: careless(THEIRS), OURS, "unable to get local issuer certificate"),
    "the gateway has another name": (
        lambda: careless(Inside.new("x-gateway.other.svc", stored=OURS)), OURS,
        "certificate is not valid for 'localhost'",
    ),
    "the gateway's certificate has expired": (
        lambda: careless(OLD), Inside.new(stored=OLD), "verify failed: certificate has expired",
    ),
    "a rank's certificate stands in for the gateway's": (
        lambda: careless(posing_as_gateway(OURS)), OURS, "certificate purpose",
    ),
    "the rank is of another authority": (
        lambda: careless(OURS), THEIRS.trusting(OURS),
        "this rank's own certificate: unable to get local issuer certificate",
    ),
    "the rank's certificate has expired": (
        lambda: careless(OURS), Inside.new(age=EXPIRED, stored=OURS).trusting(OURS),
        "this rank's own certificate: certificate has expired",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("start", "rank", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_who_is_not_of_the_group_is_refused_with_the_reason(
    start: Callable[[], ScriptedGateway], rank: Inside, reason: str, tmp_path: Path
) -> None:
    with start() as gateway:
        link = dial(gateway, rank.rank(tmp_path / "rank"), connect_timeout_s=0.3)
        event = link.receive()
        link.finish(5)
        assert gateway.heard_nothing()
    assert isinstance(event, StreamEnded)
    assert not event.permanent, "a certificate may be renewed"
    assert "within 0.3 s: " in event.reason
    assert reason in event.reason


def test_a_gateway_that_trusts_another_authority_hangs_up(tmp_path: Path) -> None:
    with careless(OURS.trusting(THEIRS)) as gateway:
        link = dial(gateway, OURS.rank(tmp_path / "rank"), connect_timeout_s=0.3)
        event = link.receive()
        link.finish(5)
        assert gateway.heard_nothing()
    assert isinstance(event, StreamEnded)
    assert "it does not take this rank's certificate" in event.reason


def test_a_gateway_without_certificates_hears_no_token(tmp_path: Path) -> None:
    with ScriptedGateway() as gateway:
        link = dial(gateway, OURS.rank(tmp_path / "rank"), connect_timeout_s=0.3)
        event = link.receive()
        link.finish(5)
        assert gateway.heard_nothing()
    assert isinstance(event, StreamEnded)


def test_a_rank_without_certificates_gets_no_answer(tmp_path: Path) -> None:
    with encrypted(OURS.gateway(tmp_path / "gateway")) as gateway:
        link = GatewayLink(target=gateway.target, token=TOKEN, connect_timeout_s=5.0)
        link.start(lambda event: None)
        event = link.receive()
        link.finish(5)
        assert gateway.heard_nothing()
    assert isinstance(event, StreamEnded)


def test_files_that_are_not_there_yet_are_waited_for(tmp_path: Path) -> None:
    with encrypted(OURS.gateway(tmp_path / "gateway")) as gateway:
        link = dial(gateway, tmp_path / "rank")
        OURS.rank(tmp_path / "rank")
        link.send(ranks_pb2.RankMessage(hello=ranks_pb2.Hello(pool="a")))
        assert gateway.expect("hello").hello.pool == "a"
        link.finish(5)


def test_renewed_files_count_for_the_next_connection(tmp_path: Path) -> None:
    for certificates in (OURS, Inside.new(stored=OURS)):
        with encrypted(OURS.gateway(tmp_path / "gateway")) as gateway:
            link = dial(gateway, certificates.rank(tmp_path / "rank"))
            link.send(ranks_pb2.RankMessage(hello=ranks_pb2.Hello(pool="a")))
            assert gateway.expect("hello").hello.pool == "a"
            link.finish(5)

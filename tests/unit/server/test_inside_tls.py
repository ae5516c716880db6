"""The gateway's ports for ranks and administrators: whoever shows no certificate of the group is not heard."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from hetero_api.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from hetero_gateway.server.access.files import AccessFiles
from hetero_gateway.server.errors import TlsError
from tests.support.inside_certificates import EXPIRED, NAME, Inside
from tests.unit.group.group_setup import PATIENCE_S
from tests.unit.server.server_setup import GatewayBench, served_model

pytestmark = pytest.mark.unit

LOOK_S = 0.01
OURS, THEIRS = Inside.new(), Inside.new()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[GatewayBench]:
    files = AccessFiles.load(inside_folder=OURS.gateway(tmp_path / "inside"), look_s=LOOK_S)
    async with GatewayBench(served_model(tmp_path), admin_token="secret", files=files) as bench:
        yield bench


def channel_to(address: str, inside: Inside) -> grpc.aio.Channel:
    target = f"{NAME}:{address.rpartition(':')[2]}"
    return grpc.aio.secure_channel(target, inside.operator().credentials(), options=[("grpc.enable_http_proxy", 0)])


async def topology(channel: grpc.aio.Channel, token: str = "secret") -> admin_pb2.GetTopologyResponse:
    metadata = (("authorization", f"Bearer {token}"),)
    request = admin_pb2.GetTopologyRequest()
    return await admin_pb2_grpc.AdminStub(channel).GetTopology(request, metadata=metadata, timeout=PATIENCE_S)


async def refusal(channel: grpc.aio.Channel) -> grpc.StatusCode:
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await topology(channel)
    return caught.value.code()


async def test_whoever_is_of_the_group_still_needs_the_token(bench: GatewayBench) -> None:
    async with channel_to(bench.addresses.admin, OURS) as channel:
        assert (await topology(channel)).name
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await topology(channel, "wrong")


@pytest.mark.parametrize("port", ["admin", "ranks"])
async def test_neither_port_answers_those_of_another_group_or_without_certificates(
    bench: GatewayBench, port: str
) -> None:
    address: str = getattr(bench.addresses, port)
    target = f"{NAME}:{address.rpartition(':')[2]}"
    for channel in (
        channel_to(address, THEIRS.trusting(OURS)),
        channel_to(address, Inside.new(age=EXPIRED, stored=OURS).trusting(OURS)),
        grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(OURS.data["ca.crt"])),
        grpc.aio.insecure_channel(target),
    ):
        assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE


async def test_the_doors_for_clients_stay_as_they_are(bench: GatewayBench) -> None:
    info = await bench.inference().GetServerInfo(inference_pb2.GetServerInfoRequest())
    assert info.version


async def test_renewed_certificates_count_from_the_next_connection_on(bench: GatewayBench, tmp_path: Path) -> None:
    async with channel_to(bench.addresses.admin, OURS) as kept:
        await topology(kept)
        Inside.new().gateway(tmp_path / "inside")  # another authority, which nobody else knows yet
        while await answers(channel_to(bench.addresses.admin, OURS)):
            pass
        assert (await topology(kept)).name, "connections live on"
        OURS.gateway(tmp_path / "inside")
        while not await answers(channel_to(bench.addresses.admin, OURS)):
            pass


async def answers(channel: grpc.aio.Channel) -> bool:
    async with channel:
        try:
            await topology(channel)
        except grpc.aio.AioRpcError:
            return False
    return True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: Inside.new(age=EXPIRED).gateway(folder), "certificate has expired"),
        (lambda folder: (folder / "tls.key").write_bytes(THEIRS.data["gateway.key"]), "KEY_VALUES_MISMATCH|key values"),
        (lambda folder: (folder / "ca.crt").unlink(), r"ca\.crt: cannot be read"),
    ],
    ids=["expired", "the key of another", "no authority"],
)
def test_a_gateway_does_not_start_with_certificates_that_are_wrong(change: object, reason: str, tmp_path: Path) -> None:
    folder = OURS.gateway(tmp_path / "inside")
    assert callable(change)
    change(folder)
    with pytest.raises(TlsError, match=reason):
        AccessFiles.load(inside_folder=folder)

"""An administrator's token reaches the gateway's Admin service."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer

from hetero_api.contract import (
    ENV_ADMIN_TOKEN_FILE,
    ENV_API_KEY,
    ENV_CA_FILE,
    ENV_CLIENT_CERT_FILE,
    ENV_CLIENT_KEY_FILE,
    SECRET_GATEWAY_CERTIFICATE,
    SECRET_GATEWAY_KEY,
    SECRET_INSIDE_AUTHORITY,
    SECRET_OPERATOR_CERTIFICATE,
    SECRET_OPERATOR_KEY,
)
from hetero_api.v1 import admin_pb2, admin_pb2_grpc
from hetero_client.admin import AdminClient
from hetero_client.cli.options import admin_client, admin_token
from hetero_client.errors import AccessError, CredentialsError
from tests.support.inside_certificates import NAME, Inside

pytestmark = pytest.mark.unit


class GuardedAdmin(admin_pb2_grpc.AdminServicer):
    def GetTopology(self, request: Any, context: Any) -> admin_pb2.GetTopologyResponse:  # noqa: N802
        if dict(context.invocation_metadata()).get("authorization") != "Bearer s3cret":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "show the token")
        return admin_pb2.GetTopologyResponse(name="g", state=admin_pb2.GROUP_STATE_READY)

    def GetStats(self, request: Any, context: Any) -> admin_pb2.GetStatsResponse:  # noqa: N802
        return admin_pb2.GetStatsResponse()

    def _refuse(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not asked for here")

    ResetCache = Sleep = WakeUp = Drain = Profile = PlaceExperts = UpdateWeights = _refuse

    LoadAdapter = UnloadAdapter = ListAdapters = _refuse


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    admin_pb2_grpc.add_AdminServicer_to_server(GuardedAdmin(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_with_the_token_the_topology_is_told(address: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    with AdminClient(address, token=admin_token({ENV_ADMIN_TOKEN_FILE: str(file)})) as admin:
        assert admin.topology().name == "g"


def test_without_it_access_is_refused(address: str) -> None:
    with AdminClient(address, token=admin_token({})) as admin, pytest.raises(AccessError):
        admin.topology()


def test_a_token_file_that_is_not_there_is_a_usage_error() -> None:
    with pytest.raises(typer.BadParameter, match="/no/such"):
        admin_token({ENV_ADMIN_TOKEN_FILE: "/no/such"})


def test_no_token_travels_unencrypted_to_another_machine() -> None:
    with pytest.raises(CredentialsError, match="unencrypted"):
        AdminClient("192.0.2.1:50052", token="s3cret")


def test_the_command_shows_the_certificates_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = Inside.new()
    key, certificate, authority = inside.values(SECRET_GATEWAY_KEY, SECRET_GATEWAY_CERTIFICATE, SECRET_INSIDE_AUTHORITY)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    admin_pb2_grpc.add_AdminServicer_to_server(GuardedAdmin(), server)
    credentials = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    files = {
        ENV_CA_FILE: SECRET_INSIDE_AUTHORITY,
        ENV_CLIENT_CERT_FILE: SECRET_OPERATOR_CERTIFICATE,
        ENV_CLIENT_KEY_FILE: SECRET_OPERATOR_KEY,
    }
    for variable, name in files.items():
        (tmp_path / name).write_bytes(inside.data[name])
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setenv(ENV_API_KEY, "s3cret")
    with admin_client(f"{NAME}:{port}", None) as admin:
        assert admin.topology().name == "g"
    server.stop(None).wait()

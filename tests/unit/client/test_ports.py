"""A port that is taken is told with the option and the field that choose another."""

from __future__ import annotations

import socket

import pytest

from hetero_client.errors import PortTakenError
from hetero_client.launcher.commands import HOST
from hetero_client.launcher.local_group import check_port

pytestmark = pytest.mark.unit


def test_a_taken_port_is_told_with_what_chooses_another() -> None:
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"port {port} .*--http-port N .*or spec.gateway.service.httpPort"):
            check_port(port, option="--http-port", field_path="spec.gateway.service.httpPort")
    check_port(port, option="--http-port", field_path="spec.gateway.service.httpPort")


def test_port_0_is_always_free() -> None:
    check_port(0, option="--port", field_path="spec.gateway.service.port")

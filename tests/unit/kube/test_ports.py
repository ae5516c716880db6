"""Ports that tests give to servers."""

from __future__ import annotations

import pytest

from tests.support.kube.ports import RANGE, ports_of

pytestmark = pytest.mark.unit


def test_no_two_workers_give_the_same_port() -> None:
    shares = [ports_of(f"gw{number}", 4) for number in range(4)]
    assert sorted(port for share in shares for port in share) == list(RANGE)
    assert list(ports_of("gw0", 1)) == list(RANGE)

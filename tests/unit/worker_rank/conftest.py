"""Fixtures of a rank's tests."""

from __future__ import annotations

import pytest

from tests.support.tcp_threads import NATIVE, MakeExchanges


@pytest.fixture(params=NATIVE)
def exchanges(request: pytest.FixtureRequest) -> MakeExchanges:
    """Each native exchange, with threads for ranks."""
    return NATIVE[request.param]

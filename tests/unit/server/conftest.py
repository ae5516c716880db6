"""Gateways for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.server.server_setup import GatewayBench, served_model


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[GatewayBench]:
    """A gateway whose rank has not joined."""
    async with GatewayBench(served_model(tmp_path)) as running:
        yield running


@pytest.fixture
async def ready(bench: GatewayBench) -> GatewayBench:
    """A gateway that serves."""
    await bench.join()
    return bench

"""Measurements and packed weights that the groups of these tests share."""

from __future__ import annotations

import pytest

from tests.support.local_group import LocalGroupProcess


@pytest.fixture(scope="session", autouse=True)
def _kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Only the first start of a kind of group measures this machine and packs the weights."""
    LocalGroupProcess.kept = tmp_path_factory.mktemp("kept")

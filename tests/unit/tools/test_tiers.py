"""Every file and test of tests/extended.toml exists, so that no typing error puts a test back or loses one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import extended_tests

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", sorted(extended_tests()))
def test_an_extended_test_exists(name: str) -> None:
    file, _, test = name.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    function = test.rpartition("::")[2].partition("[")[0]
    assert not test or re.search(rf"def {re.escape(function)}\(", text), name

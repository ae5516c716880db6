"""Every mutant can be made: its text stands in its file exactly once, and its tests exist."""

from __future__ import annotations

import pytest

from tools.mutants import MUTANTS, ROOT, Mutant

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made(mutant: Mutant) -> None:
    assert (ROOT / mutant.path).read_text(encoding="utf-8").count(mutant.old) == 1
    assert all((ROOT / test).is_file() for test in mutant.tests)

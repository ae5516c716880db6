"""Some pairs of `make chaos`, as a process of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.local_group import REPOSITORY

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_the_quick_pairs_of_faults_and_moments_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--quick"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout

"""A dozen faults of `make chaos`, at moments of a real group: the harness works, and what it holds does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quick_faults_end_as_they_should() -> None:
    command = [sys.executable, "-m", "tests.chaos", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert " 0 failed" in done.stdout.splitlines()[-1]

"""bench.gpu runs from end to end where there is no GPU, says so, and its ranks need no pydantic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
WITHOUT_PYDANTIC = "import sys; sys.modules['pydantic'] = None; "
"""Any import of it raises ImportError."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": ".:worker:protos"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_a_tiny_shape_goes_through_every_section_on_host_tensors(tmp_path: Path) -> None:
    asked = ["--device", "cpu", "--tiny", "--cpu-ranks", "1", "--limit-s", "200", "--results", str(tmp_path)]
    done = run("-m", "bench.gpu", *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    written = json.loads(file.read_text())
    assert written["device"].startswith("HOST TENSORS, no GPU")
    assert not written["is_gpu"]
    measured = {row["what"] for row in written["rows"] if row["tokens_per_s"]}
    assert {"tiny, 6 requests", "tiny, decode at batch 1", "tiny, async steps off, batch 32"} <= measured
    assert {"tiny, all on, batch 1", "tiny, overlap off, batch 32"} <= measured
    assert any(what.startswith("tiny in ") for what in measured)


def check(stage: str, results: Path, *options: str, limit_s: int = 200) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(results), "LIMIT_S": str(limit_s)}
    return subprocess.run(
        ["sh", "bench/gpu/check.sh", stage, *options],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_the_first_call_on_hardware_runs_the_tests_and_keeps_their_results(tmp_path: Path) -> None:
    """All of them are skipped here, by name, and pytest says by 5 that none ran."""
    done = check("tests", tmp_path)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "SKIPPED" in done.stdout
    assert {"ranks.xml", "kernels.log", "memory.xml"} <= {path.name for path in tmp_path.iterdir()}


def test_the_second_call_is_interrupted_in_time_and_leaves_its_table(tmp_path: Path) -> None:
    done = check("bench", tmp_path, "--device", "cpu", "--tiny", "--cpu-ranks", "1", limit_s=110)
    assert "check.sh bench: exit status" in done.stdout, done.stderr
    (file,) = tmp_path.glob("gpu-*.json")
    assert json.loads(file.read_text())["device"].startswith("HOST TENSORS, no GPU")


def test_a_stage_that_there_is_not_is_refused_with_the_usage() -> None:
    done = run("-c", "import subprocess, sys; sys.exit(subprocess.call(['sh', 'bench/gpu/check.sh', 'all']))")
    assert done.returncode == 2
    assert "check.sh tests" in done.stderr


@pytest.mark.parametrize("module", ["bench.gpu.rank", "tests.support.mixed_runners"])
def test_its_ranks_need_no_pydantic(module: str) -> None:
    late = "import hetero_worker.process.messages, hetero_worker.probe.speeds, hetero_worker.backends.cpu"
    done = run("-c", f"{WITHOUT_PYDANTIC}import {module}; {late}")
    assert done.returncode == 0, done.stderr


def test_what_drives_the_ranks_does_without_torch() -> None:
    done = run("-c", "import bench.gpu.program, sys; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr

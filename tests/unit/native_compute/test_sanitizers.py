"""The kernels under AddressSanitizer and UBSan, over random shapes; and with a fault put in, which must show."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_worker.native.build import COMPUTE_FOLDER, build_compute, find_compiler
from tests.support.native_compute import ENV_SANITIZED
from tests.support.native_stress import lacks, mutant

pytestmark = [pytest.mark.unit, pytest.mark.slow, pytest.mark.timeout(1200)]
"""The library is built for six instruction sets, while other tests use the cores, too."""

FAULT = ": row) * from, bytes);", ": row) * from, bytes + 1);"
FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SHAPES = Path(__file__).with_name("test_random_shapes.py")


def run_sanitized(folder: Path, sources: Path, *arguments: str) -> tuple[int, str]:
    """Return pytest's status, and all reports of the sanitizers, of the random shapes with a library of `sources`."""
    library = build_compute(folder / "libsanitized.so", folder=sources, flags=FLAGS)
    log = folder / "report"
    environment = {
        **os.environ,
        ENV_SANITIZED: str(library),
        "LD_PRELOAD": " ".join(_runtime(name) for name in ("libasan.so", "libubsan.so")),
        "PYTHONMALLOC": "malloc",
        # Python frees little of what it has at its end.
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={log}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={log}",
    }
    command = [sys.executable, "-m", "pytest", str(SHAPES), "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    reports = "".join(path.read_text() for path in sorted(folder.glob("report.*")))
    return done.returncode, reports or done.stdout * bool(done.returncode)


def _runtime(name: str) -> str:
    done = subprocess.run([*find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def _needs_sanitizers(tmp_path: Path) -> None:
    if reason := lacks(tmp_path, FLAGS):
        pytest.skip(f"no sanitizer: {reason}")
    if not Path(_runtime("libasan.so")).is_absolute():
        pytest.skip("no sanitizer: this compiler has no libasan.so that Python could load first")


def test_sanitizers_find_nothing_at_any_shape(tmp_path: Path) -> None:
    assert run_sanitized(tmp_path, COMPUTE_FOLDER) == (0, "")


def test_a_row_too_many_shows(tmp_path: Path) -> None:
    sources = Path(shutil.copytree(COMPUTE_FOLDER, tmp_path / "compute"))
    mutant(sources, *FAULT, source=sources / "pick.c")

    status, report = run_sanitized(tmp_path, sources, "-k", "sums_and_picks")

    assert status != 0
    assert "AddressSanitizer: heap-buffer-overflow" in report

"""The kernels under AddressSanitizer and UBSan, over random shapes; and a row too many, which must show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_worker.native.build import build_compute, find_compiler
from tests.support.native_compute import ENV_SANITIZED
from tests.support.native_stress import lacks

pytestmark = [pytest.mark.unit, pytest.mark.slow, pytest.mark.timeout(1200)]
"""The library is built for six instruction sets, while other tests use the cores, too."""

FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SHAPES = Path(__file__).with_name("test_random_shapes.py")
A_ROW_TOO_MANY = """
from tests.support.native_compute import add_of, op_queue_of, randn
sums, addends = randn(3, 64), randn(2, 64)  # an operation has addresses, and keeps no tensor
op_queue_of(1).team.run_one(add_of(sums, addends))
"""


def run_sanitized(library: Path, *command: str) -> tuple[int, str]:
    """Return the exit status of Python with this library, and all reports of the sanitizers."""
    log = library.with_name("report")
    environment = {
        **os.environ,
        ENV_SANITIZED: str(library),
        "LD_PRELOAD": " ".join(_runtime(name) for name in ("libasan.so", "libubsan.so")),
        "PYTHONMALLOC": "malloc",
        # Python frees little of what it has at its end.
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={log}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={log}",
    }
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    reports = "".join(path.read_text() for path in sorted(log.parent.glob("report.*")))
    return done.returncode, reports or (done.stdout + done.stderr) * bool(done.returncode)


def _runtime(name: str) -> str:
    done = subprocess.run([*find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def _needs_sanitizers(tmp_path: Path) -> None:
    if reason := lacks(tmp_path, FLAGS):
        pytest.skip(f"no sanitizer: {reason}")
    if not Path(_runtime("libasan.so")).is_absolute():
        pytest.skip("no sanitizer: this compiler has no libasan.so that Python could load first")


def test_sanitizers_find_nothing_at_any_shape_and_a_row_too_many(tmp_path: Path) -> None:
    """One test, since building the library takes minutes."""
    library = build_compute(tmp_path / "libsanitized.so", flags=FLAGS)
    pytest_ = ("-m", "pytest", str(SHAPES), "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler")
    assert run_sanitized(library, *pytest_) == (0, "")

    status, report = run_sanitized(library, "-c", A_ROW_TOO_MANY)

    assert status != 0
    assert "AddressSanitizer: heap-buffer-overflow" in report
    assert "add.c" in report

"""The kernels on an emulated ARM processor, with and without dot products of bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hetero_worker.native.build import COMPUTE_FOLDER, build_compute

pytestmark = [pytest.mark.unit, pytest.mark.slow, pytest.mark.timeout(1200)]

COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
ROOT = "/usr/aarch64-linux-gnu"
PROGRAM = Path(__file__).parents[2] / "support/native/linear_everywhere.c"


@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR) and Path(ROOT).is_dir()),
    reason=f"needs {COMPILER} and {EMULATOR} (on Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user)",
)
def test_products_of_every_format_are_right_and_the_same_with_dot_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", COMPILER)
    library = build_compute(tmp_path / "libhetero_compute.so")
    program = tmp_path / "linear_everywhere"
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-DSAME_BITS=1", f"-I{COMPUTE_FOLDER}"]
    subprocess.run([COMPILER, *flags, "-o", str(program), str(PROGRAM), str(library), "-lm"], check=True, timeout=300)

    assert _sets(program, "max") == {"dotprod", "generic"}
    assert _sets(program, "cortex-a53") == {"generic"}


def _sets(program: Path, processor: str) -> set[str]:
    """Instruction sets whose products are right on the processor."""
    done = subprocess.run(
        [EMULATOR, "-cpu", processor, "-L", ROOT, str(program)],
        env={**os.environ, "LD_LIBRARY_PATH": str(program.parent)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.split()[0] for line in done.stdout.splitlines()}

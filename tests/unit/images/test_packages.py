"""What a build takes away again of what it installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.images import packages
from tools.images.packages import never_runs, trim


def test_tests_headers_and_stubs_go_and_programs_that_torch_starts_stay(tmp_path: Path) -> None:
    gone = ["numpy/linalg/tests/test_it.py", "torch/include/a.h", "torch/test/it", "torch/bin/protoc", "grpc/x.pyi"]
    kept = ["numpy/testing/it.py", "torch/bin/torch_shm_manager", "torch/testing/_it.py", "torch/lib/libtorch.so"]
    for name in [*gone, *kept]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    assert trim(tmp_path) == 5 * len(gone)
    assert [name for name in gone if (tmp_path / name).exists()] == []
    assert [name for name in kept if not (tmp_path / name).exists()] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["numpy", "torch"], "no empty folder is left"


@pytest.mark.parametrize(
    ("path", "never"),
    [
        ("numpy/tests/test_it.py", True),
        ("numpy/a/b/tests/c/d.py", True),
        ("numpy/mytests/a.py", False),
        ("kubernetes/client/api/core_v1_api.py", True),
        ("kubernetes/client/api/core/v1_api.py", False),
        ("a.pyi", True),
        ("other/numpy/tests/a.py", False),
    ],
)
def test_a_pattern_means_what_it_means_in_a_shell(path: str, never: bool) -> None:
    assert never_runs(path) == never


def test_it_runs_where_nothing_is_installed() -> None:
    """It runs before anything is: by the base's Python, isolated from all packages."""
    command = [sys.executable, "-I", "-S", packages.__file__, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_byte_code_is_the_same_whenever_its_source_was_written_and_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    monkeypatch.setattr(packages, "VENV", tmp_path)
    found = []
    for number in (1, 2):
        folder = tmp_path / "site-packages"
        folder.mkdir()
        (folder / "x.py").write_text("y = 1\n")
        os.utime(folder / "x.py", (number, number))
        subprocess.run([sys.executable, "-c", "import x"], cwd=folder, check=True, env={})
        assert list(folder.rglob("*.pyc")), "the import made byte code"
        packages._compile(folder)
        found += [path.read_bytes() for path in folder.rglob("*.pyc")]
        shutil.rmtree(folder)
    assert len(found) == 2
    assert found[0] == found[1]

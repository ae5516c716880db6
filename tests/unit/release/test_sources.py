"""A release is made of a commit: changes beside it are refused, and files that git does not know stay out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.release.sources import ReleaseError, export, require_committed
from tools.release.wheels import compiler_of

pytestmark = pytest.mark.unit


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One commit with a file, and a file that is ignored."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "a.txt").write_text("committed\n")
    (root / ".gitignore").write_text("*.so\n")
    (root / "old.so").write_text("built\n")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for arguments in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "First")):
        subprocess.run(["git", "-C", root, *arguments], check=True)
    return root


def test_the_copy_has_what_is_committed_and_nothing_else(checkout: Path, tmp_path: Path) -> None:
    require_committed(checkout)
    (checkout / "a.txt").write_text("changed\n")
    copy = export(checkout, tmp_path / "copy")
    assert {path.name: path.read_text() for path in copy.iterdir()} == {"a.txt": "committed\n", ".gitignore": "*.so\n"}


@pytest.mark.parametrize("name", ["a.txt", "new.txt"])
def test_a_checkout_with_changes_is_refused(name: str, checkout: Path) -> None:
    (checkout / name).write_text("changed\n")
    with pytest.raises(ReleaseError, match=rf"changes that are in no commit \(.*{name}\)"):
        require_committed(checkout)


def test_a_missing_compiler_is_named_with_its_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ReleaseError, match=r"no aarch64-linux-gnu-gcc: install .* gcc-aarch64-linux-gnu and libc6-dev-arm64"
    ):
        compiler_of("aarch64")

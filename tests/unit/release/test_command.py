"""`python -m tools.release push` of what is no release says so, before anything is asked of a registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.images.__main__ import write_sums
from tools.release.__main__ import clear, main

pytestmark = pytest.mark.unit

NOWHERE = "registry.example.com/ai"


def test_a_folder_without_a_release_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(tmp_path), NOWHERE], {}) == 1
    assert f"there is no {tmp_path}/SHA256SUMS: nothing was built there" in capsys.readouterr().err
    write_sums(tmp_path)
    assert main(["push", str(tmp_path), NOWHERE], {}) == 1
    assert f"{tmp_path} holds no chart: say make release DIST={tmp_path}" in capsys.readouterr().err


def test_a_key_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(tmp_path), NOWHERE, f"--key={tmp_path / 'release.key'}"], {}) == 1
    assert f"KEY: {tmp_path / 'release.key'} is no private key in PEM" in capsys.readouterr().err


def test_nothing_of_an_earlier_release_is_left_for_the_next_one(tmp_path: Path) -> None:
    images = [f"{name}{suffix}" for name in ("gateway", "worker-gpu") for suffix in (".tar", ".cdx.json", ".id")]
    for name in (*images, "heteroinference-0.1.0.tgz", "CHANGELOG-0.1.0.md", "notes.txt"):
        (tmp_path / name).touch()
    clear(tmp_path, ["gateway"])
    assert {path.name for path in tmp_path.iterdir()} == {"gateway.tar", "gateway.cdx.json", "gateway.id", "notes.txt"}

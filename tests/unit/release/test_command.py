"""`python -m tools.release push` of what is no release says so, before anything is asked of a registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.images.__main__ import write_sums
from tools.release.__main__ import main

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

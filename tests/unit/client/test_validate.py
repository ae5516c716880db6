"""`hetero validate` over everything that can be wrong: one line that names file, field and fix."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from hetero_api.contract import EXIT_OK, EXIT_USAGE
from hetero_client.cli.main import app
from tests.support.invalid_resources import INVALID, VALID, Document, InvalidResource

pytestmark = pytest.mark.unit


def validate(*arguments: Path | str) -> Result:
    return CliRunner().invoke(app, ["validate", *map(str, arguments)])


def written(folder: Path, name: str, document: Document) -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_a_problem_is_one_line_with_file_field_and_reason(tmp_path: Path, case: InvalidResource) -> None:
    arguments: list[Path | str] = [written(tmp_path, "new.yaml", case.document)]
    if case.old is not None:
        arguments += ["--was", written(tmp_path, "old.yaml", case.old)]
    result = validate(*arguments)
    (line,) = result.stderr.splitlines()
    assert result.exit_code == EXIT_USAGE
    assert f"new.yaml: {case.path}: " in line
    assert case.message in line


def test_valid_manifests_are_said_to_be_valid(tmp_path: Path) -> None:
    files = [written(tmp_path, f"{case.name}.yaml", case.document) for case in VALID]
    result = validate(*files)
    assert result.exit_code == EXIT_OK
    assert result.stdout.splitlines() == [f"{path}: valid" for path in files]

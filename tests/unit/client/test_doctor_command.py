"""`hetero doctor`: its lines, its JSON and its exit code."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from hetero_api.contract import EXIT_FAILURE, EXIT_OK, EXIT_USAGE
from hetero_client.cli.main import app
from hetero_client.doctor.findings import Grade, fail, findings_view, has_failed, ok, warn

pytestmark = pytest.mark.unit


def hetero(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_finding_is_a_line_with_cost_and_fix_below() -> None:
    text = io.StringIO()
    findings = [ok("SMT", "off"), warn("governor", "powersave", cost="a low clock", fix="cpupower frequency-set")]
    Console(file=text, width=60).print(findings_view(findings), soft_wrap=True)
    assert [line.rstrip() for line in text.getvalue().splitlines()] == [
        "OK    SMT                   off",
        "WARN  governor              powersave",
        "      costs: a low clock",
        "      fix:   cpupower frequency-set",
    ]
    assert not has_failed(findings)
    assert has_failed([*findings, fail("torch", "not installed", cost="no rank starts", fix="pip install")])


def test_this_machine_is_checked_as_json() -> None:
    result = hetero("doctor", "--json")
    data = json.loads(result.stdout)
    grades = {finding["check"]: finding["grade"] for finding in data["findings"]}
    assert data["checked"] == "machine"
    assert {"memory", "cores", "/dev/shm", "torch", "native kernels", "instruction set"} <= grades.keys()
    assert grades["torch"] == Grade.OK
    assert result.exit_code == (EXIT_FAILURE if Grade.FAIL in grades.values() else EXIT_OK)


def test_a_cluster_that_does_not_answer_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = hetero("doctor", "--cluster")
    assert result.exit_code == EXIT_FAILURE
    assert result.stdout.startswith("FAIL  API server            there is no kubectl on PATH\n")


def test_a_context_is_of_a_cluster() -> None:
    result = hetero("doctor", "--context", "prod")
    assert result.exit_code == EXIT_USAGE
    assert "--context: goes with --cluster" in result.stderr

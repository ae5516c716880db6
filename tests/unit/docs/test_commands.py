"""Every command that a page shows runs in a test, or the page says what it needs that a test has not."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetero_client.cli.main import app
from tests.support.documents import PAGES, ROOT, Call, blocks, name_of, shown_calls

pytestmark = pytest.mark.unit

LIST: dict[str, Any] = tomllib.loads((Path(__file__).parent / "commands.toml").read_text(encoding="utf-8"))
CALLS = [(name_of(page), call) for page in PAGES for call in shown_calls(page)]
RUN = sorted(
    {call.text for _, call in CALLS if call.text.startswith(tuple(LIST["run"])) and "--cluster" not in call.text}
)


def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def entry_of(call: Call) -> dict[str, Any] | None:
    """The entry with the longest beginning of the command."""
    found = [entry for entry in LIST["other"] if call.text.startswith(entry["begins"])]
    return max(found, key=lambda entry: len(entry["begins"]), default=None)


def problem_of(call: Call) -> str:
    """Why nothing is known to run a command; empty if something is, or if the page says what it needs."""
    if call.needs or call.text in RUN or call.words[0] in LIST["shell"]:
        return ""
    if call.words[0] != "hetero":
        entry = entry_of(call)
        return "" if entry is not None else "no entry in commands.toml"
    command = next((word for word in call.words[1:] if not word.startswith("-")), "")
    files = LIST["hetero"].get(command)
    if files is None:
        return f"no tests of hetero {command} in commands.toml"
    texts = "".join(map(text_of, files))
    wanted = [command, *(word.partition("=")[0] for word in call.words if word.startswith("--"))]
    missing = [word for word in wanted if f'"{word}"' not in texts and f'"{word}=' not in texts]
    return f"none of {', '.join(files)} has {', '.join(missing)}" if missing else ""


def test_every_command_of_a_page_runs_in_a_test_or_says_what_it_needs() -> None:
    problems = [f"{page}: {call.text}: {problem}" for page, call in CALLS if (problem := problem_of(call))]
    assert problems == []


def test_pages_have_commands() -> None:
    assert len(CALLS) > 80
    assert len({page for page, _ in CALLS}) > 10


@pytest.mark.parametrize("entry", LIST["other"], ids=lambda entry: str(entry["begins"]))
def test_entries_are_of_commands_that_pages_show_and_of_tests_that_have_them(entry: dict[str, Any]) -> None:
    assert any(entry_of(call) == entry for _, call in CALLS), "no page shows it"
    if "needs" not in entry:
        text = text_of(entry["test"])
        assert [word for word in entry["words"] if word not in text] == []


def test_subcommands_of_the_list_are_shown() -> None:
    shown = {word for _, call in CALLS if call.words[0] == "hetero" for word in call.words[1:3]}
    assert set(LIST["hetero"]) - shown == set()


@pytest.mark.parametrize("line", RUN)
def test_commands_that_need_nothing_do_what_pages_say(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETERO_HOME", str(tmp_path / "home"))
    arguments = shlex.split(line)[1:]
    if "key" in arguments:  # it writes a key into the folder where it runs
        monkeypatch.chdir(tmp_path)
    else:
        monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in ((0, 1) if "doctor" in arguments else (0,)), result.output
    assert result.stdout.strip()


def test_the_page_of_the_large_model_says_what_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/large-model.md"
    (manifest,) = blocks(page, "yaml")
    Path("glm-air.yaml").write_text(manifest, encoding="utf-8")
    assert CliRunner().invoke(app, ["validate", "glm-air.yaml"]).stdout == "glm-air.yaml: valid\n"
    assumed = ["--assume", "xeon6454s-rtx4090", "--model", "glm-4.5-air"]
    assert CliRunner().invoke(app, ["plan", "glm-air.yaml", *assumed]).exit_code == 0
    planned = CliRunner().invoke(app, ["plan", *assumed])
    table = planned.stdout.partition("Weight streaming")[0].splitlines()
    told = re.search(
        r"predicts (\d+) tokens/s .*? together, (\d+) with CPU ranks alone, (\d+) with whole",
        " ".join(page.read_text(encoding="utf-8").split()),
    )
    assert told is not None
    for words, number in zip((" * ", "CPU ranks only", "Layer split"), map(int, told.groups()), strict=True):
        (line,) = [line for line in table if words in line]
        rate = float(re.findall(r"\s(\d+\.\d)\s", line)[0])
        assert abs(rate - number) <= 1, line

"""The measure of the product's code counts what it says, on a small tree whose figures are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.measure_code import Figure, main, measure

pytestmark = pytest.mark.unit

LIMITS = {"code-lines": 6, "modules": 2, "lone-protocols": 0, "function-lines": 3, "room-modules": 2, "rooms": {}}


def tree(folder: Path, **files: str) -> Path:
    """A checkout whose only package is `worker/thing`; file names without ending."""
    package = folder / "worker" / "thing"
    package.mkdir(parents=True)
    (folder / "protos").mkdir()
    (folder / "operator").mkdir()
    for name, text in {"__init__": '"""A package."""\n', **files}.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def figures(repo: Path, **limits: object) -> dict[str, Figure]:
    return {figure.name: figure for figure in measure(repo, {**LIMITS, **limits})}


def test_code_lines_are_neither_blank_nor_comments_nor_docstrings(tmp_path: Path) -> None:
    text = (
        '"""A module.\n\nTwo lines of it.\n"""\n\n# why\nA = [\n    1,\n]\n\nB = 2  # two\n"""Documentation of B."""\n'
    )
    found = figures(tree(tmp_path, a=text))
    assert found["code lines"].value == 4
    assert found["modules"].value == 2
    assert found["code lines"].is_met


def test_circles_of_imports_are_found_in_functions_too(tmp_path: Path) -> None:
    repo = tree(
        tmp_path,
        a='"""A."""\nfrom thing.b import B\n',
        b='"""B."""\nB = 1\n\n\ndef load() -> None:\n    """Load."""\n    from thing import c\n',
        c='"""C."""\nimport thing.a\n',
    )
    (circle,) = figures(repo)["import circles"].places
    assert set(circle.split(" -> ")) == {"thing.a", "thing.b", "thing.c"}


def test_circles_of_includes_are_found(tmp_path: Path) -> None:
    repo = tree(tmp_path)
    (repo / "worker" / "a.h").write_text('#include "b.h"\n')
    (repo / "worker" / "b.h").write_text('#include "a.h"\n#include <stdint.h>\n')
    assert figures(repo)["import circles"].value == 1


def test_a_protocol_counts_if_exactly_one_class_has_all_its_members(tmp_path: Path) -> None:
    protocol = '"""A."""\nclass Reader(Protocol):\n    """Reader."""\n    size: int\n    def read(self): ...\n'
    one = "class File:\n    def __init__(self): self.size = 1\n    def read(self): ...\n"
    heir = "class Child(Base):\n    size = 2\nclass Base:\n    def read(self): ...\n"
    name = "protocols with one implementer"
    for number, (text, expected) in enumerate(
        [(protocol, 0), (protocol + one, 1), (protocol + heir, 1), (protocol + one + heir, 0)]
    ):
        assert figures(tree(tmp_path / str(number), a=text))[name].value == expected


def test_docstrings_that_are_no_sentences_or_missing_are_found(tmp_path: Path) -> None:
    repo = tree(
        tmp_path,
        a='"""What a is."""\n\n\ndef f():\n    """Of it."""\n\n\ndef g():\n    """Returns 1."""\n\n\ndef h(): ...\n',
    )
    found = figures(repo)
    assert found["docstrings that begin with What, Of, Whether it, The same"].value == 2
    (imperative, missing) = found["public docstrings that ruff finds missing or not imperative"].places
    assert "D401" in imperative
    assert "D103" in missing


def test_a_crowded_room_needs_a_reason_and_a_reason_a_crowded_room(tmp_path: Path) -> None:
    repo = tree(tmp_path, a='"""A."""\n', b='"""B."""\n', c='"""C."""\n')
    name = "rooms with too many modules and no reason"
    assert figures(repo)[name].places == ("thing: 3",)
    assert figures(repo, rooms={"thing": "a reason"})[name].value == 0
    assert figures(repo, rooms={"thing": "a reason"}, **{"room-modules": 3})[name].value == 1


def test_a_broken_limit_fails_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repo = tree(tmp_path, a='"""A."""\nA = 1\n')
    limits = "\n".join(f"{name} = {value}" for name, value in LIMITS.items() if name != "rooms")
    (repo / "pyproject.toml").write_text(f"[tool.measure_code]\n{limits}\n[tool.measure_code.rooms]\n")
    assert main(["--repo", str(repo)]) == 0
    (repo / "worker" / "thing" / "a.py").write_text('"""A."""\n\n\ndef f():\n    pass\n')
    assert main(["--repo", str(repo)]) == 1
    assert "a.py:4:5: D103" in capsys.readouterr().out

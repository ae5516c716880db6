"""CONTRIBUTING.md's lists of files to touch are true: each example stands in exactly the files of its list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
ROOMS = ("protos", "operator", "worker")
ELSEWHERE = {
    "min_p": {
        "worker/hetero_worker/probe/ends.py",
        "worker/hetero_gateway/server/openai/__init__.py",
        "worker/hetero_gateway/group/warm_up.py",
    }
}
"""Files that name an example and that a new one need not touch: the probe's greedy row, a docstring, draws that warm
ranks up."""
MOST_FOR_SAMPLING = 8


def lists() -> dict[str, tuple[str, list[str]]]:
    """What is changed → its example and the files of its list, in order."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## To change X")[2].partition("\n## ")[0]
    found = {}
    for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:]:
        head = re.match(r"\*\*(.+?)\*\*(?: \(like `(\w+)`\))?", item)
        assert head is not None, item
        files = re.findall(r"`((?:protos|operator|worker)/[\w./]+)`", item)
        found[head[1]] = (head[2] or "", files)
    return found


def files_with(word: str) -> Iterator[str]:
    pattern = re.compile(rf"\b{re.escape(word)}\b")
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*")):
        is_source = path.suffix in (".py", ".proto") and "_pb2" not in path.name
        if is_source and pattern.search(path.read_text(encoding="utf-8")):
            yield str(path.relative_to(ROOT))


def names(word: str, file: str) -> bool:
    """Whether the file names the example, as a field or as a message."""
    message = "".join(part.capitalize() for part in word.split("_"))
    text = (ROOT / file).read_text(encoding="utf-8")
    return word in text or message in text


def test_all_kinds_of_change_have_a_list() -> None:
    wanted = {
        "a model", "a quantised format", "a field of the resource", "a sampling parameter", "an accelerator",
        "a message to the ranks",
    }  # fmt: skip
    assert set(lists()) == wanted


@pytest.mark.parametrize("change", sorted(lists()))
def test_the_files_of_a_list_exist(change: str) -> None:
    _, files = lists()[change]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("change", sorted(change for change, (example, _) in lists().items() if example))
def test_the_example_stands_in_the_files_of_its_list_and_nowhere_else(change: str) -> None:
    example, files = lists()[change]
    assert set(files_with(example)) - ELSEWHERE.get(example, set()) <= set(files)
    assert change == "a model" or [file for file in files if not names(example, file)] == []


def test_a_sampling_parameter_touches_few_files_beside_the_client() -> None:
    _, files = lists()["a sampling parameter"]
    assert len([file for file in files if "hetero_client" not in file]) <= MOST_FOR_SAMPLING

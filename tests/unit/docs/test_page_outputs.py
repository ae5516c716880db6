"""Pages show what a cluster printed, in the places that they have for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.documents import PAGES, name_of
from tools.page_outputs import filled, places

pytestmark = pytest.mark.unit

PAGE = """\
Before.

<!-- output: one -->
```text
old
```
<!-- end of output -->
Between.
<!-- output: two -->
<!-- end of output -->
"""


def test_a_place_gets_its_file_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("NAME   READY  \nsmollm2   True\n\n")
    after = filled(PAGE, tmp_path)
    assert places(after) == {"one": "```text\nNAME   READY\nsmollm2   True\n```\n", "two": ""}
    assert after.startswith("Before.\n\n<!-- output: one -->\n```text\nNAME")
    assert filled(after, tmp_path) == after


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_place_has_its_end_and_shows_something(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = places(text)
    assert len(shown) == text.count("<!-- output: ") == text.count("<!-- end of output -->")
    assert [name for name, output in shown.items() if not output.strip()] == []

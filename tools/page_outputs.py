"""Puts what the end-to-end tests kept into the pages: `python -m tools.page_outputs FOLDER`.

A page has places for it, between the lines `<!-- output: NAME -->` and `<!-- end of output -->`; FOLDER/NAME.txt goes
there as a block. So a page shows what a cluster really printed, and nobody copies it by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
_PLACE: Final = re.compile(r"(<!-- output: ([a-z0-9-]+) -->\n)(.*?)(<!-- end of output -->)", re.DOTALL)


def places(text: str) -> dict[str, str]:
    """What a page shows in each of its places."""
    return {name: shown for _, name, shown, _ in _PLACE.findall(text)}


def filled(text: str, outputs: Path) -> str:
    """The page with every output that there is a file of; other places stay as they are."""

    def place(found: re.Match[str]) -> str:
        begin, name, shown, end = found.groups()
        file = outputs / f"{name}.txt"
        if file.is_file():
            lines = [line.rstrip() for line in file.read_text(encoding="utf-8").strip("\n").splitlines()]
            shown = "\n".join(["```text", *lines, "```", ""])
        return f"{begin}{shown}{end}"

    return _PLACE.sub(place, text)


def main(arguments: Sequence[str]) -> None:
    (outputs,) = map(Path, arguments)
    for page in sorted((ROOT / "docs").glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = filled(before, outputs)
        if after != before:
            page.write_text(after, encoding="utf-8")
            sys.stdout.write(f"{page.relative_to(ROOT)}: {', '.join(places(after))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

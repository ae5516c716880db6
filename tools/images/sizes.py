"""How large images are, and whether they grew: sizes.json and the table in docs/images.md are what was recorded.

Compared is what an image *adds* to its base. That is what this project decides, and it hardly depends on the base: a
machine whose base was made locally checks the same numbers as one that pulled a public one. Builders count alike within
5 %: buildah counts a layer as the archive that it is, docker only the files in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tools.images.builders import Builder
from tools.images.catalogue import ROOT

RECORD: Final = Path(__file__).with_name("sizes.json")
PAGE: Final = ROOT / "docs/images.md"
TABLE_BEGIN: Final = "<!-- image sizes: `make record-images` -->"
TABLE_END: Final = "<!-- end of image sizes -->"
ALLOWED_GROWTH: Final = 0.10
BASE_LABEL: Final = "org.opencontainers.image.base.name"
_MB: Final = 1e6


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Uncompressed, in MB of 10⁶ bytes."""

    base_mb: float
    added_mb: float

    @property
    def total_mb(self) -> float:
        return self.base_mb + self.added_mb


def measure(builder: Builder, reference: str) -> ImageSize:
    """Of an image that is built; it says itself on what. Raises ImageError."""
    base = builder.configuration(reference)["Labels"][BASE_LABEL]
    base_bytes, added_bytes = builder.bytes_on_base(reference, base)
    return ImageSize(base_mb=round(base_bytes / _MB, 1), added_mb=round(added_bytes / _MB, 1))


def read_record(path: Path = RECORD) -> dict[str, ImageSize]:
    """What was recorded, by the image's short name."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    return {name: ImageSize(**size) for name, size in recorded.items()}


def write_record(sizes: Mapping[str, ImageSize], path: Path = RECORD, page: Path = PAGE) -> None:
    """Into the record and the page's table; images that are not named keep what they have."""
    merged = {**(read_record(path) if path.exists() else {}), **sizes}
    text = json.dumps({name: asdict(size) for name, size in merged.items()}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    page.write_text(with_table(page.read_text(encoding="utf-8"), merged), encoding="utf-8")


def with_table(text: str, sizes: Mapping[str, ImageSize]) -> str:
    """The page's text with this table between its marks. Raises ValueError."""
    before, begin, rest = text.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not begin or not end:
        raise ValueError(
            f"docs/images.md has no place for the table of sizes, between {TABLE_BEGIN!r} and {TABLE_END!r}"
        )
    return f"{before}{begin}\n{table(sizes)}\n{end}{after}"


def table(sizes: Mapping[str, ImageSize]) -> str:
    """Markdown."""
    rows = [f"| `{name}` | {size.total_mb:.0f} MB | {size.added_mb:.0f} MB |" for name, size in sizes.items()]
    return "\n".join(["| image | size | without its base |", "|---|---|---|", *rows])


def growth_problems(sizes: Mapping[str, ImageSize], recorded: Mapping[str, ImageSize]) -> list[str]:
    """A line for each image that grew too much, or of which nothing is recorded."""
    problems = []
    for name, size in sizes.items():
        if name not in recorded:
            problems.append(f"{name}: no size is recorded; say make record-images")
            continue
        was = recorded[name].added_mb
        if size.added_mb > was * (1 + ALLOWED_GROWTH):
            problems.append(
                f"{name} adds {size.added_mb:.0f} MB to its base, {size.added_mb / was - 1:.0%} more than the "
                f"{was:.0f} MB that are recorded ({ALLOWED_GROWTH:.0%} are allowed): take out what it does not need, "
                "or say make record-images"
            )
    return problems


def describe(name: str, size: ImageSize, recorded: Mapping[str, ImageSize]) -> str:
    """One line."""
    was = f", {size.added_mb / recorded[name].added_mb - 1:+.0%} since recorded" if name in recorded else ""
    return f"{name:<12} {size.total_mb:6.0f} MB = base {size.base_mb:.0f} + {size.added_mb:.0f}{was}"

"""The documentation's site builds without a warning, fails on what is broken, and fetches nothing from elsewhere."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.browser import chromium
from tools.site.build import build, lay_out, problems_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LOOKED_AT = ("index", "docs/start", "docs/concepts", "docs/benchmarks", "docs/reference/heteroinference")


@pytest.mark.parametrize("broken", ["[a](gone.md)", "[b](#gone)", "[c](other.md#gone)", "![d](gone.svg)"])
def test_a_broken_link_fails_the_build(broken: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "index.md").write_text("# Home\n\n[other](other.md)\n\n```{toctree}\nother\n```\n", encoding="utf-8")
    (source / "other.md").write_text("# Other\n\nWords.\n", encoding="utf-8")
    build(source, tmp_path / "site")
    assert problems_of(tmp_path / "site") == []
    with (source / "index.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{broken}\n")
    with pytest.raises(subprocess.CalledProcessError):
        build(source, tmp_path / "site")


async def test_the_site_builds_and_a_browser_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    lay_out(tmp_path / "source")
    build(tmp_path / "source", tmp_path / "site")
    assert problems_of(tmp_path / "site") == []
    elsewhere: list[str] = []
    async with chromium() as browser:
        for width in (1280, 360):
            page = await browser.new_page(viewport={"width": width, "height": 800})
            page.on("request", lambda request: elsewhere.append(request.url))
            for name in LOOKED_AT:
                await page.goto((tmp_path / f"site/{name}.html").as_uri())
                beyond = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                assert await page.evaluate(beyond) == 0, f"{name} is wider than {width}"
            await page.close()
    assert [url for url in elsewhere if not url.startswith(("file:", "data:"))] == []

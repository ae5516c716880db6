"""Built pages of the site are held to what they may not have: links to nowhere, and anything from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.site.build import ROOT, lay_out, problems_of

pytestmark = pytest.mark.unit


def page(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"<!doctype html><title>t</title><body>{body}", encoding="utf-8")


def test_a_site_whose_links_lead_somewhere_has_no_problems(tmp_path: Path) -> None:
    page(tmp_path, "a.html", '<h1 id="top">A</h1><a href="b.html#part">b</a><a href="#top">up</a>')
    page(tmp_path, "b.html", '<h2 id="part">B</h2><a href="https://example.com/">elsewhere, if clicked</a>')
    assert problems_of(tmp_path) == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="c.html">c</a>', "a.html: c.html leads nowhere"),
        ('<a href="b.html#other">b</a>', "a.html: b.html#other has no such anchor"),
        ('<a href="#other">here</a>', "a.html: #other has no such anchor"),
        ('<img src="none.svg">', "a.html: none.svg leads nowhere"),
        ('<script src="https://cdn.example/x.js"></script>', "a.html: fetches https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', "a.html: fetches //fonts.example/x.css"),
    ],
)
def test_each_problem_is_told(body: str, problem: str, tmp_path: Path) -> None:
    page(tmp_path, "a.html", body)
    page(tmp_path, "b.html", '<h2 id="part">B</h2>')
    assert problems_of(tmp_path) == [problem]


def test_a_style_that_loads_a_font_from_elsewhere_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "x.css").write_text("@font-face { src: url('https://fonts.example/f.woff2') }", encoding="utf-8")
    assert problems_of(tmp_path) == ["x.css: fetches from elsewhere"]


def test_pages_are_laid_out_in_their_places_with_what_they_link_to(tmp_path: Path) -> None:
    lay_out(tmp_path / "source")
    laid = {path.relative_to(tmp_path / "source") for path in (tmp_path / "source").rglob("*") if path.is_file()}
    assert {page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md")} <= laid
    assert {Path("index.md"), Path("ARCHITECTURE.md"), Path("docs/pictures/placement.svg")} <= laid
    start = (tmp_path / "source/docs/start.md").read_text(encoding="utf-8")
    assert '<p class="needs">needs a package index' in start
    assert "<!-- needs:" not in start

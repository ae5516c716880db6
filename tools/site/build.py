"""Builds the documentation as a site: `python -m tools.site.build`, or `make site`; the pages are in build/site.

The pages are the repository's own Markdown. They are laid out under build/site-source in their places, with the files
that they link to, and Sphinx makes HTML of them; each of its warnings fails the build. Then every link of the built
pages is followed once more, anchors included, and nothing may be fetched from anywhere else.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = ROOT / "build/site-source"
SITE: Final = ROOT / "build/site"
HOME: Final = Path(__file__).parent
PAGES: Final = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "bench/NOTES.md")
FOLDERS: Final = ("docs", "bench/texts", "charts/heteroinference")
_LINK: Final = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
_NEEDS: Final = re.compile(r"<!-- needs: (.+?) -->")
_FETCHED: Final = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""What a browser fetches by itself, by tag."""


def lay_out(source: Path) -> None:
    """Copy the pages, and the files that they link to, into an empty folder in the same places."""
    shutil.rmtree(source, ignore_errors=True)
    pages = [ROOT / name for name in PAGES]
    pages += [page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        target = source / page.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_NEEDS.sub(r'<p class="needs">needs \1</p>\n', text), encoding="utf-8")
        for linked in _linked_files(page, text):
            copy = source / linked.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(linked, copy)
    shutil.copy(HOME / "index.md", source / "index.md")


def _linked_files(page: Path, text: str) -> Iterator[Path]:
    """Yield files other than pages that a page links to."""
    for target, _ in _LINK.findall(text):
        linked = (page.parent / target).resolve()
        if "://" not in target and linked.is_file() and linked.suffix != ".md" and linked.is_relative_to(ROOT):
            yield linked


def build(source: Path, site: Path) -> None:
    """Make HTML of the pages. Raises CalledProcessError after any warning."""
    shutil.rmtree(site, ignore_errors=True)
    command = [
        sys.executable, "-m", "sphinx", "--builder", "html", "--conf-dir", str(HOME), "--fail-on-warning", "--nitpicky",
        "--keep-going", "--quiet", "--doctree-dir", str(source.with_name("site-doctrees")), str(source), str(site),
    ]  # fmt: skip
    subprocess.run(command, check=True)


class _Page(HTMLParser):
    """Anchors and links of one built page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Take an element."""
        found = dict(attributes)
        self.anchors.update(value for value in (found.get("id"), found.get("name")) if value)
        if tag == "a" and (link := found.get("href")):
            self.links.append(link)
        if tag in _FETCHED and (what := found.get(_FETCHED[tag])):
            self.fetched.append(what)


def problems_of(site: Path) -> list[str]:
    """Return what is wrong with the built pages: links to nowhere, and what would be fetched from elsewhere."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name}: fetches {what}" for what in page.fetched if _is_elsewhere(what)]
        for link in (link for link in [*page.links, *page.fetched] if not _is_elsewhere(link)):
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            if not target.exists():
                found.append(f"{name}: {link} leads nowhere")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                found.append(f"{name}: {link} has no such anchor")
    styles = (path for kind in ("*.css", "*.js") for path in site.rglob(kind))
    found += [f"{path.relative_to(site)}: fetches from elsewhere" for path in styles if _fetches(path)]
    return found


def _is_elsewhere(link: str) -> bool:
    return link.startswith(("http:", "https:", "//", "mailto:"))


def _fetches(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return re.search(r"(url\(\s*['\"]?|@import\s+['\"]|fetch\(['\"]|import\(['\"])(https?:)?//", text) is not None


def main() -> int:
    lay_out(SOURCE)
    try:
        build(SOURCE, SITE)
    except subprocess.CalledProcessError as error:
        return error.returncode
    found = problems_of(SITE)
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(ROOT)}, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Package sources are the machine's own or a variable's; no archive's host stands in the sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.debian import VARIABLE, NoDebianSources, apt_sources, mirror

pytestmark = pytest.mark.unit

STANZAS = """\
Types: deb
# a comment
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main

Types: deb
URIs: http://mirror.example/security
Suites: bookworm-security
Components: main

Types: deb
URIs: http://other.example/
Suites: nodistro
Components: main
"""


def apt(folder: Path, **files: str) -> Path:
    (folder / "sources.list.d").mkdir()
    for name, text in files.items():
        (folder / name.replace("__", "/").replace("_list", ".list").replace("_sources", ".sources")).write_text(text)
    return folder


def test_the_machines_own_sources_are_taken_with_source_packages(tmp_path: Path) -> None:
    text = apt_sources({}, apt(tmp_path, **{"sources.list.d__debian_sources": STANZAS}))
    assert text.count("Types: deb deb-src") == 2
    assert "other.example" not in text
    assert mirror({}, tmp_path) == "http://mirror.example/debian"


def test_one_line_entries_are_understood(tmp_path: Path) -> None:
    line = "deb [arch=amd64] http://mirror.example/debian bookworm main contrib\n# deb http://no.example x main\n"
    folder = apt(tmp_path, sources_list=line)
    assert mirror({}, folder) == "http://mirror.example/debian"
    assert "Components: main contrib" in apt_sources({}, folder)


def test_the_variable_comes_first(tmp_path: Path) -> None:
    folder = apt(tmp_path, **{"sources.list.d__debian_sources": STANZAS})
    assert mirror({VARIABLE: "http://named.example/debian"}, folder) == "http://named.example/debian"


def test_a_machine_of_another_release_is_told_of_the_variable(tmp_path: Path) -> None:
    with pytest.raises(NoDebianSources, match=VARIABLE):
        apt_sources({}, apt(tmp_path, sources_list="deb http://mirror.example/debian trixie main\n"))


def test_no_archives_host_stands_in_the_sources() -> None:
    root = Path(__file__).parents[3]
    files = [*root.glob("tools/**/*.py"), *root.glob("tests/support/**/*.py"), root / "Makefile"]
    named = [str(path) for path in files if "debian.org" in path.read_text(encoding="utf-8")]
    assert named == []

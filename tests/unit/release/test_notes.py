"""Sections of the changelog: found, dated once, and asked for before anything is pushed."""

from __future__ import annotations

from datetime import date

import pytest

from hetero_api.contract import VERSION
from tools.images.catalogue import ROOT
from tools.release.notes import cut, require_cut, section
from tools.release.sources import ReleaseError

pytestmark = pytest.mark.unit

LOG = "# Changelog\n\n## 0.2.0 (unreleased)\n\n- Second.\n  More of it.\n\n## 0.1.0 (2026-01-02)\n\n- First.\n"
DAY = date(2026, 3, 4)


def test_a_section_ends_where_the_next_begins() -> None:
    assert section(LOG, "0.2.0") == "## 0.2.0 (unreleased)\n\n- Second.\n  More of it.\n"
    assert section(LOG, "0.1.0") == "## 0.1.0 (2026-01-02)\n\n- First.\n"


def test_a_cut_dates_one_heading_and_leaves_all_else() -> None:
    changed = cut(LOG, "0.2.0", DAY)
    assert changed == LOG.replace("0.2.0 (unreleased)", "0.2.0 (2026-03-04)")
    require_cut(changed, "0.2.0")
    with pytest.raises(ReleaseError, match=r"0\.2\.0 was cut on 2026-03-04"):
        cut(changed, "0.2.0", DAY)


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        (LOG.replace("0.2.0", "0.3.0"), r"no section `## 0\.2\.0 \(unreleased\)`"),
        (LOG.replace("- Second.\n  More of it.\n", ""), r"the section of 0\.2\.0 is empty"),
    ],
)
def test_a_version_without_notes_is_named(log: str, problem: str) -> None:
    with pytest.raises(ReleaseError, match=problem):
        section(log, "0.2.0")


def test_what_is_unreleased_is_refused() -> None:
    with pytest.raises(ReleaseError, match=r"0\.2\.0 is unreleased: say python -m tools\.release cut"):
        require_cut(LOG, "0.2.0")


def test_the_changelog_has_notes_for_the_version_of_the_code() -> None:
    assert section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), VERSION)

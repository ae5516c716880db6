"""Sections of CHANGELOG.md: `## VERSION (DATE)`, or `## VERSION (unreleased)` for what comes next."""

from __future__ import annotations

import re
from datetime import date
from typing import Final

from tools.release.sources import ReleaseError

_UNRELEASED: Final = "unreleased"
_HEADING: Final = re.compile(r"^## (?P<version>\S+) \((?P<when>[^)]+)\)$", re.M)


def section(changelog: str, version: str) -> str:
    """Return a version's section with its heading. Raises ReleaseError where there is none, or it says nothing."""
    heading = _heading(changelog, version)
    following = _HEADING.search(changelog, heading.end())
    text = changelog[heading.start() : following.start() if following else None].strip()
    if text == heading[0]:
        raise ReleaseError(f"CHANGELOG.md: the section of {version} is empty")
    return f"{text}\n"


def cut(changelog: str, version: str, day: date) -> str:
    """Return the changelog with that day in the heading of a version. Raises ReleaseError where it has a day."""
    heading = _heading(changelog, version)
    if heading["when"] != _UNRELEASED:
        raise ReleaseError(
            f"CHANGELOG.md: {version} was cut on {heading['when']}; the version is in hetero_api/contract.py"
        )
    return f"{changelog[: heading.start()]}## {version} ({day.isoformat()}){changelog[heading.end() :]}"


def require_cut(changelog: str, version: str) -> None:
    """Raises ReleaseError while a version's heading has no day."""
    if _heading(changelog, version)["when"] == _UNRELEASED:
        raise ReleaseError(f"CHANGELOG.md: {version} is unreleased: say python -m tools.release cut, and commit that")


def _heading(changelog: str, version: str) -> re.Match[str]:
    for found in _HEADING.finditer(changelog):
        if found["version"] == version:
            return found
    raise ReleaseError(f"CHANGELOG.md has no section `## {version} ({_UNRELEASED})`")

"""Findings of checks, and how a person reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text


class Grade(StrEnum):
    """Grades of a finding."""

    OK = "OK"
    WARN = "WARN"
    """Serving works, and costs more than it need."""
    FAIL = "FAIL"
    """Something that serving needs is missing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. `cost` and `fix` are empty for what is OK."""

    check: str
    grade: Grade
    seen: str
    cost: str = ""
    """Consequence for serving."""
    fix: str = ""
    """Remedy, in one line."""


_STYLES: Final = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "bold red"}
_INDENT: Final = " " * 6


def ok(check: str, seen: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(check, Grade.OK, seen)


def warn(check: str, seen: str, *, cost: str, fix: str) -> Finding:
    """Return a finding that costs something."""
    return Finding(check, Grade.WARN, seen, cost, fix)


def fail(check: str, seen: str, *, cost: str, fix: str) -> Finding:
    """Return a finding that keeps something from serving."""
    return Finding(check, Grade.FAIL, seen, cost, fix)


def has_failed(findings: Iterable[Finding]) -> bool:
    """Return True if any finding is a FAIL."""
    return any(finding.grade is Grade.FAIL for finding in findings)


def findings_view(findings: Iterable[Finding]) -> RenderableType:
    """Return a line for each finding, with cost and fix below where there is something to do."""
    return Group(*(_lines(finding) for finding in findings))


def _lines(finding: Finding) -> Text:
    text = Text(f"{finding.grade:<{len(_INDENT)}}", style=_STYLES[finding.grade])
    text.append(f"{finding.check:<22}", style="bold").append(finding.seen, style="default")
    for name, words in (("costs", finding.cost), ("fix", finding.fix)):
        if words:
            text.append(f"\n{_INDENT}{name + ':':<7}", style="dim").append(words, style="default")
    return text

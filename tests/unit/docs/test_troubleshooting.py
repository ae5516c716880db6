"""The page on troubleshooting has an entry for every reason there is, and for no other."""

from __future__ import annotations

from collections import Counter

import pytest

from hetero_api.status import ConditionType
from hetero_operator.reconcile.status.reasons import Reason
from tests.support.documents import ROOT, headings

pytestmark = pytest.mark.unit

PAGE = ROOT / "docs/troubleshooting.md"


def test_every_reason_has_one_entry_and_no_entry_is_for_another() -> None:
    assert Counter(headings(PAGE, level=3)) == Counter(reason.value for reason in Reason)


def test_entries_say_something() -> None:
    text = PAGE.read_text(encoding="utf-8")
    entries = text.split("\n### ")[1:]
    empty = [title for title, _, words in (entry.partition("\n") for entry in entries) if len(words.split()) < 4]
    assert empty == []


def test_every_condition_is_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [kind for kind in ConditionType if f"\n| `{kind}` |" not in text] == []

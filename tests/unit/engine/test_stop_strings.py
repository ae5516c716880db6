"""Stop strings: what is held back, where the text is cut."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hetero_gateway.engine.text.detokenizer import StopStrings

pytestmark = pytest.mark.unit


def feed_all(stops: StopStrings, pieces: list[str]) -> list[str]:
    return [*(stops.feed(piece) for piece in pieces), stops.flush()]


def test_possible_beginning_is_held_back_and_shown_when_it_was_none() -> None:
    stops = StopStrings(["</end>"])
    assert feed_all(stops, ["text </", "en", "g>", "."]) == ["text ", "", "</eng>", ".", ""]
    assert stops.matched is None


def test_match_cuts_the_text_and_shows_nothing_after_it() -> None:
    stops = StopStrings(["END"])
    assert feed_all(stops, ["a", "bE", "N", "Dc", "d"]) == ["a", "b", "", "", "", ""]
    assert stops.matched == "END"


@pytest.mark.parametrize("pieces", [["aaa", "aab"], ["a", "a", "a", "a", "ab"]])
def test_what_is_complete_where_it_may_not_match_is_text(pieces: list[str]) -> None:
    stops = StopStrings(["aa", "ab"])
    shown = [stops.feed(piece, may_match=False) for piece in pieces[:-1]]
    assert stops.matched is None
    shown.append(stops.feed(pieces[-1]))
    assert stops.matched == "aa", "what it began with may be earlier text"
    assert "".join(shown) in ("aa", "aaa")


def test_held_text_at_the_end_is_shown() -> None:
    assert feed_all(StopStrings(["stop"]), ["never sto"]) == ["never ", "sto"]


def test_stop_string_that_is_complete_first_wins() -> None:
    stops = StopStrings(["abcd", "c"])
    assert feed_all(stops, ["abcd"]) == ["ab", ""]
    assert stops.matched == "c"


def test_of_stop_strings_complete_together_the_longest_wins() -> None:
    stops = StopStrings(["cd", "abcd"])
    assert feed_all(stops, ["xabcd"]) == ["x", ""]
    assert stops.matched == "abcd"


def test_overlapping_beginnings_are_found() -> None:
    stops = StopStrings(["aab"])
    assert feed_all(stops, ["a", "a", "a", "b"]) == ["", "", "a", "", ""]
    assert stops.matched == "aab"


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])


def _first_complete(text: str, stop: list[str]) -> tuple[str, str | None]:
    """By definition, without any cleverness."""
    for end in range(len(text) + 1):
        ending = [pattern for pattern in stop if text[:end].endswith(pattern)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_any_text_in_any_pieces_is_cut_by_definition(pieces: list[str], stop: list[str]) -> None:
    stops = StopStrings(stop)
    shown = feed_all(stops, pieces)
    text, matched = _first_complete("".join(pieces), stop)
    assert "".join(shown) == text
    assert stops.matched == matched


@given(pieces=st.lists(st.text("ab", max_size=4), max_size=12), stop=st.text("ab", min_size=1, max_size=5))
def test_no_more_is_held_back_than_may_be_a_stop_string(pieces: list[str], stop: str) -> None:
    stops = StopStrings([stop])
    shown, seen = "", ""
    for piece in pieces:
        shown, seen = shown + stops.feed(piece), seen + piece
        if stops.matched is not None:
            return
        held = seen[len(shown) :]
        assert stop.startswith(held)
        assert len(held) < len(stop)

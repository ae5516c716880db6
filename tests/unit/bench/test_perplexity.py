"""Perplexity from sums of log-probabilities, and what may be lost."""

from __future__ import annotations

import math

import pytest

from bench.perplexity import REFERENCE, TEXT, Score, losses, perplexity, table, windows_of, within

pytestmark = pytest.mark.unit


def score(name: str, value: float, *, bits: int = 8, ours: bool = True) -> Score:
    return Score(name, bits, ours, value)


def test_windows_are_whole_and_one_after_another() -> None:
    assert windows_of(range(10), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows_of(range(10), 4, most=1) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match="no window of 11"):
        windows_of(range(10), 11)


def test_a_model_that_always_gives_an_eighth_has_perplexity_eight() -> None:
    windows = [[0] * 5, [0] * 5]
    assert perplexity([4 * math.log(8), 4 * math.log(8)], windows) == pytest.approx(8)


def test_losses_are_relative_to_the_reference() -> None:
    found = losses([score(REFERENCE, 10.0), score("hetero int8", 10.04)])
    assert found == {REFERENCE: 0.0, "hetero int8": pytest.approx(0.004)}
    assert losses([score("hetero int8", 10.0)]) == {}


@pytest.mark.parametrize(
    ("bits", "loss", "met"), [(8, 0.0049, True), (8, 0.0051, False), (4, 0.029, True), (4, 0.031, False)]
)
def test_eight_bits_may_lose_half_a_percent_and_four_bits_three(bits: int, loss: float, met: bool) -> None:
    assert within(score("a", 1.0, bits=bits), loss) is met


def test_nothing_is_asked_of_peers_of_16_bits_or_without_a_reference() -> None:
    assert within(score("a", 1.0, ours=False), 0.5) is None
    assert within(score("a", 1.0, bits=16), 0.5) is None
    assert within(score("a", 1.0), None) is None


def test_the_table_tells_losses_bounds_and_whether_they_are_kept() -> None:
    lines = table([score(REFERENCE, 10.0, bits=32, ours=False), score("hetero int4", 10.5, bits=4)]).splitlines()
    assert lines[1].split()[-4:] == ["10.0000", "+0.000%", "-", "-"]
    assert lines[2].split()[-4:] == ["10.5000", "+5.000%", "3.0%", "NO"]


def test_the_shipped_text_is_prose_of_some_length_and_plain() -> None:
    text = TEXT.read_text(encoding="utf-8")
    assert text.isascii()
    assert 30_000 < len(text) < 60_000
    assert "We the People" in text

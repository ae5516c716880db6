"""Published figures of other systems: what the cost model predicts for their hardware, and where it misses."""

from __future__ import annotations

import pytest

from tools.planning_page import PUBLISHED, WITHIN, Published, predicted

pytestmark = pytest.mark.unit

MISSES = {
    "KTransformers 0.3, prefill of 2k, AMX",
    "kt-kernel, prefill of 32k, streamed",
    "llama.cpp, prefill; the same, without AMX",
}
"""Figures that docs/planning.md calls misses, with the reasons."""


@pytest.mark.parametrize("figure", PUBLISHED, ids=lambda figure: f"{figure.what} ({figure.source})")
def test_figures_but_the_misses_are_predicted_within_thirty_percent(figure: Published) -> None:
    is_close = abs(predicted(figure) / figure.tokens_per_s - 1) <= WITHIN
    assert is_close == (figure.what not in MISSES)


def test_each_miss_is_a_figure() -> None:
    assert {figure.what for figure in PUBLISHED} > MISSES

"""The fit of a soak: a process that grows is told from one whose memory goes up and down."""

from __future__ import annotations

import random

import pytest

from bench.soak import OUTPUT_TOKENS, Growth, Point, growth_of, lost
from hetero_client.load.run import Sample

pytestmark = pytest.mark.unit


def growth(mb_per_hour: float, *, noise_mb: float = 2.0, warm_up_mb: float = 0.0) -> Growth:
    drawn = random.Random(1)
    points = []
    for number in range(1800):
        hours = number * 2.0 / 3600
        warming = warm_up_mb * min(1.0, hours / 0.1)
        megabytes = 200 + warming + mb_per_hour * hours + drawn.gauss(0, noise_mb)
        points.append(Point(number * 2.0, int(megabytes * 1e6)))
    return growth_of(points)


def test_the_slope_is_found_and_its_bound_is_above_it() -> None:
    found = growth(20.0)
    assert found.slope == pytest.approx(20.0, abs=1.0)
    assert found.slope < found.upper < 22.0
    assert not found.is_bounded


def test_noise_and_the_warm_up_are_no_growth() -> None:
    found = growth(0.0, warm_up_mb=100.0)
    assert abs(found.slope) < 1.0
    assert found.is_bounded


def test_a_soak_without_enough_looks_is_no_proof() -> None:
    with pytest.raises(ValueError, match="let it last longer"):
        growth_of([Point(at_s, 1) for at_s in (0.0, 1.0, 2.0, 100.0)])


def test_a_request_is_lost_without_all_its_tokens() -> None:
    whole = Sample(0.0, 1.0, ((0.5, OUTPUT_TOKENS),))
    short = Sample(0.0, 1.0, ((0.5, OUTPUT_TOKENS - 1),))
    broken = Sample(0.0, 1.0, (), "UNAVAILABLE")
    assert lost([whole, short, broken]) == [f"{OUTPUT_TOKENS - 1} tokens of {OUTPUT_TOKENS}", "UNAVAILABLE"]

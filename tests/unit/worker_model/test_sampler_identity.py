"""The same request gives the same tokens: alone or in any batch, on any layout, kept or remade after a preemption."""

from __future__ import annotations

import pytest

from tests.support.sampling_checks import LAYOUTS, VOCABULARY, check_generation, check_identity
from tests.support.sampling_reference import random_draw

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("both_paths")]


def test_a_hundred_requests_draw_the_same_tokens_in_any_batch_and_layout() -> None:
    check_identity([random_draw(seed, vocabulary=VOCABULARY) for seed in range(100)])


@pytest.mark.parametrize("counts", [LAYOUTS[0], LAYOUTS[3], LAYOUTS[5]], ids=str)
def test_sequences_go_on_the_same_after_a_preemption(counts: tuple[int, ...]) -> None:
    check_generation([random_draw(1000 + seed, vocabulary=VOCABULARY) for seed in range(40)], counts)

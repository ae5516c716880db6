"""Penalties, bias, min_tokens and masks: each against a dense reference, and what happens where they meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.server.sampling_params import RANGES
from hetero_worker.errors import ProtocolError
from hetero_worker.sampling.edits import LogitEdits, TokenCounts
from hetero_worker.sampling.request import SequenceSampling
from tests.support.examples import examples
from tests.support.sampling_checks import LAYOUTS, VOCABULARY, check_masked_sampling
from tests.support.sampling_reference import (
    Draw,
    Float32Array,
    mask_of,
    reference_logits,
    reference_token,
    sampling_of,
    tokens_on,
)

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("both_paths")]

LOGITS = np.random.default_rng(1).normal(0, 3, VOCABULARY).astype(np.float32)
PROMPT, OUTPUT = (5, 5, 299, 400), (5, 300, 300, 511, 300, 0)
EDITS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "negative presence": {"presence_penalty": -1.5},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below 1": {"repetition_penalty": 0.6},
    "all penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "bias": {"bias_token_ids": [299, 300, 0, 511], "biases": [12.0, 11.5, -100.0, 11.9]},
    "bias of one token twice": {"bias_token_ids": [300, 300], "biases": [6.0, 6.5]},
    "bias, then repetition": {"bias_token_ids": [300], "biases": [20.0], "repetition_penalty": 1.5},
    "min_tokens": {"min_tokens": 7, "end_token_ids": [int(LOGITS.argmax()), 300]},
    "min_tokens reached": {"min_tokens": 6, "end_token_ids": [int(LOGITS.argmax())]},
}


def _edited(draw: Draw, begin: int, end: int) -> Float32Array:
    logits, edits = draw.logits[begin:end].copy(), draw.row.edits
    if edits is not None:
        edits.apply(logits, begin)
    return logits


@pytest.mark.parametrize("mask", [None, mask_of([0, 5, 7, 255, 299, 300, 301, 511], VOCABULARY)], ids=["", "masked"])
@pytest.mark.parametrize("fields", EDITS.values(), ids=EDITS)
def test_a_shards_edits_are_those_of_the_whole(fields: dict[str, Any], mask: bytes | None) -> None:
    draw = Draw(LOGITS, sampling_of(**fields), PROMPT, OUTPUT, mask)
    for begin, end in [(0, VOCABULARY), (0, 300), (300, 512), (299, 301), (511, 512), (5, 5), (3, 29)]:
        np.testing.assert_array_equal(_edited(draw, begin, end), reference_logits(draw)[begin:end])


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("fields", EDITS.values(), ids=EDITS)
def test_edits_decide_the_token_on_any_layout(fields: dict[str, Any], temperature: float) -> None:
    draw = Draw(LOGITS, sampling_of(temperature=temperature, **fields), PROMPT, OUTPUT)
    for counts in LAYOUTS:
        assert tokens_on([draw], counts) == [reference_token(draw)]


@settings(max_examples=examples(60))
@given(
    prompt=st.lists(st.integers(0, 30), max_size=20),
    output=st.lists(st.integers(0, 30), max_size=300),
    grown=st.integers(0, 300),
)
def test_counts_that_grew_equal_counts_of_the_whole(prompt: list[int], output: list[int], grown: int) -> None:
    grown = min(grown, len(output))
    counts = TokenCounts(seen=prompt, counted=output[: len(output) - grown])
    for token_id in output[len(output) - grown :]:
        counts.append(token_id)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        token_id: output.count(token_id) for token_id in {*prompt, *output}
    }


def test_counts_hold_more_distinct_tokens_than_they_began_with() -> None:
    counts = TokenCounts(seen=(), counted=())
    for token_id in range(1000):
        counts.append(token_id)
    assert counts.ids.tolist() == list(range(1000))
    assert counts.counts.tolist() == [1.0] * 1000


def test_a_request_without_edits_has_none_to_apply() -> None:
    sequence = SequenceSampling(sampling_of(repetition_penalty=0.0, min_tokens=3), PROMPT, OUTPUT)
    sequence.append(4)
    assert sequence.draw().edits is None
    assert sequence.draw().position == len(PROMPT) + len(OUTPUT) + 1


def test_end_tokens_can_be_drawn_from_min_tokens_on() -> None:
    likeliest = int(LOGITS.argmax())
    sequence = SequenceSampling(sampling_of(min_tokens=2, end_token_ids=[likeliest]), PROMPT)
    banned = []
    for _ in range(3):
        banned.append(sequence.draw().edits is not None)
        sequence.append(1)
    assert banned == [True, True, False]


def test_presence_and_frequency_leave_the_prompts_tokens_alone() -> None:
    draw = Draw(LOGITS, sampling_of(presence_penalty=2.0, frequency_penalty=2.0), prompt=(7, 8))
    np.testing.assert_array_equal(_edited(draw, 0, VOCABULARY), LOGITS)


@pytest.mark.parametrize("temperature", [0.0, 2e-5, 100.0])
@pytest.mark.parametrize("repetition", [RANGES["repetition_penalty"].least, RANGES["repetition_penalty"].most])
def test_no_bound_of_a_parameter_makes_logits_overflow(repetition: float, temperature: float) -> None:
    """Logits that are not finite are damaged weights, for which a rank ends."""
    logits = np.array([-3e4, 3e4, 2.0, 1.0], dtype=np.float32)
    sampling = sampling_of(
        temperature=temperature, repetition_penalty=repetition, presence_penalty=-2.0, frequency_penalty=-2.0,
        bias_token_ids=[1], biases=[100.0],
    )  # fmt: skip
    draw = Draw(logits, sampling, prompt=(0, 1, 2), output=(1, 1))
    assert 0 <= tokens_on([draw], (2, 2))[0] < len(logits)


def test_repetition_moves_logits_of_either_sign_towards_less_likely() -> None:
    draw = Draw(
        np.array([2.0, -2.0, 0.0, 1.0], dtype=np.float32), sampling_of(repetition_penalty=2.0), prompt=(0, 1, 2)
    )
    assert _edited(draw, 0, 4).tolist() == [1.0, -4.0, 0.0, 1.0]


def test_masks_and_min_tokens_hold_on_every_layout() -> None:
    check_masked_sampling()


def test_the_mask_wins_where_min_tokens_would_leave_nothing() -> None:
    """A complete JSON text may only end; min_tokens cannot ask for more of it."""
    sampling = sampling_of(min_tokens=50, end_token_ids=[7, 9])
    for allowed, expected in ([7], {7}), ([7, 8], {8}):
        draws = [Draw(LOGITS, sampling, prompt=(1,) * n, mask=mask_of(allowed, VOCABULARY)) for n in range(1, 9)]
        for counts in LAYOUTS:
            assert set(tokens_on(draws, counts)) == expected


@pytest.mark.parametrize("counts", [(), (300, 212), (0, 512)], ids=str)
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3}], ids=str)
def test_a_draw_that_no_token_is_left_to_is_refused(fields: dict[str, Any], counts: tuple[int, ...]) -> None:
    good = Draw(LOGITS, sampling_of(**fields))
    bad = Draw(LOGITS, sampling_of(**fields), prompt=(1,) * 41, mask=mask_of([], VOCABULARY))
    with pytest.raises(ProtocolError, match="no token can be drawn at position 41: the mask"):
        tokens_on([good, bad], counts)


def test_a_mask_that_is_too_short_is_refused() -> None:
    with pytest.raises(ProtocolError, match="of 2 bytes does not reach vocabulary row 19"):
        LogitEdits(mask=np.zeros(2, dtype=np.uint8)).apply(np.zeros(10, dtype=np.float32), 10)


@pytest.mark.parametrize(
    ("changes", "is_plain"),
    [
        ({}, True),
        ({"temperature": 1e-6, "top_k": 5, "top_p": 0.5}, True),
        ({"temperature": 0.7}, True),
        ({"temperature": 0.7, "top_k": 5}, True),
        ({"temperature": 0.7, "top_p": 0.5}, True),
        ({"temperature": 0.7, "min_p": 0.1}, True),
        ({"temperature": 0.7, "repetition_penalty": 1.3}, False),
        ({"repetition_penalty": 1.3}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"bias_token_ids": [3], "biases": [0.5]}, False),
        ({"num_logprobs": 0}, False),
        ({"min_tokens": 4}, True),
        ({"min_tokens": 4, "end_token_ids": [1]}, False),
        ({"min_tokens": 3, "end_token_ids": [1]}, True),
    ],
)
def test_a_draw_is_plain_if_it_is_from_logits_as_they_are(changes: dict[str, Any], is_plain: bool) -> None:
    sequence = SequenceSampling(sampling_of(**{"temperature": 0.0, **changes}), PROMPT, [5, 6, 7])
    row = sequence.draw()
    assert sequence.is_plain == is_plain
    assert is_plain == (row.edits is None and row.num_logprobs is None)


def test_a_draw_becomes_plain_once_it_may_end_and_stays_so() -> None:
    sequence = SequenceSampling(sampling_of(temperature=0.0, min_tokens=3, end_token_ids=[1]), PROMPT)
    sequence.extend([4, 5])
    assert not sequence.is_plain
    sequence.extend([6])
    assert sequence.is_plain
    assert sequence.draw().position == len(PROMPT) + 3

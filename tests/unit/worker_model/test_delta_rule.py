"""The gated delta rule: chunks, tokens, steps and slots do not change what a sequence gets."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from hetero_api.rank_memory import SEQUENCES_AT_ONCE
from hetero_worker.attention.base import AttentionBatch, StepAttention
from hetero_worker.attention.delta_rule import DeltaInputs, DeltaWeights, gated_delta_rule
from hetero_worker.attention.kv_cache import LayerCache
from tests.support.delta_rule import DeltaCase, decode_step, part_of, span_step, tokens_of

pytestmark = pytest.mark.unit

CASE = DeltaCase()
LENGTH = 150
TOLERANCE = 2e-5


@dataclass(slots=True)
class Rule:
    """A layer's rule with states of its own, which hold what an earlier sequence left."""

    weights: DeltaWeights = field(default_factory=CASE.weights)
    by_token: bool = False
    cache: LayerCache = field(default_factory=CASE.cache)

    def span(self, inputs: DeltaInputs, begin: int, end: int, *, slot: int) -> torch.Tensor:
        """Compute tokens of one sequence as a step."""
        return self.step(part_of(inputs, begin, end), span_step(begin, end, slot=slot))

    def step(self, inputs: DeltaInputs, attention: StepAttention) -> torch.Tensor:
        return gated_delta_rule(inputs, self.weights, self.cache, attention, by_token=self.by_token)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("cuts", [(), (1,), (64,), (3, 67, 68), (149,)])
def test_steps_of_any_length_equal_the_definition(by_token: bool, cuts: tuple[int, ...]) -> None:
    inputs, rule = CASE.inputs(2, LENGTH), Rule(by_token=by_token)
    ends = [*cuts, LENGTH]
    got = [rule.span(inputs, begin, end, slot=3) for begin, end in zip([0, *cuts], ends, strict=True)]
    assert_close(torch.cat(got), CASE.by_definition(inputs))


def test_sequences_that_decode_together_equal_those_that_decode_alone() -> None:
    number = SEQUENCES_AT_ONCE + 3
    slots = list(range(number))[::-1]
    sequences = [CASE.inputs(seed, 3 + seed % 4) for seed in range(number)]
    rule = Rule()
    for inputs, slot in zip(sequences, slots, strict=True):
        if len(inputs.mixed) > 3:
            rule.span(inputs, 0, len(inputs.mixed) - 3, slot=slot)
    for token in (3, 2, 1):
        computed = [len(inputs.mixed) - token for inputs in sequences]
        got = rule.step(tokens_of(sequences, computed), decode_step(computed, slots))
    assert_close(got, torch.stack([CASE.by_definition(inputs)[-1] for inputs in sequences]))


def test_a_row_has_the_same_bits_in_any_step_token_by_token() -> None:
    inputs, others = CASE.inputs(2, 20), CASE.inputs(3, 22)
    alone = Rule(by_token=True)
    expected = alone.span(inputs, 0, 20, slot=0)
    rule = Rule(by_token=True)
    got = [rule.span(inputs, 0, 7, slot=4)]
    rule.span(others, 0, 9, slot=5)
    for token in range(7, 20):
        computed = [token + 2, token]
        got.append(rule.step(tokens_of([others, inputs], computed), decode_step(computed, [5, 4]))[1:])
    assert torch.equal(torch.cat(got), expected)


def test_a_sequence_of_one_token_begins_with_empty_states() -> None:
    inputs, rule = CASE.inputs(5, 1), Rule()
    assert_close(rule.step(inputs, decode_step([0], [9])), CASE.by_definition(inputs))


def test_rows_and_slots_of_a_step_are_found_once_for_all_layers() -> None:
    attention, made = decode_step([4, 2], [1, 0]), []

    def make(batch: AttentionBatch) -> list[int]:
        made.append(batch)
        return [batch.decode.num_rows]

    assert attention.once(make) is attention.once(make)
    assert made == [attention.batch]
    inputs, caches = CASE.inputs(2, 2), [CASE.cache(), CASE.cache()]
    got = [gated_delta_rule(inputs, CASE.weights(), cache, attention) for cache in caches]
    assert torch.equal(*got)

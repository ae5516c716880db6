"""Triton's kernels of the gated delta rule are those of the definition; a row's bits depend on its sequence alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from hetero_worker.attention.base import AttentionBatch, PrefillSpan, SavedStates, StepAttention
from hetero_worker.attention.delta_rule import DeltaInputs
from hetero_worker.layers.triton_ops import InvariantTritonOps, TritonOps
from tests.support.delta_rule import NO_BLOCKS, DeltaCase, decode_step, decoding, part_of, span_step, step_of, tokens_of

pytestmark = pytest.mark.unit

CASES = [DeltaCase(1, 1, 1, 1, 2), DeltaCase(), DeltaCase(1, 2, 16, 33, 3)]
LENGTH = 7
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2**-7}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[actual.dtype], atol=2e-5)


class Rule:
    """A layer's rule with states of its own."""

    def __init__(self, case: DeltaCase, ops: TritonOps) -> None:
        self.cache = case.cache()
        self._weights = case.weights()
        self._ops = ops

    def step(self, inputs: DeltaInputs, attention: StepAttention) -> torch.Tensor:
        return self._ops.delta_rule(inputs, self._weights, self.cache, attention)


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.float32) for case in CASES), (CASES[1], torch.bfloat16)], ids=str
)
def test_a_sequence_is_that_of_the_definition_however_it_is_cut(case: DeltaCase, dtype: torch.dtype) -> None:
    inputs = case.inputs(2, LENGTH, dtype)
    expected = Rule(case, InvariantTritonOps()).step(inputs, span_step(0, LENGTH, slot=3))
    assert_close(expected, case.by_definition(inputs))
    rule = Rule(case, InvariantTritonOps())
    steps = [
        rule.step(part_of(inputs, begin, end), span_step(begin, end, slot=5)) for begin, end in pairwise([0, 1, 2, 5])
    ]
    steps += [rule.step(part_of(inputs, at, at + 1), decode_step([at], [5])) for at in range(5, LENGTH)]
    assert torch.equal(torch.cat(steps), expected)


@pytest.mark.parametrize("ops", [TritonOps(), InvariantTritonOps()], ids=["in chunks", "invariant"])
def test_a_mixed_step_with_saved_states(ops: TritonOps) -> None:
    """A sequence begins, one goes on with what another one saved, and one decodes its first token."""
    case = CASES[1]
    rule, inputs, other = Rule(case, ops), case.inputs(2, LENGTH), case.inputs(3, 1)
    save = SavedStates(4, 30)
    assert_close(rule.step(inputs, span_step(0, LENGTH, slot=3, saves=(save,))), case.by_definition(inputs))
    spans = PrefillSpan(1, 4, 4, NO_BLOCKS, 1, save.place), PrefillSpan(4, 4 + LENGTH, 0, NO_BLOCKS, 8)
    rows = 4 + LENGTH
    attention = step_of(AttentionBatch(torch.zeros(rows), decoding([0], [9]), spans))
    parts = (other, part_of(inputs, 4, 7), inputs)
    mixed, gates = (torch.cat([part[i] for part in parts]) for i in range(2))
    got = rule.step(DeltaInputs(mixed, gates), attention)
    assert_close(got[:1], case.by_definition(other))
    assert_close(got[1:4], case.by_definition(inputs)[4:7])
    assert_close(got[4:], case.by_definition(inputs))


def test_sequences_that_decode_together_have_the_bits_of_those_alone() -> None:
    case, slots, ends = CASES[1], [7, 0, 12], [6, 4, 3]
    sequences = [case.inputs(seed, length) for seed, length in enumerate(ends)]
    rule, alone = Rule(case, TritonOps()), Rule(case, TritonOps())
    for token in range(3):
        got = rule.step(tokens_of(sequences, [token] * 3), decode_step([token] * 3, slots))
        for row, (inputs, slot) in enumerate(zip(sequences, slots, strict=True)):
            expected = alone.step(part_of(inputs, token, token + 1), decode_step([token], [slot]))
            assert torch.equal(got[row : row + 1], expected)
            assert_close(expected, case.by_definition(inputs)[token : token + 1])

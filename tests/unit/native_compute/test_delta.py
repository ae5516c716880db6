"""The native gated delta rule is that of the definition, and a row's bits depend on its sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from hetero_worker.attention.base import SavedStates, StepAttention
from hetero_worker.attention.delta_rule import DeltaInputs
from hetero_worker.layers.native_ops import NativeOps
from hetero_worker.native.op_queue import OpQueue
from tests.support.delta_rule import DeltaCase, decode_step, part_of, span_step, tokens_of
from tests.support.native_compute import TEAMS

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("isa")]

CASES = [
    DeltaCase(1, 1, 1, 1, 2),
    DeltaCase(),
    DeltaCase(2, 2, 16, 33, 3),
    DeltaCase(1, 3, 24, 8, 1),
    DeltaCase(1, 2, 128, 144, 4),
]
LENGTH = 23
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-8 + 2e-6}
each_type = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[actual.dtype], atol=1e-5)


class Rule:
    """A layer's rule by a team, with states of its own."""

    def __init__(self, case: DeltaCase, op_queue: OpQueue) -> None:
        self.cache = case.cache()
        self._weights = case.weights()
        self._ops = NativeOps(op_queue)

    def step(self, inputs: DeltaInputs, attention: StepAttention) -> torch.Tensor:
        return self._ops.delta_rule(inputs, self._weights, self.cache, attention)

    def spans(self, inputs: DeltaInputs, ends: Sequence[int], *, slot: int) -> torch.Tensor:
        """Compute a sequence in steps that end so."""
        steps = (
            self.step(part_of(inputs, begin, end), span_step(begin, end, slot=slot))
            for begin, end in pairwise([0, *ends])
        )
        return torch.cat(list(steps))

    def states(self, slot: int) -> list[torch.Tensor]:
        return [self.cache.keys[slot], self.cache.values[slot]]


@each_type
@each_case
def test_a_sequence_is_that_of_the_definition_however_it_is_cut(
    case: DeltaCase, dtype: torch.dtype, op_queues: dict[int, OpQueue]
) -> None:
    """All teams, and all ways to cut it, have the same bits and leave the same states."""
    inputs = case.inputs(2, LENGTH, dtype)
    whole = Rule(case, op_queues[1])
    expected = whole.spans(inputs, [LENGTH], slot=3)
    assert_close(expected, case.by_definition(inputs))
    for team in TEAMS:
        for ends in ([LENGTH], [1, 2, 5, LENGTH], range(1, LENGTH + 1)):
            rule = Rule(case, op_queues[team])
            assert torch.equal(rule.spans(inputs, ends, slot=5), expected)
            assert all(map(torch.equal, rule.states(5), whole.states(3)))


@each_type
@each_case
def test_sequences_that_decode_together_have_the_bits_of_those_alone(
    case: DeltaCase, dtype: torch.dtype, op_queues: dict[int, OpQueue]
) -> None:
    """Some of them begin, in slots that earlier sequences left."""
    slots, ends = [7, 0, 12, 3, 9], [9, 6, 4, 4, 4]
    sequences = [case.inputs(seed, length, dtype) for seed, length in enumerate(ends)]
    alone = Rule(case, op_queues[1])
    expected = [alone.spans(inputs, [len(inputs.mixed)], slot=i) for i, inputs in enumerate(sequences)]
    for team in TEAMS:
        rule = Rule(case, op_queues[team])
        for inputs, slot, end in zip(sequences, slots, ends, strict=True):
            if end > 4:
                rule.spans(inputs, [end - 4], slot=slot)
        for left in (4, 3, 2, 1):
            computed = [end - left for end in ends]
            got = rule.step(tokens_of(sequences, computed), decode_step(computed, slots))
            assert torch.equal(got, torch.stack([rows[at] for rows, at in zip(expected, computed, strict=True)]))
        untouched = case.cache()
        for slot in {*range(len(untouched.keys))} - {*slots}:
            assert torch.equal(rule.cache.keys[slot], untouched.keys[slot])


def test_saved_states_are_those_that_a_sequence_goes_on_with(op_queues: dict[int, OpQueue]) -> None:
    case, rule = CASES[1], Rule(CASES[1], op_queues[2])
    inputs, saves = case.inputs(2, LENGTH), (SavedStates(8, 30), SavedStates(9, 31))
    expected = rule.step(inputs, span_step(0, LENGTH, slot=3, saves=saves))
    assert_close(expected, case.by_definition(inputs))
    for save in saves:
        step = span_step(save.num_tokens, LENGTH, slot=1, states_from=save.place)
        got = rule.step(part_of(inputs, save.num_tokens, LENGTH), step)
        assert torch.equal(got, expected[save.num_tokens :])
        assert all(map(torch.equal, rule.states(1), rule.states(3)))


def test_states_decay_wholly_or_not_at_all(op_queues: dict[int, OpQueue]) -> None:
    """Gates far from zero are those of the definition, too."""
    case = CASES[1]
    inputs = case.inputs(2, 12)
    inputs.gates.mul_(40)
    assert inputs.gates.max() > 88
    assert_close(Rule(case, op_queues[2]).spans(inputs, [12], slot=0), case.by_definition(inputs))

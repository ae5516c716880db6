"""The gated delta rule: chunks, tokens, steps and slots do not change what a sequence gets."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from hetero_api.rank_memory import SEQUENCES_AT_ONCE
from hetero_worker.attention.base import AttentionBatch, DecodeRows, PrefillSpan
from hetero_worker.attention.delta_rule import DeltaInputs, DeltaWeights, gated_delta_rule
from hetero_worker.attention.kv_cache import LayerCache

pytestmark = pytest.mark.unit

KEY_HEADS, GROUP, KEY_DIM, VALUE_DIM, TAPS = 2, 3, 5, 4, 4
VALUE_HEADS = KEY_HEADS * GROUP
CHANNELS = KEY_HEADS * (2 * KEY_DIM + GROUP * VALUE_DIM)
NO_BLOCKS = np.zeros(1, dtype=np.int32)
LENGTH = 150
TOLERANCE = 2e-6


def _weights() -> DeltaWeights:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return DeltaWeights(
        convolution=random(CHANNELS, TAPS),
        decay=-random(VALUE_HEADS).exp(),
        decay_bias=random(VALUE_HEADS),
        norm=random(VALUE_DIM),
        eps=1e-6,
        key_heads=KEY_HEADS,
        key_dim=KEY_DIM,
    )


@dataclass(slots=True)
class Rule:
    """A layer's rule with states of its own, which hold what an earlier sequence left."""

    weights: DeltaWeights = field(default_factory=_weights)
    by_token: bool = False
    cache: LayerCache = field(
        default_factory=lambda: LayerCache(
            torch.full((40, VALUE_HEADS, KEY_DIM, VALUE_DIM), 7.0), torch.full((40, CHANNELS, TAPS - 1), 7.0), 1
        )
    )

    def span(self, inputs: DeltaInputs, begin: int, end: int, *, slot: int) -> torch.Tensor:
        """Compute tokens of one sequence as a step."""
        rows = PrefillSpan(0, end - begin, begin, NO_BLOCKS, slot)
        own = DeltaInputs(inputs.mixed[begin:end], inputs.gates[begin:end])
        return self.step(own, AttentionBatch(torch.zeros(end - begin), _decoding([], []), (rows,)))

    def step(self, inputs: DeltaInputs, batch: AttentionBatch) -> torch.Tensor:
        return gated_delta_rule(inputs, self.weights, self.cache, batch, by_token=self.by_token)


def _decoding(computed: list[int], slots: list[int]) -> DecodeRows:
    lengths = np.array(computed, dtype=np.int32) + 1
    return DecodeRows(lengths, np.zeros((len(slots), 1), dtype=np.int32), np.array(slots, dtype=np.int64))


def _inputs(seed: int, length: int = LENGTH) -> DeltaInputs:
    generator = torch.Generator().manual_seed(seed)
    width = CHANNELS + VALUE_HEADS * VALUE_DIM
    mixed = torch.randn(length, width, generator=generator)
    return DeltaInputs(mixed, torch.randn(length, 2 * VALUE_HEADS, generator=generator))


def _by_definition(inputs: DeltaInputs) -> torch.Tensor:
    """The outputs of a sequence, in float64 and a token and a head at a time."""
    narrow = _weights()
    weights = narrow._replace(
        convolution=narrow.convolution.double(),
        decay=narrow.decay.double(),
        decay_bias=narrow.decay_bias.double(),
        norm=narrow.norm.double(),
    )
    mixed, gates = inputs.mixed.double(), inputs.gates.double()
    padded = torch.cat([mixed.new_zeros(TAPS - 1, CHANNELS), mixed[:, :CHANNELS]])
    out = []
    states = mixed.new_zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM)
    for token in range(len(mixed)):
        convolved = torch.nn.functional.silu((padded[token : token + TAPS].T * weights.convolution).sum(1))
        keys = KEY_HEADS * KEY_DIM
        query, key, value = convolved[:keys], convolved[keys : 2 * keys], convolved[2 * keys :]
        z = mixed[token, CHANNELS:].view(VALUE_HEADS, VALUE_DIM)
        for head in range(VALUE_HEADS):
            of_key_head = slice(head // GROUP * KEY_DIM, (head // GROUP + 1) * KEY_DIM)
            q, k = (part[of_key_head] / (part[of_key_head].square().sum() + 1e-6).sqrt() for part in (query, key))
            v = value[head * VALUE_DIM : (head + 1) * VALUE_DIM]
            b, a = gates[token, head].sigmoid(), gates[token, VALUE_HEADS + head]
            states[head] *= (torch.nn.functional.softplus(a + weights.decay_bias[head]) * weights.decay[head]).exp()
            states[head] += torch.outer(k, b * (v - states[head].T @ k))
            o = states[head].T @ q / KEY_DIM**0.5
            normed = o / (o.square().mean() + weights.eps).sqrt() * weights.norm
            out.append(normed * torch.nn.functional.silu(z[head]))
    return torch.stack(out).view(len(mixed), -1).float()


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("cuts", [(), (1,), (64,), (3, 67, 68), (149,)])
def test_steps_of_any_length_equal_the_definition(by_token: bool, cuts: tuple[int, ...]) -> None:
    inputs, rule = _inputs(2), Rule(by_token=by_token)
    ends = [*cuts, LENGTH]
    got = [rule.span(inputs, begin, end, slot=3) for begin, end in zip([0, *cuts], ends, strict=True)]
    assert (torch.cat(got) - _by_definition(inputs)).abs().max() <= TOLERANCE * 10


def test_sequences_that_decode_together_equal_those_that_decode_alone() -> None:
    number = SEQUENCES_AT_ONCE + 3
    slots = list(range(number))[::-1]
    sequences = [_inputs(seed, 3 + seed % 4) for seed in range(number)]
    rule = Rule()
    for inputs, slot in zip(sequences, slots, strict=True):
        if len(inputs.mixed) > 3:
            rule.span(inputs, 0, len(inputs.mixed) - 3, slot=slot)
    for token in (3, 2, 1):
        lasts = DeltaInputs(
            torch.stack([inputs.mixed[-token] for inputs in sequences]),
            torch.stack([inputs.gates[-token] for inputs in sequences]),
        )
        computed = [len(inputs.mixed) - token for inputs in sequences]
        got = rule.step(lasts, AttentionBatch(torch.zeros(number), _decoding(computed, slots), ()))
    expected = torch.stack([_by_definition(inputs)[-1] for inputs in sequences])
    assert (got - expected).abs().max() <= TOLERANCE * 10


def test_a_row_has_the_same_bits_in_any_step_token_by_token() -> None:
    inputs, others = _inputs(2, 20), _inputs(3, 22)
    alone = Rule(by_token=True)
    expected = alone.span(inputs, 0, 20, slot=0)
    rule = Rule(by_token=True)
    got = [rule.span(inputs, 0, 7, slot=4)]
    rule.span(others, 0, 9, slot=5)
    for token in range(7, 20):
        together = DeltaInputs(
            torch.stack([others.mixed[token + 2], inputs.mixed[token]]),
            torch.stack([others.gates[token + 2], inputs.gates[token]]),
        )
        batch = AttentionBatch(torch.zeros(2), _decoding([token + 2, token], [5, 4]), ())
        got.append(rule.step(together, batch)[1:])
    assert torch.equal(torch.cat(got), expected)


def test_a_sequence_of_one_token_begins_with_empty_states() -> None:
    inputs, rule = _inputs(5, 1), Rule()
    got = rule.step(inputs, AttentionBatch(torch.zeros(1), _decoding([0], [9]), ()))
    assert (got - _by_definition(inputs)).abs().max() <= TOLERANCE * 10

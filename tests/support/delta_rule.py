"""Layers of the gated delta rule with random numbers, and what the definition makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from hetero_worker.attention.base import AttentionBatch, DecodeRows, PrefillSpan, SavedStates, StepAttention
from hetero_worker.attention.delta_rule import DeltaInputs, DeltaWeights
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.torch_paged import TorchPagedAttention
from tests.support.seeded import seeded

NO_BLOCKS = np.zeros(1, dtype=np.int32)
_OF_AN_EARLIER_SEQUENCE = 7.0


@dataclass(frozen=True, slots=True)
class DeltaCase:
    """Shape of a layer."""

    key_heads: int = 2
    group: int = 3
    key_dim: int = 5
    value_dim: int = 4
    taps: int = 4
    eps: float = 1e-6
    """Of the norm of the output."""

    @property
    def value_heads(self) -> int:
        return self.key_heads * self.group

    @property
    def channels(self) -> int:
        """Elements of q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def weights(self) -> DeltaWeights:
        generator = seeded(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        return DeltaWeights(
            convolution=random(self.taps, self.channels),
            decay=-random(self.value_heads).exp(),
            decay_bias=random(self.value_heads),
            norm=random(self.value_dim),
            eps=self.eps,
            key_heads=self.key_heads,
            key_dim=self.key_dim,
        )

    def inputs(self, seed: int, length: int, dtype: torch.dtype = torch.float32) -> DeltaInputs:
        """Return the projections of a sequence's tokens."""
        generator = seeded(seed)
        width = self.channels + self.value_heads * self.value_dim
        mixed = torch.randn(length, width, generator=generator)
        gates = torch.randn(length, 2 * self.value_heads, generator=generator)
        return DeltaInputs(mixed.to(dtype), gates.to(dtype))

    def cache(self, num_slots: int = 40) -> LayerCache:
        """Return states that earlier sequences left."""
        matrices = torch.full((num_slots, self.value_heads, self.key_dim, self.value_dim), _OF_AN_EARLIER_SEQUENCE)
        windows = torch.full((num_slots, self.taps - 1, self.channels), _OF_AN_EARLIER_SEQUENCE)
        return LayerCache(matrices, windows, 1)

    def by_definition(self, inputs: DeltaInputs) -> torch.Tensor:
        """Return the outputs of a whole sequence, in float64 and a token and a head at a time."""
        narrow = self.weights()
        convolution, decay, bias, norm = (part.double() for part in narrow[:4])
        mixed, gates = inputs.mixed.double(), inputs.gates.double()
        padded = torch.cat([mixed.new_zeros(self.taps - 1, self.channels), mixed[:, : self.channels]])
        out = []
        states = mixed.new_zeros(self.value_heads, self.key_dim, self.value_dim)
        for token in range(len(mixed)):
            convolved = F.silu((padded[token : token + self.taps] * convolution).sum(0))
            keys = self.key_heads * self.key_dim
            query, key, value = convolved[:keys], convolved[keys : 2 * keys], convolved[2 * keys :]
            z = mixed[token, self.channels :].view(self.value_heads, self.value_dim)
            for head in range(self.value_heads):
                begin = head // self.group * self.key_dim
                of_head = (part[begin : begin + self.key_dim] for part in (query, key))
                q, k = (part / (part.square().sum() + 1e-6).sqrt() for part in of_head)
                v = value[head * self.value_dim : (head + 1) * self.value_dim]
                b, a = gates[token, head].sigmoid(), gates[token, self.value_heads + head]
                states[head] *= (F.softplus(a + bias[head]) * decay[head]).exp()
                states[head] += torch.outer(k, b * (v - states[head].T @ k))
                o = states[head].T @ q / self.key_dim**0.5
                normed = o / (o.square().mean() + narrow.eps).sqrt() * norm
                out.append(normed * F.silu(z[head]))
        return torch.stack(out).view(len(mixed), -1)


def decoding(computed: Sequence[int], slots: Sequence[int]) -> DecodeRows:
    """Return rows of sequences that have so many tokens computed."""
    lengths = np.array(computed, dtype=np.int32) + 1
    return DecodeRows(lengths, np.zeros((len(slots), 1), dtype=np.int32), np.array(slots, dtype=np.int64))


def decode_step(computed: Sequence[int], slots: Sequence[int]) -> StepAttention:
    """Return a step that only decodes."""
    return step_of(AttentionBatch(torch.zeros(len(slots)), decoding(computed, slots), ()))


def span_step(
    begin: int, end: int, *, slot: int, states_from: int | None = None, saves: tuple[SavedStates, ...] = ()
) -> StepAttention:
    """Return a step of a sequence's tokens [begin, end)."""
    span = PrefillSpan(0, end - begin, begin, NO_BLOCKS, slot, states_from, saves)
    return step_of(AttentionBatch(torch.zeros(end - begin), decoding([], []), (span,)))


def step_of(batch: AttentionBatch) -> StepAttention:
    """Return a step for layers with states; whose attention it is does not matter to them."""
    return TorchPagedAttention().begin(batch)


def part_of(inputs: DeltaInputs, begin: int, end: int) -> DeltaInputs:
    """Return the projections of tokens [begin, end)."""
    return DeltaInputs(inputs.mixed[begin:end], inputs.gates[begin:end])


def tokens_of(sequences: Sequence[DeltaInputs], tokens: Sequence[int]) -> DeltaInputs:
    """Return the projections of one token of each sequence."""
    pairs = list(zip(sequences, tokens, strict=True))
    mixed = torch.stack([inputs.mixed[token] for inputs, token in pairs])
    return DeltaInputs(mixed, torch.stack([inputs.gates[token] for inputs, token in pairs]))

"""The gated delta rule (arXiv:2412.06464) by torch's operators: the reference of other kernels.

A value head has a matrix S as its state. A token with query q, key k, value v, decay a and gate b makes of it

    S ← a·S + k·uᵀ  with  u = b·(v - (a·S)ᵀ·k),  and its output is Sᵀ·q.

Before that, a causal convolution mixes each element of q, k and v with those of the tokens before; after it, the output
is normed and multiplied by silu(z). So a sequence has two states in a layer: the matrices, and the last inputs of the
convolution. Both lie in a row of the layer's cache for as long as the sequence has its slot, and begin as zeros. A
step's rows and slots are found for its first layer, and kept for the others.

Prompts go in chunks. In a chunk of tokens with the states S₀ before it, the u of all tokens solve a triangular system,
for each reads only earlier ones; outputs and the next S₀ follow by products of matrices. Arithmetic is float32.

Token by token, a row's bits depend on its sequence alone. In chunks they depend on where chunks begin, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from hetero_api.rank_memory import DELTA_CHUNK, SEQUENCES_AT_ONCE
from hetero_worker.attention.base import AttentionBatch, DecodeRows, IntArray, PrefillSpan, SlotArray, StepAttention
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.memory.streams import to_device

_KEY_EPS: Final = 1e-6
"""Added to the squared length of queries and keys."""


class DeltaInputs(NamedTuple):
    """Projections of a step's tokens."""

    mixed: torch.Tensor
    """[tokens, q | k | v | z]: of key heads, key heads, value heads and value heads."""
    gates: torch.Tensor
    """[tokens, b | a]: of value heads each, before their functions."""


class DeltaWeights(NamedTuple):
    """Weights of a rank's heads beside projections, float32."""

    convolution: torch.Tensor
    """[taps, q | k | v], the token's own tap last."""
    decay: torch.Tensor
    """[value heads]: the logarithm of `a` is this times softplus of the input; less than 0."""
    decay_bias: torch.Tensor
    """[value heads]"""
    norm: torch.Tensor
    """[value_dim]"""
    eps: float
    key_heads: int
    key_dim: int


class StateRows(NamedTuple):
    """Rows [begin, end) of a step: `len(slots)` sequences with as many tokens each."""

    begin: int
    end: int
    slots: SlotArray
    lengths: IntArray
    """[sequences]: tokens, these included. A sequence that has no others begins here with empty states."""
    states_from: int | None = None
    """Where the only sequence's states are copied from before, if they are."""
    states_to: int | None = None
    """Where they are copied to afterwards, if they are."""

    @property
    def num_tokens(self) -> int:
        """Tokens of each sequence."""
        return (self.end - self.begin) // len(self.slots)

    @property
    def fresh(self) -> SlotArray:
        """Slots of the sequences that begin here."""
        slots: SlotArray = self.slots[self.lengths == self.num_tokens]
        return slots

    def before(self, cache: LayerCache) -> None:
        """Copy the states that the sequence begins with."""
        if self.states_from is not None:
            cache.copy_states(self.states_from, int(self.slots[0]))

    def behind(self, cache: LayerCache) -> None:
        """Save the states that the sequence has come to."""
        if self.states_to is not None:
            cache.copy_states(int(self.slots[0]), self.states_to)


def state_rows(batch: AttentionBatch) -> list[StateRows]:
    """Return all decode rows, then spans in parts that end where states are saved."""
    return list(_rows_of(batch, at_once=batch.decode.num_rows))


class PlacedRows(NamedTuple):
    """Rows that torch computes together, with their slots on the step's device."""

    rows: StateRows
    slots: torch.Tensor
    """int64 [sequences]."""
    fresh: torch.Tensor | None
    """Slots of sequences that begin; None: there are none."""


def gated_delta_rule(
    inputs: DeltaInputs, weights: DeltaWeights, cache: LayerCache, attention: StepAttention, *, by_token: bool = False
) -> torch.Tensor:
    """Return [tokens, value heads · value_dim], and take the sequences' states on.

    `cache.keys` are the matrices, float32 [slots, value heads, key_dim, value_dim], `cache.values` the convolution's
    inputs, float32 [slots, taps - 1, q | k | v]. `by_token`: each sequence and token by itself.
    """
    value_heads, value_dim = len(weights.decay), len(weights.norm)
    out = inputs.mixed.new_empty(len(inputs.mixed), value_heads * value_dim)
    for placed in attention.once(_rows_by_token if by_token else rows_in_chunks):
        compute_rows(inputs, weights, cache, placed, out)
    return out


def compute_rows(
    inputs: DeltaInputs, weights: DeltaWeights, cache: LayerCache, placed: PlacedRows, out: torch.Tensor
) -> None:
    """Compute some rows of a step; `out` is that of all rows, as are the inputs."""
    rows, slots, fresh = placed
    rows.before(cache)
    if fresh is not None:
        cache.keys.index_fill_(0, fresh, 0.0)
        cache.values.index_fill_(0, fresh, 0.0)
    own = DeltaInputs(inputs.mixed[rows.begin : rows.end], inputs.gates[rows.begin : rows.end])
    out[rows.begin : rows.end] = _compute(own, weights, cache, slots)
    rows.behind(cache)


def rows_in_chunks(batch: AttentionBatch) -> list[PlacedRows]:
    """Return decode rows, some at once, then spans in parts that end where states are saved."""
    device = batch.slot_mapping.device
    return [_placed(rows, device) for rows in _rows_of(batch, at_once=SEQUENCES_AT_ONCE)]


def _rows_by_token(batch: AttentionBatch) -> list[PlacedRows]:
    device = batch.slot_mapping.device
    return [_placed(rows, device) for rows in _rows_of(batch, at_once=1, by_token=True)]


def _placed(rows: StateRows, device: torch.device) -> PlacedRows:
    slots, fresh = (to_device(torch.from_numpy(slots), device) for slots in (rows.slots, rows.fresh))
    return PlacedRows(rows, slots, fresh if len(fresh) else None)


def _rows_of(batch: AttentionBatch, *, at_once: int, by_token: bool = False) -> Iterator[StateRows]:
    yield from _decode_rows(batch.decode, at_once=at_once)
    for span in batch.prefills:
        yield from _parts_of(span, by_token=by_token)


def _decode_rows(decode: DecodeRows, *, at_once: int) -> Iterator[StateRows]:
    """Yield rows of different sequences together, but a row whose states are saved by itself."""
    saved = [] if decode.saves is None else np.flatnonzero(decode.saves >= 0).tolist()
    begin = 0
    for row in (*saved, decode.num_rows):
        for first in range(begin, row, at_once or 1):
            end = min(first + at_once, row)
            yield StateRows(first, end, decode.slots[first:end], decode.lengths[first:end])
        if decode.saves is not None and row < decode.num_rows:
            own = slice(row, row + 1)
            yield StateRows(row, row + 1, decode.slots[own], decode.lengths[own], states_to=int(decode.saves[row]))
        begin = row + 1


def _parts_of(span: PrefillSpan, *, by_token: bool) -> Iterator[StateRows]:
    slots = np.array([span.slot])
    places = {span.begin + save.num_tokens - span.num_computed: save.place for save in span.saves}
    ends = range(span.begin + 1, span.end + 1) if by_token else sorted({*places, span.end})
    begin, states_from = span.begin, span.states_from
    for end in ends:
        length = np.array([span.num_computed + end - span.begin], dtype=np.int32)
        yield StateRows(begin, end, slots, length, states_from, places.get(end))
        begin, states_from = end, None


def _compute(inputs: DeltaInputs, weights: DeltaWeights, cache: LayerCache, slots: torch.Tensor) -> torch.Tensor:
    """Return the outputs of sequences that have as many tokens each, [rows, value heads · value_dim] in float32."""
    number, channels = len(slots), weights.convolution.shape[1]
    mixed = inputs.mixed.view(number, -1, inputs.mixed.shape[1])
    seen = torch.cat([cache.values.index_select(0, slots), mixed[..., :channels].float()], dim=1)
    cache.values.index_copy_(0, slots, seen[:, seen.shape[1] - cache.values.shape[1] :])
    query, key, value = _heads(_convolved(seen, weights.convolution), weights)
    gates = inputs.gates.view(number, -1, 2, len(weights.decay)).float()
    opening = gates[:, :, 0].sigmoid().transpose(1, 2)
    decay = (F.softplus(gates[:, :, 1] + weights.decay_bias) * weights.decay).transpose(1, 2)
    states = cache.keys.index_select(0, slots)
    length = 1 if mixed.shape[1] == 1 else DELTA_CHUNK
    outputs = []
    for begin in range(0, mixed.shape[1], length):
        part = slice(begin, begin + length)
        chunk = _Chunk(query[:, :, part], key[:, :, part], value[:, :, part], decay[:, :, part], opening[:, :, part])
        states, output = _one_token(chunk, states) if length == 1 else _one_chunk(chunk, states)
        outputs.append(output)
    cache.keys.index_copy_(0, slots, states)
    return _normed(torch.cat(outputs, dim=2).transpose(1, 2), mixed[..., channels:], weights).flatten(0, 1)


def _convolved(seen: torch.Tensor, convolution: torch.Tensor) -> torch.Tensor:
    """Return silu of the causal convolution: float32 [sequences, tokens, channels]; `seen` has taps - 1 tokens more."""
    taps = len(convolution)
    tokens = seen.shape[1] - taps + 1
    total = seen[:, :tokens] * convolution[0]
    for tap in range(1, taps):
        total += seen[:, tap : tap + tokens] * convolution[tap]
    return F.silu(total)


def _heads(mixed: torch.Tensor, weights: DeltaWeights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of value heads, [sequences, value heads, tokens, dim] each."""
    keys, value_heads = weights.key_heads * weights.key_dim, len(weights.decay)
    query, key, value = torch.split(mixed, [keys, keys, mixed.shape[2] - 2 * keys], dim=2)

    def of_value_heads(of_key_heads: torch.Tensor) -> torch.Tensor:
        heads = of_key_heads.reshape(*mixed.shape[:2], weights.key_heads, weights.key_dim)
        unit = heads * (heads.square().sum(3, keepdim=True) + _KEY_EPS).rsqrt()
        return unit.repeat_interleave(value_heads // weights.key_heads, dim=2).transpose(1, 2)

    scaled = of_value_heads(query) * weights.key_dim**-0.5
    return scaled, of_value_heads(key), value.reshape(*mixed.shape[:2], value_heads, -1).transpose(1, 2)


class _Chunk(NamedTuple):
    """Tokens of sequences: [sequences, value heads, tokens, dim], and without `dim` for the last two."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    """Logarithms."""
    opening: torch.Tensor


def _one_token(chunk: _Chunk, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next states and the outputs of one token of each sequence."""
    query, key, value = chunk.query.squeeze(2), chunk.key.squeeze(2), chunk.value.squeeze(2)
    states = states * chunk.decay.exp().unsqueeze(3)
    update = (value - (states * key.unsqueeze(3)).sum(2)) * chunk.opening
    states += key.unsqueeze(3) * update.unsqueeze(2)
    return states, (states * query.unsqueeze(3)).sum(2, keepdim=True)


def _one_chunk(chunk: _Chunk, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next states and the outputs of several tokens of each sequence."""
    decayed = chunk.decay.cumsum(2)
    later = torch.ones(decayed.shape[2], decayed.shape[2], dtype=torch.bool, device=states.device).triu_(1)
    # From each token (column) to each later one (row).
    between = (decayed.unsqueeze(3) - decayed.unsqueeze(2)).masked_fill_(later, float("-inf")).exp_()
    since, until = decayed.exp().unsqueeze(3), (decayed[:, :, -1:] - decayed).exp().unsqueeze(3)
    opening = chunk.opening.unsqueeze(3)
    # Its diagonal is taken to be ones.
    system = opening * between * (chunk.key @ chunk.key.transpose(2, 3))
    wanted = opening * (chunk.value - since * (chunk.key @ states))
    updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output = since * (chunk.query @ states) + (between * (chunk.query @ chunk.key.transpose(2, 3))) @ updates
    states = states * since[:, :, -1:] + (until * chunk.key).transpose(2, 3) @ updates
    return states, output


def _normed(output: torch.Tensor, gates: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
    """Return the normed output of [sequences, tokens, value heads, dim], times silu(z): [sequences, tokens, values]."""
    root = (output.square().mean(3, keepdim=True) + weights.eps).rsqrt()
    return (output * root * weights.norm).flatten(2) * F.silu(gates.float())

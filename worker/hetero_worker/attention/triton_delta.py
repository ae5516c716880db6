"""The gated delta rule of a GPU by our Triton kernels (`kernels.delta_rule`). Import it only where Triton is installed.

All decode rows of a step are two launches a layer. Prompts go in chunks, by torch's operators. Batch-invariant, spans
go through the kernels, too, token by token: a row then has the same bits in whatever step it is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from hetero_worker.attention.base import AttentionBatch, DecodeRows, StepAttention
from hetero_worker.attention.delta_rule import (
    DeltaInputs,
    DeltaWeights,
    PlacedRows,
    StateRows,
    compute_rows,
    rows_in_chunks,
    state_rows,
)
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.kernels.delta_rule import SequenceStates, convolve, update_states
from hetero_worker.memory.streams import to_device


class _KernelRows(NamedTuple):
    rows: StateRows
    slots: torch.Tensor
    """int64 [sequences], on the step's device, as the next ones."""
    lengths: torch.Tensor
    """int32 [sequences]."""


def triton_delta_rule(
    inputs: DeltaInputs, weights: DeltaWeights, cache: LayerCache, attention: StepAttention, *, by_token: bool
) -> torch.Tensor:
    """Return what `gated_delta_rule` returns, and take the same states on. `by_token`: spans, too, by the kernels."""
    out = inputs.mixed.new_empty(len(inputs.mixed), len(weights.decay) * len(weights.norm))
    for each in attention.once(_all_by_kernels if by_token else _decode_rows_by_kernels):
        if isinstance(each, PlacedRows):
            compute_rows(inputs, weights, cache, each, out)
        else:
            _compute(inputs, weights, cache, each, out)
    return out


def _all_by_kernels(batch: AttentionBatch) -> list[_KernelRows | PlacedRows]:
    return [_for_kernels(rows, batch.slot_mapping.device) for rows in state_rows(batch)]


def _decode_rows_by_kernels(batch: AttentionBatch) -> list[_KernelRows | PlacedRows]:
    decode = batch.decode
    no_rows = DecodeRows(decode.lengths[:0], decode.block_tables[:0], decode.slots[:0])
    spans = rows_in_chunks(replace(batch, decode=no_rows))
    return [*_all_by_kernels(replace(batch, prefills=())), *spans]


def _for_kernels(rows: StateRows, device: torch.device) -> _KernelRows:
    slots, lengths = (to_device(torch.from_numpy(array), device) for array in (rows.slots, rows.lengths))
    return _KernelRows(rows, slots, lengths)


def _compute(
    inputs: DeltaInputs, weights: DeltaWeights, cache: LayerCache, part: _KernelRows, out: torch.Tensor
) -> None:
    rows, slots, lengths = part
    rows.before(cache)
    mixed, gates = (tensor[rows.begin : rows.end].contiguous() for tensor in inputs)
    states = SequenceStates(cache.keys, cache.values, slots, lengths, rows.num_tokens)
    update_states(
        mixed,
        convolve(mixed, weights.convolution, states),
        gates,
        states,
        decay=weights.decay,
        decay_bias=weights.decay_bias,
        norm=weights.norm,
        eps=weights.eps,
        key_heads=weights.key_heads,
        out=out[rows.begin : rows.end],
    )
    rows.behind(cache)

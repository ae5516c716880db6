"""Turns a plan and the slots' state into one step's tensors.

`InputBuffers` are allocated once, at the maximum; a step's `InputBatch` holds slices of them. Rows of the step
are ordered decode first and longest first, as attention takes them; draws keep the plan's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.attention.base import AttentionBatch, DecodeRows, PrefillSpan
from hetero_worker.models.decoder import DecoderInput
from hetero_worker.runners.slots import SlotTable
from hetero_worker.sampling.request import SamplingRow


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step. Valid until the next is made of the same buffers."""

    decoder_input: DecoderInput
    draw_slots: tuple[int, ...]
    """Slots that sample, in the plan's order."""
    draws: tuple[SamplingRow, ...]
    """How, in the same order."""


class InputBuffers:
    """Host arrays of the largest step."""

    def __init__(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self._token_ids = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._positions = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._slot_mapping = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._starts = np.zeros(max_num_seqs + 1, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)

    def fill(self, plan: ranks_pb2.StepPlan, slots: SlotTable, *, block_size: int) -> InputBatch:
        """The step's batch; the plan has been checked, its blocks are appended, and it schedules something."""
        ordered = sorted(plan.scheduled, key=lambda scheduled: _row_order(scheduled, slots))
        slot_ids = np.array([scheduled.slot for scheduled in ordered], dtype=np.int64)
        total = self._fill_tokens(ordered, slots)
        self._fill_positions(slot_ids, slots, total=total, block_size=block_size)
        last_row = dict(zip(slot_ids.tolist(), (self._starts[1 : len(ordered) + 1] - 1).tolist(), strict=True))
        draw_slots = tuple(scheduled.slot for scheduled in plan.scheduled if scheduled.sample)
        return InputBatch(
            decoder_input=DecoderInput(
                token_ids=torch.from_numpy(self._token_ids[:total]),
                positions=torch.from_numpy(self._positions[:total]),
                attention=self._attention(ordered, slot_ids, slots, total=total, block_size=block_size),
                logit_rows=_logit_rows([last_row[slot] for slot in draw_slots], total),
            ),
            draw_slots=draw_slots,
            draws=tuple(slots.bound(slot).next_draw() for slot in draw_slots),
        )

    def _fill_tokens(self, ordered: Sequence[ranks_pb2.ScheduledSequence], slots: SlotTable) -> int:
        end = 0
        for i, scheduled in enumerate(ordered):
            state = slots.bound(scheduled.slot)
            begin, end = end, end + scheduled.num_tokens
            first = state.num_computed
            self._token_ids[begin:end] = state.token_ids[first : first + scheduled.num_tokens]
            self._num_computed[i] = first
            self._starts[i + 1] = end
        return end

    def _fill_positions(
        self, slot_ids: np.ndarray[tuple[int], np.dtype[np.int64]], slots: SlotTable, *, total: int, block_size: int
    ) -> None:
        starts = self._starts[: len(slot_ids)]
        counts = self._starts[1 : len(slot_ids) + 1] - starts
        offsets = np.repeat(self._num_computed[: len(slot_ids)] - starts, counts)
        positions = np.arange(total) + offsets
        block_index, within = np.divmod(positions, block_size)
        self._positions[:total] = positions
        self._slot_mapping[:total] = slots.block_tables[np.repeat(slot_ids, counts), block_index]
        self._slot_mapping[:total] *= block_size
        self._slot_mapping[:total] += within

    def _attention(
        self,
        ordered: Sequence[ranks_pb2.ScheduledSequence],
        slot_ids: np.ndarray[tuple[int], np.dtype[np.int64]],
        slots: SlotTable,
        *,
        total: int,
        block_size: int,
    ) -> AttentionBatch:
        num_decode = sum(scheduled.num_tokens == 1 for scheduled in ordered)
        decode = DecodeRows(
            lengths=(self._num_computed[:num_decode] + 1).astype(np.int32),
            block_tables=slots.block_tables[slot_ids[:num_decode]],
        )
        spans = []
        for i in range(num_decode, len(ordered)):
            begin, end = int(self._starts[i]), int(self._starts[i + 1])
            computed = int(self._num_computed[i])
            num_blocks = -(-(computed + end - begin) // block_size)
            block_ids = slots.block_tables[ordered[i].slot, :num_blocks]
            spans.append(PrefillSpan(begin, end, computed, block_ids))
        return AttentionBatch(torch.from_numpy(self._slot_mapping[:total]), decode, tuple(spans))


def _row_order(scheduled: ranks_pb2.ScheduledSequence, slots: SlotTable) -> tuple[bool, int]:
    """Decode rows first, the longest of them before all others; spans keep the plan's order."""
    if scheduled.num_tokens > 1:
        return True, 0
    return False, -slots.bound(scheduled.slot).num_computed


def _logit_rows(rows: list[int], total: int) -> torch.Tensor | None:
    return None if rows == list(range(total)) else torch.tensor(rows, dtype=torch.int64)

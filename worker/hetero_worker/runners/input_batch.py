"""Turns a plan and the slots' state into one step's tensors.

`InputBuffers` are allocated once, at the maximum, and filled in place. An `InputBatch` is views of them, valid until
the next is made. A steady step, which decodes the sequences of the one before, allocates no array and no tensor here:
the views of each number of sequences are made once and kept, slots are gathered with `out=`, and the order of the rows
stays. A step with other sequences sorts them; one with spans makes views for these.

Rows of the step are ordered decode first and longest first. Draws keep the plan's order through `logit_rows`. In a step
with proposals a slot has several decode rows. They follow one another in the order of their tokens, and slots keep the
plan's order: micro-batches are cut in this order, and a row attends to keys of the rows before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.attention.base import AttentionBatch, DecodeRows, PrefillSpan, SavedStates
from hetero_worker.models.decoder import DecoderInput
from hetero_worker.runners.plan_check import PlanBounds, num_decode_rows
from hetero_worker.runners.slots import Int64Array, SlotList, SlotTable

_ROW_BITS: Final = 20
"""A sorting key holds the row's number in so many low bits, and above them the distance to the longest sequence."""
_ROW_MASK: Final = (1 << _ROW_BITS) - 1
_NOWHERE: Final = -1
_MOST_ROWS_BY_ROW: Final = 16
"""Up to so many block tables are copied one by one. Torch is faster with more, but its operators release Python's lock,
and the thread of the gateway's stream would take it just when the step is about to begin."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Logit rows of a span whose prompt's log-probabilities are wanted."""

    slot: int
    begin: int
    """Index in the prompt of the token that follows the first row."""
    token_ids: tuple[int, ...]
    """The prompt's token that follows each row."""
    num_top: int
    first_row: int
    """Index of the first row in `DecoderInput.logit_rows`."""


@dataclass(frozen=True, slots=True)
class SpanRows:
    """Logit rows of a span whose hidden states are wanted."""

    slot: int
    num_rows: int
    first_row: int
    """Index of the first row in `DecoderInput.logit_rows`."""


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's inputs, valid until the next batch of the same buffers."""

    decoder_input: DecoderInput
    draw_slots: Int64Array
    """Slots that sample, in the plan's order, one with a proposal for each of its rows; the first logit rows are
    theirs."""
    prompts: tuple[PromptRows, ...]
    pooled: tuple[SpanRows, ...] = ()
    """Rows whose states are summed for an embedding."""
    told: tuple[SpanRows, ...] = ()
    """All spans, where a prediction head wants their states (`PlanBounds.tells_states`)."""


@dataclass(frozen=True, slots=True)
class _DecodeViews:
    """Views of the buffers for one number of decoding sequences."""

    slots: Int64Array
    keys: Int64Array
    order: Int64Array
    positions: Int64Array
    table_rows: Int64Array
    logit_rows: Int64Array
    slot_tensor: torch.Tensor
    table_tensor: torch.Tensor
    rows: DecodeRows


class InputBuffers:
    """Host arrays of the largest step."""

    def __init__(self, bounds: PlanBounds) -> None:
        tokens, seqs = bounds.max_num_batched_tokens, bounds.max_num_seqs
        if seqs > _ROW_MASK:
            raise ValueError(f"{seqs} sequences a step are more than {_ROW_MASK}")
        self._bounds = bounds
        self._token_tensor = torch.zeros(tokens, dtype=torch.int64)
        self._position_tensor = torch.zeros(tokens, dtype=torch.int64)
        self._mapping_tensor = torch.zeros(tokens, dtype=torch.int64)
        self._logit_row_tensor = torch.zeros(bounds.max_logit_rows, dtype=torch.int64)
        self._token_ids: Int64Array = self._token_tensor.numpy()
        self._positions: Int64Array = self._position_tensor.numpy()
        self._slot_mapping: Int64Array = self._mapping_tensor.numpy()
        self._logit_rows: Int64Array = self._logit_row_tensor.numpy()
        self._table_rows = np.zeros(tokens, dtype=np.int64)
        self._block_index = np.zeros(tokens, dtype=np.int64)
        self._blocks = np.zeros(tokens, dtype=np.int32)
        self._draw_slots = SlotList(seqs)
        self._decode_slots = SlotList(seqs)
        self._ordered_slots = np.zeros(seqs, dtype=np.int64)
        self._keys = np.zeros(seqs, dtype=np.int64)
        self._order = np.zeros(seqs, dtype=np.int64)
        self._num_ordered = 0
        """Number of rows that `_order` sorts."""
        self._falls = np.zeros(seqs, dtype=np.bool_)
        self._lengths = np.zeros(seqs, dtype=np.int32)
        self._tables = np.zeros((seqs, bounds.max_blocks), dtype=np.int32)
        self._row_numbers = np.arange(seqs, dtype=np.int64)
        self._all_positions = np.arange(bounds.max_model_len, dtype=np.int64)
        self._adapter_tensor = torch.zeros(tokens, dtype=torch.int64)
        self._adapters: Int64Array = self._adapter_tensor.numpy()
        self._views: dict[int, _DecodeViews] = {}
        self._decode_inputs: dict[tuple[int, bool], DecoderInput] = {}

    def fill(self, plan: ranks_pb2.StepPlan, slots: SlotTable) -> InputBatch:
        """Return the step's batch; the plan was checked and applied to the slots, and it computes something."""
        if not plan.spans and not plan.proposals:
            return self.fill_multi_step(plan, slots, steps=1)
        count = num_decode_rows(plan)
        views = self._views_of(count)
        decode = views.rows
        if plan.proposals:
            decode = self._fill_proposed(plan, slots, views)
        elif count:
            self._fill_decode(plan, slots, views)
        if plan.spans:
            return self._fill_mixed(plan, slots, decode)
        self._map_slots(count, slots)
        has_adapters = self._take_adapters(plan, slots, count)
        if decode is views.rows:
            decoder_input = self._decode_input(count, has_adapters=has_adapters)
        else:
            decoder_input = self._decoder_input(count, count, decode, (), has_adapters=has_adapters)
        return InputBatch(decoder_input, self._draw_slots.fill(_decoding_slots(plan)), ())

    def fill_multi_step(self, plan: ranks_pb2.StepPlan, slots: SlotTable, *, steps: int) -> InputBatch:
        """Return the batch of the first of so many steps of a plan that only decodes.

        Block tables reach as far as all steps need them, and the slots have these blocks.
        """
        count = len(plan.decode_slots)
        self._fill_decode(plan, slots, self._views_of(count), steps=steps)
        self._map_slots(count, slots)
        decoder_input = self._decode_input(count, has_adapters=self._take_adapters(plan, slots, count))
        return InputBatch(decoder_input, self._decode_slots.fill(plan.decode_slots), ())

    def advance_decoding(self, count: int, slots: SlotTable) -> None:
        """Take the decode rows of the last batch, its first `count` rows, to be in the cache."""
        if count:
            views = self._views_of(count)
            slots.advance(views.slots, views.keys)

    def pad_decoding(self, count: int, num_rows: int, *, has_adapters: bool) -> DecoderInput:
        """Return the last batch, of `count` rows that decode, padded to `num_rows`.

        Rows of padding have one token each, in the null block, and no adapter; they draw nothing. `has_adapters`:
        whether rows of the batch have one.
        """
        views = self._views_of(num_rows)
        for array in (self._token_ids, self._positions, self._slot_mapping, self._adapters):
            array[count:num_rows] = 0
        views.rows.lengths[count:] = 1
        views.rows.block_tables[count:, 0] = 0
        self._logit_rows[count:num_rows] = self._row_numbers[count:num_rows]
        return self._decode_input(num_rows, has_adapters=has_adapters)

    def _fill_decode(self, plan: ranks_pb2.StepPlan, slots: SlotTable, views: _DecodeViews, *, steps: int = 1) -> None:
        count = len(views.slots)
        self._order_rows(self._decode_slots.fill(plan.decode_slots), slots, views)
        slots.last_tokens.take(views.slots, out=self._token_ids[:count], mode="clip")
        np.copyto(views.rows.lengths, views.positions, casting="same_kind")
        np.add(views.rows.lengths, 1, out=views.rows.lengths)
        np.multiply(views.slots, slots.max_blocks, out=views.table_rows)
        longest = int(views.rows.lengths[0]) + steps - 1
        num_blocks = -(-longest // self._bounds.block_size)
        self._take_tables(slots, views, num_blocks)
        views.logit_rows.put(views.order, self._row_numbers[:count], mode="clip")

    def _fill_proposed(self, plan: ranks_pb2.StepPlan, slots: SlotTable, views: _DecodeViews) -> DecodeRows:
        """Fill the rows of slots that decode, some of which have proposals; return them."""
        proposals = proposals_of(plan)
        saves = np.full(len(views.slots), _NOWHERE, dtype=np.int32) if self._bounds.keeps_states else None
        begin = 0
        for slot in plan.decode_slots:
            proposal = proposals.get(slot, NO_PROPOSAL)
            tokens = (int(slots.last_tokens[slot]), *proposal.token_ids)
            end, first = begin + len(tokens), int(slots.counts.num_computed[slot])
            views.slots[begin:end] = slot
            self._token_ids[begin:end] = tokens
            views.positions[begin:end] = self._all_positions[first : first + len(tokens)]
            if saves is not None:
                saves[begin : end - 1] = list(map(self._bounds.place_of, proposal.snapshots))
            begin = end
        np.add(views.positions, 1, out=views.rows.lengths, casting="same_kind")
        np.multiply(views.slots, slots.max_blocks, out=views.table_rows)
        self._take_tables(slots, views, -(-int(views.rows.lengths.max()) // self._bounds.block_size))
        views.logit_rows[:] = self._row_numbers[: len(views.slots)]
        return views.rows if saves is None else replace(views.rows, saves=saves)

    def _take_tables(self, slots: SlotTable, views: _DecodeViews, num_blocks: int) -> None:
        """Fill the rows' block tables, as far as the longest row has blocks."""
        if len(views.slots) > _MOST_ROWS_BY_ROW:
            source = slots.block_table_tensor[:, :num_blocks]
            torch.index_select(source, 0, views.slot_tensor, out=views.table_tensor[:, :num_blocks])
            return
        for row, slot in enumerate(views.slots.tolist()):
            views.rows.block_tables[row, :num_blocks] = slots.block_tables[slot, :num_blocks]

    def _order_rows(self, decoding: Int64Array, slots: SlotTable, views: _DecodeViews) -> None:
        """Fill the rows' slots and positions, the longest first.

        Sequences that decode together all get longer by one, so the order of the last step is tried first. It is the
        same on every rank, because all have done the same steps.
        """
        count = len(decoding)
        if self._num_ordered != count:
            self._sort_rows(decoding, slots, views)
        self._take_in_order(decoding, slots, views)
        np.less_equal(views.positions[1:], views.positions[:-1], out=self._falls[: count - 1])
        if not self._falls[: count - 1].all():
            self._sort_rows(decoding, slots, views)
            self._take_in_order(decoding, slots, views)

    def _take_in_order(self, decoding: Int64Array, slots: SlotTable, views: _DecodeViews) -> None:
        decoding.take(views.order, out=views.slots, mode="clip")
        slots.counts.num_computed.take(views.slots, out=views.positions, mode="clip")

    def _sort_rows(self, decoding: Int64Array, slots: SlotTable, views: _DecodeViews) -> None:
        """Sort by length, longest first; equal ones keep the plan's order."""
        slots.counts.num_computed.take(decoding, out=views.keys, mode="clip")
        np.subtract(self._bounds.max_model_len, views.keys, out=views.keys)
        np.left_shift(views.keys, _ROW_BITS, out=views.keys)
        np.bitwise_or(views.keys, self._row_numbers[: len(decoding)], out=views.keys)
        views.keys.sort()
        np.bitwise_and(views.keys, _ROW_MASK, out=views.order)
        self._num_ordered = len(decoding)

    def _map_slots(self, total: int, slots: SlotTable) -> None:
        """Compute each row's place in the cache from its position and its slot's block table."""
        size = self._bounds.block_size
        index, mapping, blocks = self._block_index[:total], self._slot_mapping[:total], self._blocks[:total]
        np.floor_divide(self._positions[:total], size, out=index)
        np.add(index, self._table_rows[:total], out=mapping)
        slots.flat_block_tables.take(mapping, out=blocks, mode="clip")
        np.copyto(mapping, blocks)
        np.subtract(mapping, index, out=mapping)
        np.multiply(mapping, size, out=mapping)
        np.add(mapping, self._positions[:total], out=mapping)

    def _fill_mixed(self, plan: ranks_pb2.StepPlan, slots: SlotTable, decode: DecodeRows) -> InputBatch:
        count = decode.num_rows
        spans: list[PrefillSpan] = []
        drawing: list[int] = []
        prompts: list[PromptRows] = []
        pooled: list[SpanRows] = []
        told: list[SpanRows] = []
        row, num_logits = count, count + sum(span.sample for span in plan.spans)
        for span in plan.spans:
            spans.append(self._fill_span(span, slots, row))
            row += span.num_tokens
            if span.sample:
                self._logit_rows[count + len(drawing)] = row - 1
                drawing.append(span.slot)
            if (prompt := _prompt_rows(span, slots, num_logits)) is not None:
                begin, wanted = row - span.num_tokens, len(prompt.token_ids)
                self._logit_rows[num_logits : num_logits + wanted] = range(begin, begin + wanted)
                num_logits += wanted
                prompts.append(prompt)
            for wanted, rows in (
                (_num_pooled(span, slots), pooled),
                (span.num_tokens * self._bounds.tells_states, told),
            ):
                if wanted:
                    self._logit_rows[num_logits : num_logits + wanted] = range(row - wanted, row)
                    rows.append(SpanRows(span.slot, wanted, num_logits))
                    num_logits += wanted
        self._map_slots(row, slots)
        has_adapters = self._take_adapters(plan, slots, count)
        decoder_input = replace(
            self._decoder_input(row, num_logits, decode, tuple(spans), has_adapters=has_adapters),
            streams_experts=plan.streams_experts,
        )
        draw_slots = self._draw_slots.fill(_decoding_slots(plan), *drawing)
        return InputBatch(decoder_input, draw_slots, tuple(prompts), tuple(pooled), tuple(told))

    def _fill_span(self, span: ranks_pb2.ScheduledSpan, slots: SlotTable, begin: int) -> PrefillSpan:
        slot, end = span.slot, begin + span.num_tokens
        first = int(slots.counts.num_computed[slot])
        last = first + span.num_tokens
        self._token_ids[begin:end] = slots.token_ids[slot, first:last]
        self._positions[begin:end] = self._all_positions[first:last]
        self._table_rows[begin:end] = slot * slots.max_blocks
        num_blocks = -(-last // self._bounds.block_size)
        states_from = self._bounds.place_of(span.from_snapshot) if span.HasField("from_snapshot") else None
        saves = tuple(SavedStates(save.num_tokens, self._bounds.place_of(save.snapshot)) for save in span.snapshots)
        return PrefillSpan(begin, end, first, slots.block_tables[slot, :num_blocks], slot, states_from, saves)

    def _take_adapters(self, plan: ranks_pb2.StepPlan, slots: SlotTable, count: int) -> bool:
        """Fill in the adapters of the step's rows, `count` of which decode; return whether there are any."""
        if not slots.num_adapted:
            return False
        row = count
        slots.adapters.take(self._views_of(count).slots, out=self._adapters[:count], mode="clip")
        for span in plan.spans:
            self._adapters[row : row + span.num_tokens] = slots.adapters[span.slot]
            row += span.num_tokens
        return bool(self._adapters[:row].any())

    def _decode_input(self, count: int, *, has_adapters: bool) -> DecoderInput:
        made = self._decode_inputs.get((count, has_adapters))
        if made is None:
            made = self._decoder_input(count, count, self._views_of(count).rows, (), has_adapters=has_adapters)
            self._decode_inputs[count, has_adapters] = made
        return made

    def _decoder_input(
        self, total: int, num_logits: int, decode: DecodeRows, spans: tuple[PrefillSpan, ...], *, has_adapters: bool
    ) -> DecoderInput:
        return DecoderInput(
            token_ids=self._token_tensor[:total],
            positions=self._position_tensor[:total],
            attention=AttentionBatch(self._mapping_tensor[:total], decode, spans),
            logit_rows=self._logit_row_tensor[:num_logits],
            adapters=self._adapter_tensor[:total] if has_adapters else None,
        )

    def _views_of(self, count: int) -> _DecodeViews:
        views = self._views.get(count)
        if views is None:
            views = self._views[count] = self._make_views(count)
        return views

    def _make_views(self, count: int) -> _DecodeViews:
        slots, tables = self._ordered_slots[:count], self._tables[:count]
        return _DecodeViews(
            slots=slots,
            keys=self._keys[:count],
            order=self._order[:count],
            positions=self._positions[:count],
            table_rows=self._table_rows[:count],
            logit_rows=self._logit_rows[:count],
            slot_tensor=torch.from_numpy(slots),
            table_tensor=torch.from_numpy(tables),
            rows=DecodeRows(self._lengths[:count], tables, slots),
        )


NO_PROPOSAL: Final = ranks_pb2.Proposal()


def proposals_of(plan: ranks_pb2.StepPlan) -> dict[int, ranks_pb2.Proposal]:
    """Return the plan's proposals by slot."""
    return {proposal.slot: proposal for proposal in plan.proposals}


def proposed_tokens(plan: ranks_pb2.StepPlan) -> dict[int, Sequence[int]]:
    """Return the proposed tokens by slot."""
    return {slot: proposal.token_ids for slot, proposal in proposals_of(plan).items()}


def _decoding_slots(plan: ranks_pb2.StepPlan) -> Sequence[int]:
    """Return the slot of each decode row, in the plan's order."""
    if not plan.proposals:
        return plan.decode_slots
    proposed = proposed_tokens(plan)
    return [slot for slot in plan.decode_slots for _ in range(1 + len(proposed.get(slot, ())))]


def _prompt_rows(span: ranks_pb2.ScheduledSpan, slots: SlotTable, first_row: int) -> PromptRows | None:
    """Return the span's rows that a token of the prompt follows, if their log-probabilities are wanted."""
    num_top = slots.sampling(span.slot).num_prompt_logprobs
    if num_top is None:
        return None
    begin = int(slots.counts.num_computed[span.slot]) + 1
    end = min(begin + span.num_tokens, slots.num_prompt_tokens(span.slot))
    if begin >= end:
        return None
    return PromptRows(span.slot, begin, tuple(slots.token_ids[span.slot, begin:end].tolist()), num_top, first_row)


def _num_pooled(span: ranks_pb2.ScheduledSpan, slots: SlotTable) -> int:
    """Return how many of the span's last rows are part of an embedding."""
    match slots.sampling(span.slot).pooling:
        case ranks_pb2.POOLING_MEAN:
            return span.num_tokens
        case ranks_pb2.POOLING_LAST:
            return int(span.sample)
        case _:
            return 0

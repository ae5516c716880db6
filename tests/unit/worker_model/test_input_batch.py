"""A step's inputs are what a plain reading of the slots says, and making a steady step's takes no memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hetero_api.v1 import ranks_pb2
from hetero_worker.runners.input_batch import InputBatch, InputBuffers
from hetero_worker.runners.plan_check import PlanBounds, PlanCheck
from hetero_worker.runners.slots import SlotList, SlotTable

pytestmark = pytest.mark.unit

BOUNDS = PlanBounds(
    max_num_seqs=12, max_num_batched_tokens=64, max_model_len=40, vocab_size=1000, num_blocks=200, block_size=4
)


@dataclass
class Known:
    """What a slot holds, kept plainly."""

    tokens: list[int]
    num_prompt: int
    prompt_logprobs: int | None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Player:
    """Plays scheduler and sampler with random steps, and keeps the slots' state plainly."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.slots = SlotTable(
            max_num_seqs=BOUNDS.max_num_seqs, max_model_len=BOUNDS.max_model_len, block_size=BOUNDS.block_size
        )
        self.buffers, self.check = InputBuffers(BOUNDS), PlanCheck(BOUNDS)
        self.known: dict[int, Known] = {}

    def step(self) -> None:
        plan = ranks_pb2.StepPlan(step_id=1)
        self._release_some(plan)
        self._bind_some(plan)
        self._schedule(plan)
        self.check.run(plan, self.slots.counts)
        self.slots.apply(plan)
        if plan.decode_slots or plan.spans:
            batch = self.buffers.fill(plan, self.slots)
            self._compare(batch, plan)
            self._advance(batch, plan)

    def _release_some(self, plan: ranks_pb2.StepPlan) -> None:
        for slot, known in list(self.known.items()):
            if len(known.tokens) > BOUNDS.max_model_len or self.random.random() < 0.05:
                plan.released_slots.append(slot)
                del self.known[slot]

    def _bind_some(self, plan: ranks_pb2.StepPlan) -> None:
        for slot in range(BOUNDS.max_num_seqs):
            if slot not in self.known and self.random.random() < 0.3:
                tokens = [self.random.randrange(1000) for _ in range(self.random.randint(1, 30))]
                hit = self.random.randint(0, (len(tokens) - 1) // BOUNDS.block_size)
                known = Known(tokens, self.random.randint(1, len(tokens)), self.random.choice([None, 3]))
                known.computed = hit * BOUNDS.block_size
                known.blocks = [self.random.randint(1, 199) for _ in range(hit)]
                self.known[slot] = known
                sampling = ranks_pb2.Sampling(num_prompt_logprobs=known.prompt_logprobs)
                plan.new_sequences.add(
                    slot=slot, token_ids=tokens, num_prompt_tokens=known.num_prompt,
                    num_computed_tokens=known.computed, block_ids=known.blocks, sampling=sampling,
                )  # fmt: skip

    def _schedule(self, plan: ranks_pb2.StepPlan) -> None:
        left = BOUNDS.max_num_batched_tokens
        for slot in self.random.sample(sorted(self.known), len(self.known)):
            known = self.known[slot]
            uncomputed = len(known.tokens) - known.computed
            count = min(uncomputed, left, self.random.randint(1, 20))
            if count < 1 or self.random.random() < 0.2:
                continue
            left -= count
            while len(known.blocks) * BOUNDS.block_size < known.computed + count:
                known.blocks.append(self.random.randint(1, 199))
                plan.block_slots.append(slot)
                plan.block_ids.append(known.blocks[-1])
            if uncomputed == 1:
                plan.decode_slots.append(slot)
            else:
                plan.spans.add(slot=slot, num_tokens=count, sample=count == uncomputed)

    def _compare(self, batch: InputBatch, plan: ranks_pb2.StepPlan) -> None:
        given = batch.decoder_input
        lengths = [self.known[slot].computed + 1 for slot in plan.decode_slots]
        by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        decoding = [plan.decode_slots[i] for i in self._row_order(batch, lengths, by_length)]
        rows = [(slot, self.known[slot].computed) for slot in decoding]
        ends = {}
        for span in plan.spans:
            first = self.known[span.slot].computed
            rows += [(span.slot, position) for position in range(first, first + span.num_tokens)]
            ends[span.slot] = len(rows)
        assert given.token_ids.tolist() == [self.known[slot].tokens[position] for slot, position in rows]
        assert given.positions.tolist() == [position for _, position in rows]
        assert given.attention.slot_mapping.tolist() == [self._place(slot, position) for slot, position in rows]
        decode = given.attention.decode
        assert decode.lengths.tolist() == [lengths[i] for i in by_length]
        for row, slot in enumerate(decoding):
            blocks = self.known[slot].blocks[: -(-int(decode.lengths[row]) // BOUNDS.block_size)]
            assert decode.block_tables[row, : len(blocks)].tolist() == blocks
        drawing = [*plan.decode_slots, *(span.slot for span in plan.spans if span.sample)]
        assert batch.draw_slots.tolist() == drawing
        assert given.logit_rows is not None
        last_rows = {**{slot: row for row, slot in enumerate(decoding)}, **{s: e - 1 for s, e in ends.items()}}
        assert given.logit_rows[: len(drawing)].tolist() == [last_rows[slot] for slot in drawing]
        self._compare_spans(batch, plan, rows)
        self._compare_prompts(batch, plan, rows)

    def _row_order(self, batch: InputBatch, lengths: Sequence[int], by_length: Sequence[int]) -> Sequence[int]:
        """Which decoding sequence each row is: longest first, in any order among those of one length."""
        logit_rows = batch.decoder_input.logit_rows
        assert logit_rows is not None
        row_of = logit_rows[: len(lengths)].tolist()
        assert sorted(row_of) == list(range(len(lengths)))
        order = sorted(range(len(lengths)), key=lambda i: row_of[i])
        assert [lengths[i] for i in order] == [lengths[i] for i in by_length]
        return order

    def _compare_spans(self, batch: InputBatch, plan: ranks_pb2.StepPlan, rows: Sequence[tuple[int, int]]) -> None:
        for given, span in zip(batch.decoder_input.attention.prefills, plan.spans, strict=True):
            known = self.known[span.slot]
            assert [slot for slot, _ in rows[given.begin : given.end]] == [span.slot] * span.num_tokens
            assert given.num_computed == known.computed
            assert given.block_ids.tolist() == known.blocks[: -(-given.length // BOUNDS.block_size)]

    def _compare_prompts(self, batch: InputBatch, plan: ranks_pb2.StepPlan, rows: Sequence[tuple[int, int]]) -> None:
        expected = {}
        for span in plan.spans:
            known = self.known[span.slot]
            followed = range(known.computed + 1, min(known.computed + span.num_tokens + 1, known.num_prompt))
            if known.prompt_logprobs is not None and followed:
                expected[span.slot] = followed
        assert [prompt.slot for prompt in batch.prompts] == list(expected)
        logit_rows = batch.decoder_input.logit_rows
        assert logit_rows is not None
        for prompt in batch.prompts:
            followed = expected[prompt.slot]
            assert (prompt.begin, prompt.num_top) == (followed[0], 3)
            assert list(prompt.token_ids) == [self.known[prompt.slot].tokens[i] for i in followed]
            taken = logit_rows[prompt.first_row : prompt.first_row + len(followed)].tolist()
            assert [rows[row] for row in taken] == [(prompt.slot, i - 1) for i in followed]

    def _place(self, slot: int, position: int) -> int:
        block, offset = divmod(position, BOUNDS.block_size)
        return self.known[slot].blocks[block] * BOUNDS.block_size + offset

    def _advance(self, batch: InputBatch, plan: ranks_pb2.StepPlan) -> None:
        self.buffers.advance_decoding(len(plan.decode_slots), self.slots)
        for slot in plan.decode_slots:
            self.known[slot].computed += 1
        for span in plan.spans:
            self.slots.counts.num_computed[span.slot] += span.num_tokens
            self.known[span.slot].computed += span.num_tokens
        drawn = [self.random.randrange(1000) for _ in batch.draw_slots]
        self.slots.append_tokens(batch.draw_slots, drawn)
        for slot, token in zip(batch.draw_slots.tolist(), drawn, strict=True):
            self.known[slot].tokens.append(token)


@pytest.mark.parametrize("seed", range(8))
def test_inputs_are_what_a_plain_reading_of_the_slots_says(seed: int) -> None:
    player = Player(seed)
    for _ in range(60):
        player.step()


SEQS = 256
WIDE = PlanBounds(
    max_num_seqs=SEQS, max_num_batched_tokens=512, max_model_len=4096, vocab_size=1000, num_blocks=70_000, block_size=16
)


@dataclass
class Steady:
    """Sequences that only decode."""

    slots: SlotTable
    buffers: InputBuffers
    check: PlanCheck
    plan: ranks_pb2.StepPlan

    def prepare(self) -> InputBatch:
        self.check.run(self.plan, self.slots.counts)
        self.slots.apply(self.plan)
        return self.buffers.fill(self.plan, self.slots)

    def step(self) -> None:
        batch = self.prepare()
        self.buffers.advance_decoding(SEQS, self.slots)
        self.slots.append_tokens(batch.draw_slots, [7] * SEQS)


@pytest.fixture
def steady() -> Steady:
    """Lengths differ, all blocks are there, and the first steps are done."""
    slots = SlotTable(max_num_seqs=SEQS, max_model_len=WIDE.max_model_len, block_size=WIDE.block_size)
    for slot in range(SEQS):
        blocks = range(1 + 256 * slot, 257 + 256 * slot)
        slots.apply(
            ranks_pb2.StepPlan(
                new_sequences=[
                    ranks_pb2.NewSequence(
                        slot=slot, token_ids=[1] * (slot + 2), num_prompt_tokens=1,
                        num_computed_tokens=slot + 1, block_ids=blocks,
                    )
                ]
            )
        )  # fmt: skip
    order = random.Random(0).sample(range(SEQS), SEQS)
    made = Steady(slots, InputBuffers(WIDE), PlanCheck(WIDE), ranks_pb2.StepPlan(decode_slots=order))
    for _ in range(3):
        made.step()
    return made


def test_inputs_of_a_steady_step_allocate_no_tensor(steady: Steady) -> None:
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in range(20):
            steady.prepare()
    events = recorded.events()
    assert events is not None
    assert any(event.name == "aten::index_select" for event in events), "the profiler saw the steps"
    allocating = {event.name for event in events if event.cpu_memory_usage > 0 or event.name == "aten::empty"}
    assert allocating == set()


def test_inputs_of_a_steady_step_allocate_no_array(steady: Steady, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python itself needs for a moment is less than the smallest array of so many sequences."""
    # Slot numbers go from the message into their array through a tuple: more than an array, and nothing but that.
    monkeypatch.setattr(SlotList, "fill", lambda self, slots, *more: self._slots[: len(slots) + len(more)])
    tracemalloc.start()
    try:
        steady.prepare()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(20):
            steady.prepare()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 512
    assert peak - before < SEQS * np.dtype(np.int64).itemsize


def test_the_meter_would_see_an_array(steady: Steady) -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        np.zeros(SEQS, dtype=np.int64)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before >= SEQS * 8

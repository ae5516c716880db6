"""The first plans of an epoch: they touch everything that requests will need, so that no request pays for it.

A prefill as large as a step allows, a decode of one sequence, and a decode of many. They are ordinary plans on real
slots and blocks, and the last one gives every slot back; the KV they leave behind is overwritten, never read. Host
cores take seconds for the largest prefill and batch, which prepare no more than smaller ones do: where all ranks are
such, they have HOST_TOKENS and HOST_SEQS. While requests wait for an epoch to go on in, a very short prefill has to do.

Sequences follow that draw in each way: at random, with filters of two kinds, with penalties, bound to a mask. A device
compiles or loads kernels for each the first time.

Ranks that make graphs of steps report for how many sequences. Steps of these sizes follow, the largest first, whose
memory the others then share; each comes as often as it takes until its graph is there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Final

from hetero_api.v1 import ranks_pb2

MAX_WARM_SEQS: Final = 64
"""Largest batch that is worth warming up."""
HOST_TOKENS: Final = 64
"""Tokens of the prefill where no rank is a GPU."""
HOST_SEQS: Final = 16
"""Largest batch there."""
_DECODES: Final = 3
"""Steps after its prefill that the long sequence takes part in."""
_TOKEN: Final = 0
_BRIEF_TOKENS: Final = 16
"""The prefill of a brief warm-up."""
_STEPS_A_GRAPH: Final = 2
"""Steps per graph: a rank prepares it in the first and records it in the second; see Loaded.graph_sizes."""
_GREEDY: Final = ranks_pb2.Sampling(temperature=0, top_p=1)
_DRAWS: Final = (
    _GREEDY,
    ranks_pb2.Sampling(temperature=1, top_p=1),
    ranks_pb2.Sampling(temperature=1, top_p=1, top_k=20),
    ranks_pb2.Sampling(temperature=1, top_p=0.9, min_p=0.01),
    ranks_pb2.Sampling(
        temperature=1, top_p=1, presence_penalty=0.1, repetition_penalty=1.1, bias_token_ids=[_TOKEN], biases=[1.0]
    ),
)
"""Ways to draw: few candidates are selected, more are sorted, and edits come before either. The first one also has a
mask."""
_DRAW_TOKENS: Final = 2
"""Positions of a sequence that draws twice; the second token has no KV yet."""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Bounds of a step. `num_blocks` includes the null block."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int


def warm_up_plans(
    bounds: StepBounds,
    *,
    on_host: bool = False,
    brief: bool = False,
    graph_sizes: Collection[int] = (),
    drafts: bool = False,
) -> tuple[ranks_pb2.StepPlan, ...]:
    """Return the plans; none where not even the shortest sequence has room.

    `on_host`: no rank is a GPU. `graph_sizes`: numbers of sequences for which some rank makes a graph; those without
    room are left out. `drafts`: there is a draft model, which reads the long sequence and draws behind it.
    """
    writer = _PlanWriter(bounds.block_size)
    room = (bounds.num_blocks - 1) * bounds.block_size
    # The last step samples a token more, which has no KV but counts for the length.
    longest = min(bounds.max_num_batched_tokens, bounds.max_model_len - _DECODES - 1, room - _DECODES)
    if brief or on_host:
        longest = min(longest, _BRIEF_TOKENS if brief else HOST_TOKENS)
    if longest < 1:
        return ()
    batch = _batch_size(bounds, blocks_of_longest=-(-(longest + _DECODES) // bounds.block_size))
    batch = min(batch, HOST_SEQS) if on_host else batch
    others = range(1, batch)
    writer.add(new={0: longest})
    writer.add(decode=[0])
    if drafts:
        writer.plans[-1].draft_slots.append(0)
        writer.plans[-1].num_drafts = 1
    writer.add(decode=[0], new=dict.fromkeys(others, 1))
    writer.add(decode=range(batch))
    writer.release(range(batch))
    if not brief:
        _add_draws(writer, bounds)
    _add_graph_steps(writer, bounds, graph_sizes)
    return tuple(writer.plans)


def masks_of(plan: ranks_pb2.StepPlan, *, vocab_size: int) -> list[bytes]:
    """Return a mask of `vocab_size` tokens for each of the plan's masked slots: all tokens are allowed."""
    return [((1 << vocab_size) - 1).to_bytes(-(-vocab_size // 8), "little")] * len(plan.masked_slots)


def _add_draws(writer: _PlanWriter, bounds: StepBounds) -> None:
    """Add sequences of one token that draw twice in each way, as many at a time as have room; the first is masked."""
    if bounds.max_model_len <= _DRAW_TOKENS:
        return
    most = (bounds.num_blocks - 1) // -(-_DRAW_TOKENS // bounds.block_size)
    most = min(most, bounds.max_num_seqs, bounds.max_num_batched_tokens)
    for begin in range(0, len(_DRAWS), max(most, 1)):
        draws = _DRAWS[begin : begin + most]
        if draws:
            writer.add(new=dict.fromkeys(range(len(draws)), 1), draws=draws)
            writer.add(decode=range(len(draws)), masked=[0])
            writer.release(range(len(draws)))


def _add_graph_steps(writer: _PlanWriter, bounds: StepBounds, graph_sizes: Collection[int]) -> None:
    """Add sequences of one token each, of which as many decode as a graph is for."""
    longest = 1 + _STEPS_A_GRAPH * len(graph_sizes)
    most = (bounds.num_blocks - 1) // -(-longest // bounds.block_size)
    most = min(most, bounds.max_num_seqs, bounds.max_num_batched_tokens)
    sizes = sorted((size for size in graph_sizes if size <= most), reverse=True)
    if not sizes or longest + 1 >= bounds.max_model_len:
        return
    writer.add(new=dict.fromkeys(range(sizes[0]), 1))
    for size in sizes:
        for _ in range(_STEPS_A_GRAPH):
            writer.add(decode=range(size))
    writer.release(range(sizes[0]))


def _batch_size(bounds: StepBounds, *, blocks_of_longest: int) -> int:
    """Return how many sequences decode together: the long one, and short ones of two positions each."""
    free_blocks = bounds.num_blocks - 1 - blocks_of_longest
    short = free_blocks // -(-2 // bounds.block_size)
    return min(bounds.max_num_seqs, bounds.max_num_batched_tokens, MAX_WARM_SEQS, 1 + short)


@dataclass(slots=True)
class _PlanWriter:
    """Writes plans and remembers the slots' extents. Blocks are taken in order."""

    block_size: int
    plans: list[ranks_pb2.StepPlan] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, int] = field(default_factory=dict)
    next_block: int = 1

    def add(
        self,
        *,
        decode: Sequence[int] = (),
        masked: Sequence[int] = (),
        new: dict[int, int] | None = None,
        draws: Sequence[ranks_pb2.Sampling] = (),
    ) -> None:
        """Add a step: one token for each slot of `decode`, then sequences of the given lengths in new slots.

        The new sequences draw as `draws` say, in order, and others greedily; `masked` slots have a mask.
        """
        plan = ranks_pb2.StepPlan(decode_slots=decode, masked_slots=masked)
        for slot in decode:
            self._lengthen(plan, slot, 1)
        for (slot, num_tokens), sampling in zip((new or {}).items(), chain(draws, repeat(_GREEDY)), strict=False):
            sequence = plan.new_sequences.add(slot=slot, token_ids=[_TOKEN] * num_tokens, num_prompt_tokens=num_tokens)
            sequence.sampling.CopyFrom(sampling)
            plan.spans.add(slot=slot, num_tokens=num_tokens, sample=True)
            self._lengthen(plan, slot, num_tokens)
        self.plans.append(plan)

    def release(self, slots: Sequence[int]) -> None:
        """Add a step that computes nothing and drops all slots. Their blocks are free again."""
        self.lengths.clear()
        self.blocks.clear()
        self.next_block = 1
        self.plans.append(ranks_pb2.StepPlan(released_slots=slots))

    def _lengthen(self, plan: ranks_pb2.StepPlan, slot: int, num_tokens: int) -> None:
        """Give the slot the blocks that `num_tokens` more tokens take."""
        length = self.lengths[slot] = self.lengths.get(slot, 0) + num_tokens
        needed, have = -(-length // self.block_size), self.blocks.get(slot, 0)
        block_ids = range(self.next_block, self.next_block + needed - have)
        self.next_block += len(block_ids)
        self.blocks[slot] = needed
        plan.block_slots.extend([slot] * len(block_ids))
        plan.block_ids.extend(block_ids)


def sampling_slots(plan: ranks_pb2.StepPlan) -> list[int]:
    """Return the slots that sample in a plan, in batch order."""
    return [*plan.decode_slots, *(span.slot for span in plan.spans if span.sample)]

"""Slot state of a rank: the sum of the gateway's deltas.

Plans name requests by slot and carry only changes. The state is the same on every rank after every step, because every
rank applies the same plans and appends the same sampled tokens. It lies in arrays over all slots, allocated once, so
that a few array operations gather a step's inputs for any number of sequences. A slot without tokens is free.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.sampling.request import SequenceSampling

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Tokens = TypeVar("Tokens", int, torch.Tensor)


class SlotList:
    """Room for a message's list of slots as an index array, so that no array is made for each message."""

    def __init__(self, capacity: int) -> None:
        self._slots: Int64Array = np.zeros(capacity, dtype=np.int64)
        self._layouts: dict[int, struct.Struct] = {}

    def fill(self, slots: Sequence[int], *more: int) -> Int64Array:
        """Return slots and more slots as int64 [slots + more]: a view, valid until the next call."""
        count = len(slots) + len(more)
        layout = self._layouts.get(count)
        if layout is None:
            layout = self._layouts[count] = struct.Struct(f"={count}q")
        layout.pack_into(self._slots.data, 0, *slots, *more)
        return self._slots[:count]


class SlotCounts:
    """Numbers of tokens and blocks of each slot: int64 [slots] each."""

    def __init__(self, num_slots: int) -> None:
        self.num_tokens: Int64Array = np.zeros(num_slots, dtype=np.int64)
        """Known tokens: prompt and output; 0 means that the slot is free."""
        self.num_computed: Int64Array = np.zeros(num_slots, dtype=np.int64)
        """Leading tokens whose keys and values are in the cache."""
        self.num_blocks: Int64Array = np.zeros(num_slots, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.num_tokens)

    @property
    def in_use(self) -> int:
        """Number of slots that are bound."""
        return int(np.count_nonzero(self.num_tokens))

    def holds(self, slot: int) -> bool:
        """Return whether the slot exists and is bound."""
        return slot < len(self) and bool(self.num_tokens[slot])

    def set(self, slot: int, *, num_tokens: int, num_computed: int, num_blocks: int) -> None:
        """Set one slot's numbers."""
        self.num_tokens[slot], self.num_computed[slot] = num_tokens, num_computed
        self.num_blocks[slot] = num_blocks

    def decode(self, slots: Int64Array, steps: int = 1) -> None:
        """Compute one token of each of these slots a step, and append one."""
        self.num_tokens[slots] += steps
        self.num_computed[slots] += steps

    def copy_from(self, other: SlotCounts) -> None:
        """Take over the numbers of another table of as many slots."""
        np.copyto(self.num_tokens, other.num_tokens)
        np.copyto(self.num_computed, other.num_computed)
        np.copyto(self.num_blocks, other.num_blocks)


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """Draws with unknown tokens, in slots whose state has gone on as if the tokens were known."""

    slots: Sequence[int]
    places: Int64Array
    """Index of each token in the flattened `SlotTable.token_ids`."""
    samplings: Sequence[SequenceSampling]
    """Owners of the tokens: a slot may be bound again before its token is known."""


def pending_token(draw: int) -> int:
    """Return the stand-in for the token of a running step's draw: below 0, as no token id is."""
    return -1 - draw


def draw_of(pending: Tokens) -> Tokens:
    """Return the draw that each stand-in names; below 0 for a token id."""
    return -1 - pending


class SlotTable:
    """State of all slots. Callers have checked the plan (`plan_check`), so nothing is checked again here."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.counts = SlotCounts(max_num_seqs)
        self.last_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        """[slots]: the last token of each, or a `pending_token`."""
        # One more than the longest sequence: the token sampled at its end is known, though never computed.
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        """[slots, tokens]: all known tokens."""
        self.block_tables: Int32Array = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        """[slots, blocks]: ids of a slot's blocks; zeros (the null block) behind them."""
        self.flat_block_tables: Int32Array = self.block_tables.reshape(-1)
        self.block_table_tensor = torch.from_numpy(self.block_tables)
        self._flat_tokens = self.token_ids.reshape(-1)
        self.adapters: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        """[slots]: number of each slot's adapter; 0: none."""
        self.num_adapted = 0
        """Number of slots that have an adapter."""
        self._samplings: list[SequenceSampling | None] = [None] * max_num_seqs
        self._num_prompt_tokens = [0] * max_num_seqs
        self._where: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._drawn: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._drawn32: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)

    @property
    def max_blocks(self) -> int:
        """Number of blocks of the longest sequence."""
        return int(self.block_tables.shape[1])

    def have_adapters(self, slots: Sequence[int]) -> bool:
        """Return whether any of these slots has an adapter."""
        return bool(self.num_adapted) and any(self.adapters[slot] for slot in slots)

    def sampling(self, slot: int) -> SequenceSampling:
        """Return the sampling state of a bound slot. Raises KeyError for a free one."""
        sampling = self._samplings[slot]
        if sampling is None:
            raise KeyError(f"slot {slot} is free")
        return sampling

    def num_prompt_tokens(self, slot: int) -> int:
        """Return the length of the slot's prompt."""
        return self._num_prompt_tokens[slot]

    def apply(self, plan: ranks_pb2.StepPlan) -> None:
        """Release and bind slots and append blocks, as the plan says."""
        for slot in plan.released_slots:
            self._release(slot)
        for sequence in plan.new_sequences:
            self._bind(sequence)
        for slot, block_id in zip(plan.block_slots, plan.block_ids, strict=True):
            self._append_blocks(slot, (block_id,))

    def advance(self, slots: Int64Array, scratch: Int64Array) -> None:
        """Count one more computed token of each slot. `scratch` is as long as `slots`."""
        self.counts.num_computed.take(slots, out=scratch, mode="clip")
        np.add(scratch, 1, out=scratch)
        self.counts.num_computed.put(slots, scratch, mode="clip")

    def append_tokens(self, slots: Int64Array, token_ids: Sequence[int]) -> None:
        """Append the token drawn for each slot."""
        count = len(slots)
        where, drawn, drawn32 = self._where[:count], self._drawn[:count], self._drawn32[:count]
        drawn[:] = token_ids
        np.copyto(drawn32, drawn, casting="same_kind")
        self.last_tokens.put(slots, drawn, mode="clip")
        self.counts.num_tokens.take(slots, out=where, mode="clip")
        np.add(where, 1, out=where)
        self.counts.num_tokens.put(slots, where, mode="clip")
        np.multiply(slots, self.token_ids.shape[1], out=drawn)
        np.add(where, drawn, out=where)
        np.subtract(where, 1, out=where)
        self._flat_tokens.put(where, drawn32, mode="clip")
        for slot, token_id in zip(slots.tolist(), token_ids, strict=True):
            self.sampling(slot).append(token_id)

    def append_run(self, slot: int, token_ids: Sequence[int]) -> None:
        """Append tokens that one step gave a slot, at least one; all but the last are in the cache."""
        begin, count = int(self.counts.num_tokens[slot]), len(token_ids)
        self.token_ids[slot, begin : begin + count] = token_ids
        self.last_tokens[slot] = token_ids[-1]
        self.counts.num_tokens[slot] += count
        self.counts.num_computed[slot] += count - 1
        self.sampling(slot).extend(token_ids)

    def append_steps(self, slots: Int64Array, token_ids: Int64Array) -> None:
        """Append the tokens drawn in several steps, int64 [steps, slots], and count as many computed tokens."""
        steps = len(token_ids)
        places = slots * self.token_ids.shape[1] + self.counts.num_tokens[slots]
        self._flat_tokens[places + np.arange(steps)[:, None]] = token_ids
        self.last_tokens[slots] = token_ids[-1]
        self.counts.decode(slots, steps)
        for slot, tokens in zip(slots.tolist(), token_ids.T.tolist(), strict=True):
            self.sampling(slot).extend(tokens)

    def expect_tokens(self, slots: Sequence[int], pending: Sequence[int]) -> ExpectedTokens:
        """Go on as if the tokens drawn for these slots had been appended; each last token is `pending` until then.

        They are settled before the next ones are expected or appended.
        """
        index = np.array(slots, dtype=np.int64)
        places = index * self.token_ids.shape[1] + self.counts.num_tokens[index]
        self.counts.num_tokens[index] += 1
        self.last_tokens[index] = pending
        samplings = [self.sampling(slot) for slot in slots]
        for sampling in samplings:
            sampling.expect()
        return ExpectedTokens(slots, places, samplings)

    def settle_tokens(self, expected: ExpectedTokens, token_ids: Sequence[int]) -> None:
        """Append the tokens that were expected, except those of slots that were released meanwhile."""
        kept = [i for i, slot in enumerate(expected.slots) if self._samplings[slot] is expected.samplings[i]]
        tokens = np.array(token_ids, dtype=np.int64)[kept]
        self.last_tokens[np.array(expected.slots, dtype=np.int64)[kept]] = tokens
        self._flat_tokens[expected.places[kept]] = tokens
        for i in kept:
            expected.samplings[i].settle(token_ids[i])

    def mirror(self, other: SlotTable, slot: int, *, num_tokens: int, num_computed: int, skipped: int = 0) -> None:
        """Take over so many tokens of another table's slot, without the `skipped` first ones, and its blocks.

        Nothing is known of how it is drawn.
        """
        self.token_ids[slot, :num_tokens] = other.token_ids[slot, skipped : skipped + num_tokens]
        self.last_tokens[slot] = other.token_ids[slot, skipped + num_tokens - 1]
        self.block_tables[slot] = other.block_tables[slot]
        num_blocks = int(other.counts.num_blocks[slot])
        self.counts.set(slot, num_tokens=num_tokens, num_computed=num_computed, num_blocks=num_blocks)
        self._samplings[slot] = self._samplings[slot] or SequenceSampling(ranks_pb2.Sampling(), ())

    def reports_spans(self, slot: int) -> bool:
        """Return whether more than a token is wanted of the slot's spans; False for a free or unknown slot."""
        sampling = self._samplings[slot] if slot < len(self._samplings) else None
        return sampling is not None and (sampling.num_prompt_logprobs is not None or bool(sampling.pooling))

    def _release(self, slot: int) -> None:
        self.counts.set(slot, num_tokens=0, num_computed=0, num_blocks=0)
        self.block_tables[slot] = 0
        self._samplings[slot] = None
        self._adapt(slot, 0)

    def _adapt(self, slot: int, adapter: int) -> None:
        self.num_adapted += bool(adapter) - bool(self.adapters[slot])
        self.adapters[slot] = adapter

    def _bind(self, sequence: ranks_pb2.NewSequence) -> None:
        slot, known = sequence.slot, len(sequence.token_ids)
        self.counts.set(slot, num_tokens=known, num_computed=sequence.num_computed_tokens, num_blocks=0)
        self.token_ids[slot, :known] = sequence.token_ids
        self.last_tokens[slot] = sequence.token_ids[-1]
        prompt = sequence.num_prompt_tokens
        self._num_prompt_tokens[slot] = prompt
        self._samplings[slot] = SequenceSampling(
            sequence.sampling, sequence.token_ids[:prompt], sequence.token_ids[prompt:]
        )
        self._adapt(slot, sequence.adapter)
        self._append_blocks(slot, sequence.block_ids)

    def _append_blocks(self, slot: int, block_ids: Iterable[int]) -> None:
        ids = list(block_ids)
        begin = int(self.counts.num_blocks[slot])
        self.block_tables[slot, begin : begin + len(ids)] = ids
        self.counts.num_blocks[slot] = begin + len(ids)

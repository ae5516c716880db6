"""Ranks that obey StepPlans without a model: a KV cache of numbers, read and written through block tables only.

The number at a position is a digest of the number before it, as read back from the cache, and of the position's
token; the next token is a digest of every number of the sequence, read back. So a block that is reused wrongly,
overwritten or missing changes the tokens, as it would with a real model, and `tokens_alone` tells what they
must be. The chain starts at the request's seed: tests give each tenant one, so that a hit across salts shows too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from hetero_api.v1 import ranks_pb2

NULL_BLOCK = 0


class PlanError(Exception):
    """The plan breaks the contract of ranks.proto."""


@dataclass(slots=True)
class _Slot:
    tokens: list[int]
    num_computed: int
    blocks: list[int]
    seed: int


def _digest(*numbers: int) -> int:
    return zlib.crc32(repr(numbers).encode())


def _next_token(values: Iterable[int], vocab_size: int) -> int:
    return _digest(*values) % vocab_size


def tokens_alone(prompt: Iterable[int], *, seed: int, count: int, vocab_size: int) -> list[int]:
    """The first `count` tokens that the fake model generates when nothing else runs and nothing is cached."""
    values: list[int] = []
    for token in prompt:
        values.append(_digest(values[-1] if values else seed, token))
    output: list[int] = []
    for _ in range(count):
        output.append(_next_token(values, vocab_size))
        values.append(_digest(values[-1], output[-1]))
    return output


class FakeRanks:
    """One epoch of a group. `num_blocks` includes the null block."""

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int, max_num_seqs: int) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._max_num_seqs = max_num_seqs
        self._kv: list[int | None] = [None] * (num_blocks * block_size)
        self._slots: dict[int, _Slot] = {}
        self._step_id = 0

    def execute(self, plan: ranks_pb2.StepPlan) -> ranks_pb2.StepResult:
        self._step_id += 1
        self._require(plan.step_id == self._step_id, f"step {plan.step_id} instead of {self._step_id}")
        for slot in plan.released_slots:
            self._require(slot in self._slots, f"slot {slot} is released and was not bound")
            del self._slots[slot]
        for new in plan.new_sequences:
            self._bind(new)
        scheduled = [entry.slot for entry in plan.scheduled]
        self._require(bool(scheduled) and len(set(scheduled)) == len(scheduled), "scheduled slots are empty or repeat")
        result = ranks_pb2.StepResult(step_id=plan.step_id)
        for entry in plan.scheduled:
            self._compute(entry, result)
        return result

    def _bind(self, new: ranks_pb2.NewSequence) -> None:
        self._require(new.slot not in self._slots, f"slot {new.slot} is bound already")
        self._require(new.slot < self._max_num_seqs, f"slot {new.slot} is beyond max_num_seqs")
        covered = len(new.block_ids) * self._block_size
        self._require(new.num_computed_tokens == covered, "prefix hits are not whole blocks")
        self._require(new.num_computed_tokens < len(new.token_ids), "nothing is left to compute")
        self._slots[new.slot] = _Slot(list(new.token_ids), covered, list(new.block_ids), new.sampling.seed)

    def _compute(self, entry: ranks_pb2.ScheduledSequence, result: ranks_pb2.StepResult) -> None:
        slot = self._slots[entry.slot]
        slot.blocks.extend(entry.new_block_ids)
        self._require(NULL_BLOCK not in slot.blocks, "the null block is in a block table")
        end = slot.num_computed + entry.num_tokens
        self._require(entry.num_tokens >= 1 and end <= len(slot.tokens), "more tokens than are known")
        self._require(len(slot.blocks) == -(-end // self._block_size), "block table and tokens do not fit")
        for position in range(slot.num_computed, end):
            self._write(slot, position)
        slot.num_computed = end
        self._require(entry.sample == (end == len(slot.tokens)), "sample is not said at the last token")
        if entry.sample:
            token = _next_token((self._read(slot, position) for position in range(end)), self._vocab_size)
            slot.tokens.append(token)
            result.slots.append(entry.slot)
            result.token_ids.append(token)

    def _write(self, slot: _Slot, position: int) -> None:
        block = slot.blocks[position // self._block_size]
        sharing = [other for other in self._slots.values() if other is not slot and block in other.blocks]
        self._require(not sharing, f"block {block} is written while another sequence has it")
        before = self._read(slot, position - 1) if position else slot.seed
        self._kv[self._place(slot, position)] = _digest(before, slot.tokens[position])

    def _read(self, slot: _Slot, position: int) -> int:
        value = self._kv[self._place(slot, position)]
        if value is None:
            raise PlanError(f"position {position} is read and was never computed")
        return value

    def _place(self, slot: _Slot, position: int) -> int:
        return slot.blocks[position // self._block_size] * self._block_size + position % self._block_size

    @staticmethod
    def _require(condition: bool, problem: str) -> None:
        if not condition:
            raise PlanError(problem)

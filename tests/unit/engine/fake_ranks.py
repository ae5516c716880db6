"""Ranks that obey StepPlans without a model: a KV cache of numbers, read and written through block tables only.

The number at a position is a digest of the number before it, as read back from the cache, and of the position's
token; the next token is a digest of every number of the sequence, read back, and of the sequence's seed. So a block
that is reused wrongly, overwritten or missing changes the tokens, as it would with a real model, and `tokens_alone`
tells what they must be. The chain starts at a number of the tenant's, so that a hit across salts shows too; requests
carry it in a field of Sampling that nothing else needs here, top_k.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from hetero_api.v1 import logprobs_pb2, ranks_pb2

NULL_BLOCK = 0


class PlanError(Exception):
    """The plan breaks the contract of ranks.proto."""


@dataclass(slots=True)
class _Slot:
    tokens: list[int]
    num_prompt: int
    num_computed: int
    blocks: list[int]
    sampling: ranks_pb2.Sampling
    state: int | None
    """The number at the last computed position, where ranks keep states; None: it must come of a snapshot."""


def _digest(*numbers: int) -> int:
    return zlib.crc32(repr(numbers).encode())


def _next_token(values: Iterable[int], *, seed: int, vocab_size: int) -> int:
    return _digest(seed, *values) % vocab_size


def _logprobs(value: int, token_id: int) -> logprobs_pb2.TokenLogprobs:
    return logprobs_pb2.TokenLogprobs(token_id=token_id, logprob=-(value % 64) / 8, rank=1 + value % 5)


def tokens_alone(prompt: Iterable[int], *, seed: int, count: int, vocab_size: int, tenant: int = 0) -> list[int]:
    """The first `count` tokens that the fake model generates when nothing else runs and nothing is cached."""
    values = _values(prompt, tenant=tenant)
    output: list[int] = []
    for _ in range(count):
        output.append(_next_token(values, seed=seed, vocab_size=vocab_size))
        values.append(_digest(values[-1], output[-1]))
    return output


def logprobs_alone(tokens: Sequence[int], *, begin: int, tenant: int = 0) -> list[logprobs_pb2.TokenLogprobs]:
    """What the fake model tells of tokens[begin:], each given those before it; `begin` at least 1."""
    values = _values(tokens, tenant=tenant)
    return [_logprobs(values[index - 1], tokens[index]) for index in range(begin, len(tokens))]


def embedding_alone(tokens: Sequence[int], *, is_mean: bool, tenant: int = 0) -> list[float]:
    """The hidden states of the fake model that make an embedding of `tokens`."""
    states = [_hidden(value) for value in _values(tokens, tenant=tenant)]
    return [sum(column) / len(states) for column in zip(*states, strict=True)] if is_mean else [*states[-1]]


def _hidden(value: int) -> tuple[float, float]:
    return (float(value % 16), 1.0 + value % 7)


def _values(tokens: Iterable[int], *, tenant: int) -> list[int]:
    values: list[int] = []
    for token in tokens:
        values.append(_digest(values[-1] if values else tenant, token))
    return values


class FakeRanks:
    """One epoch of a group. `num_blocks` includes the null block. Plans are to be executed in order."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        max_num_seqs: int,
        num_snapshots: int = 0,
        keeps_states: bool = False,
    ) -> None:
        """`keeps_states`: the number before is not read back from the cache, but is the slot's state."""
        self._keeps_states = keeps_states
        self._snapshots: list[tuple[int, int] | None] = [None] * num_snapshots
        """Tokens that each is behind, and the number there."""
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._max_num_seqs = max_num_seqs
        self._kv: list[int | None] = [None] * (num_blocks * block_size)
        self._slots: dict[int, _Slot] = {}
        self.script: Sequence[int] = ()
        """Tokens that every sequence generates, in place of digests."""
        self._step_id = 0
        self._written: dict[int, _Slot] = {}

    @property
    def num_bound_slots(self) -> int:
        return len(self._slots)

    def execute(self, plan: ranks_pb2.StepPlan, *, masks: Sequence[bytes] = ()) -> ranks_pb2.StepResult:
        """Without `masks` masked draws are drawn like the others."""
        self._step_id = self._step_id + 1 if self._step_id else plan.step_id
        self._require(plan.step_id == self._step_id > 0, f"step {plan.step_id} instead of {self._step_id}")
        self._take_deltas(plan)
        result = ranks_pb2.StepResult(step_id=plan.step_id)
        computing = [*plan.decode_slots, *(span.slot for span in plan.spans)]
        self._require(len(set(computing)) == len(computing), "a slot computes twice")
        self._require(set(computing) <= set(self._slots), "a slot computes that is not bound")
        read = [span.from_snapshot for span in plan.spans if span.HasField("from_snapshot")]
        taken = [each.snapshot for span in plan.spans for each in span.snapshots]
        self._require(len({*taken}) == len(taken) and not {*read} & {*taken}, "a snapshot is used twice in a plan")
        self._written.clear()
        proposed = {each.slot: list(each.token_ids) for each in plan.proposals}
        self._require(len(proposed) == len(plan.proposals), "a slot has two proposals")
        self._require(set(proposed) <= set(plan.decode_slots), "tokens are proposed for a slot that does not decode")
        self._require(all(proposed.values()), "a proposal is empty")
        rows = len(plan.decode_slots) + sum(map(len, proposed.values()))
        draws = rows + sum(span.sample for span in plan.spans)
        self._require(draws <= self._max_num_seqs, f"{draws} draws are more than max_num_seqs")
        sampling = [slot for slot in plan.decode_slots if self._compute_decode(slot, proposed.get(slot, []))]
        sampling += [span.slot for span in plan.spans if self._compute_span(span, result)]
        self._require(set(plan.masked_slots) <= set(sampling), "a slot is masked that does not sample")
        self._require(len(set(plan.masked_slots)) == len(plan.masked_slots), "a slot is masked twice")
        given = iter(masks)
        masks_of = {slot: list(islice(given, 1 + len(proposed.get(slot, ())))) for slot in plan.masked_slots}
        for slot in sampling:
            self._sample_along(slot, proposed.get(slot, []), result, masks=masks_of.get(slot, []))
        self._require(bool(plan.draft_slots) == bool(plan.num_drafts), "drafts have no number, or a number no slots")
        self._require(set(plan.draft_slots) <= set(plan.decode_slots), "drafts for a slot that does not decode")
        for slot in plan.draft_slots:
            if drafts := self._draft(self._slots[slot], plan.num_drafts):
                result.drafts.add(slot=slot, token_ids=drafts)
        return result

    def _draft(self, slot: _Slot, count: int) -> list[int]:
        """What follows the slot's tokens, as far as its blocks go; one of five is wrong."""
        values, drafts = _values(slot.tokens, tenant=slot.sampling.top_k), []
        for _ in range(min(count, len(slot.blocks) * self._block_size - len(slot.tokens) + 1)):
            token = _next_token(values, seed=slot.sampling.seed, vocab_size=self._vocab_size)
            drafts.append(token if values[-1] % 5 else (token + 1) % self._vocab_size)
            values.append(_digest(values[-1], drafts[-1]))
        return drafts

    def _take_deltas(self, plan: ranks_pb2.StepPlan) -> None:
        for slot in plan.released_slots:
            self._require(slot in self._slots, f"slot {slot} is released and was not bound")
            del self._slots[slot]
        for new in plan.new_sequences:
            self._bind(new)
        self._require(len(plan.block_slots) == len(plan.block_ids), "block_slots and block_ids are not parallel")
        for slot, block_id in zip(plan.block_slots, plan.block_ids, strict=True):
            self._require(slot in self._slots, f"a block is appended to slot {slot}, which is not bound")
            self._require(block_id != NULL_BLOCK, "the null block is in a block table")
            self._slots[slot].blocks.append(block_id)

    def _bind(self, new: ranks_pb2.NewSequence) -> None:
        self._require(new.slot not in self._slots, f"slot {new.slot} is bound already")
        self._require(new.slot < self._max_num_seqs, f"slot {new.slot} is beyond max_num_seqs")
        covered = len(new.block_ids) * self._block_size
        self._require(new.num_computed_tokens == covered, "prefix hits are not whole blocks")
        self._require(new.num_computed_tokens < len(new.token_ids), "nothing is left to compute")
        self._require(0 < new.num_prompt_tokens <= len(new.token_ids), "the prompt is not among the tokens")
        self._slots[new.slot] = _Slot(
            list(new.token_ids),
            new.num_prompt_tokens,
            covered,
            list(new.block_ids),
            new.sampling,
            None if covered else new.sampling.top_k,
        )

    def _compute_decode(self, number: int, proposed: Sequence[int]) -> bool:
        """Proposed tokens join the slot's, until the draws show which of them stay."""
        slot = self._slots[number]
        self._require(not (proposed and self._keeps_states), "tokens are proposed to a model that keeps states")
        self._require(len(slot.tokens) - slot.num_computed == 1, f"slot {number} decodes and is not one token behind")
        slot.tokens += proposed
        self._compute(slot, slot.num_computed + 1 + len(proposed), {})
        return True

    def _compute_span(self, span: ranks_pb2.ScheduledSpan, result: ranks_pb2.StepResult) -> bool:
        slot = self._slots[span.slot]
        begin, end = slot.num_computed, slot.num_computed + span.num_tokens
        self._require(span.num_tokens >= 1 and end <= len(slot.tokens), "more tokens than are known")
        self._require(span.sample == (end == len(slot.tokens)), "sample is not said at the last token")
        if span.HasField("from_snapshot"):
            self._require(self._keeps_states and slot.state is None, f"slot {span.slot} has states of its own")
            behind, slot.state = self._snapshots[span.from_snapshot] or (-1, None)
            self._require(behind == begin, f"a snapshot behind {behind} tokens is taken for one behind {begin}")
        taken = {each.num_tokens: each.snapshot for each in span.snapshots}
        self._require(all(begin < behind <= end for behind in taken), "a snapshot is behind tokens of another span")
        self._compute(slot, end, taken)
        if slot.sampling.HasField("num_prompt_logprobs"):
            last = min(end, slot.num_prompt - 1)
            positions = [_logprobs(self._read(slot, i), slot.tokens[i + 1]) for i in range(begin, last)]
            if positions:
                result.prompt_logprobs.add(slot=span.slot, begin=begin + 1, positions=positions)
        pooled = range(begin, end) if slot.sampling.pooling == ranks_pb2.POOLING_MEAN else range(end - span.sample, end)
        if slot.sampling.pooling and pooled:
            states = [_hidden(self._read(slot, position)) for position in pooled]
            result.pooled.add(slot=span.slot, num_tokens=len(pooled), sums=map(sum, zip(*states, strict=True)))
        return span.sample

    def _compute(self, slot: _Slot, end: int, taken: Mapping[int, int]) -> None:
        self._require(len(slot.blocks) * self._block_size >= end, "the block table ends before the tokens")
        for position in range(slot.num_computed, end):
            self._write(slot, position)
            if position + 1 in taken:
                assert slot.state is not None
                self._snapshots[taken[position + 1]] = position + 1, slot.state
        slot.num_computed = end

    def _sample_along(
        self, number: int, proposed: Sequence[int], result: ranks_pb2.StepResult, *, masks: Sequence[bytes]
    ) -> None:
        slot = self._slots[number]
        del slot.tokens[len(slot.tokens) - len(proposed) :]
        for index in range(len(proposed) + 1):
            self._sample(number, result, mask=masks[index] if masks else None)
            if proposed[index : index + 1] != slot.tokens[-1:]:
                break
        if proposed:
            slot.num_computed = len(slot.tokens) - 1

    def _sample(self, number: int, result: ranks_pb2.StepResult, *, mask: bytes | None) -> None:
        slot = self._slots[number]
        values = [self._read(slot, position) for position in range(len(slot.tokens))]
        token = _next_token(values, seed=slot.sampling.seed, vocab_size=self._vocab_size)
        if mask is not None:
            allowed = [each for each in range(self._vocab_size) if mask[each // 8] >> each % 8 & 1]
            self._require(bool(allowed), "a mask allows nothing")
            token = allowed[token % len(allowed)]
        if self.script:
            # A step may be out already when the end was drawn.
            token = self.script[min(len(slot.tokens) - slot.num_prompt, len(self.script) - 1)]
        if slot.sampling.HasField("num_logprobs"):
            result.logprobs.append(_logprobs(values[-1], token))
        slot.tokens.append(token)
        result.slots.append(number)
        result.token_ids.append(token)

    def _write(self, slot: _Slot, position: int) -> None:
        block = slot.blocks[position // self._block_size]
        sharing = [other for other in self._slots.values() if other is not slot and block in other.blocks]
        self._require(not sharing, f"block {block} is written while another sequence has it")
        before = self._before(slot, position)
        place = self._place(slot, position)
        self._kv[place] = slot.state = _digest(before, slot.tokens[position])
        self._written[place] = slot

    def _before(self, slot: _Slot, position: int) -> int:
        """The number before a position."""
        if self._keeps_states:
            if slot.state is None:
                raise PlanError(f"position {position} is computed without states")
            return slot.state
        return self._read(slot, position - 1) if position else slot.sampling.top_k

    def _read(self, slot: _Slot, position: int) -> int:
        place = self._place(slot, position)
        value = self._kv[place]
        if value is None:
            raise PlanError(f"position {position} is read and was never computed")
        # The sequences of a batch are computed side by side.
        self._require(self._written.get(place, slot) is slot, f"position {position} is another sequence's of this step")
        return value

    def _place(self, slot: _Slot, position: int) -> int:
        return slot.blocks[position // self._block_size] * self._block_size + position % self._block_size

    @staticmethod
    def _require(condition: bool, problem: str) -> None:
        if not condition:
            raise PlanError(problem)

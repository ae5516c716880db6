"""Does a plan fit this rank's state? Checked as a whole, before anything of it is applied.

The gateway's scheduler is trusted to be fair, not to be free of bugs: a wrong block id would silently read or
overwrite another request's cache. Every violation is a ProtocolError that names the step, the slot and the
numbers that disagree.

The check applies the plan's deltas to a copy of the slots' counts, and looks at the outcome. Its arrays are
allocated once; the decoding slots, which are nearly all of a steady step, are checked by array operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from hetero_api.v1 import ranks_pb2
from hetero_worker.errors import ProtocolError
from hetero_worker.runners.slots import Int64Array, SlotCounts, SlotList

BoolArray = npt.NDArray[np.bool_]

_COMPUTES: Final = 1
_SAMPLES: Final = 2
_MASKED: Final = 3


_BETWEEN_STEPS: Final = frozenset(
    {"start_profile", "stop_profile", "count_experts", "place_experts", "load_adapter", "unload_adapter"}
)
"""Commands that leave slots and cache as they are."""


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """Limits that the epoch's messages set."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    num_snapshots: int = 0
    keeps_states: bool = False
    """Whether the model keeps states of each sequence, so that one begins with its first token or a snapshot."""

    tells_states: bool = False
    """Whether the states of all rows are wanted, for a prediction head."""

    def place_of(self, snapshot: int) -> int:
        """Return where a snapshot's states lie: behind those of all slots."""
        return self.max_num_seqs + snapshot

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_logit_rows(self) -> int:
        """Rows of a step whose logits or states are wanted, at most: of draws, of a prompt's tokens, of all spans."""
        return self.max_num_seqs + (1 + self.tells_states) * self.max_num_batched_tokens


def num_decode_rows(plan: ranks_pb2.StepPlan) -> int:
    """Return the number of rows of slots that decode: one a slot, and one a proposed token."""
    return len(plan.decode_slots) + sum(len(proposal.token_ids) for proposal in plan.proposals)


class PlanCheck:
    """For one cache; see the module."""

    def __init__(self, bounds: PlanBounds) -> None:
        self.bounds = self._bounds = bounds
        self._counts = SlotCounts(bounds.max_num_seqs)
        self._roles = np.zeros(bounds.max_num_seqs, dtype=np.int8)
        """Task of each slot in the step: nothing, or one of the constants above."""
        self._decoding = SlotList(bounds.max_num_seqs)
        self._computed = np.zeros(bounds.max_num_seqs, dtype=np.int64)
        self._other = np.zeros(bounds.max_num_seqs, dtype=np.int64)
        self._fits = np.zeros(bounds.max_num_seqs, dtype=np.bool_)
        self._plan = ranks_pb2.StepPlan()
        self._without_states: set[int] = set()
        """Slots that were bound with computed tokens, in a model that keeps states."""

    def run(self, plan: ranks_pb2.StepPlan, counts: SlotCounts) -> None:
        """Raise ProtocolError unless the plan fits the slots, as `counts` tells them, and the bounds."""
        self._plan = plan
        self._counts.copy_from(counts)
        self._roles.fill(0)
        self._without_states.clear()
        self._release()
        for sequence in plan.new_sequences:
            self._bind(sequence)
        self._append_blocks()
        if plan.HasField("command"):
            self._check_command()
            return
        self._check_decoding()
        self._check_proposals()
        self._check_drafts()
        for span in plan.spans:
            self._check_span(span)
        for slot in self._without_states:
            raise self._error(f"slot {slot} begins behind computed tokens without a snapshot of their states")
        self._check_totals()
        self._check_masked()

    def _check_totals(self) -> None:
        plan, rows = self._plan, num_decode_rows(self._plan)
        total = rows + sum(span.num_tokens for span in plan.spans)
        if total > self._bounds.max_num_batched_tokens:
            raise self._error(f"computes {total} tokens, at most {self._bounds.max_num_batched_tokens} are allowed")
        draws = rows + sum(span.sample for span in plan.spans)
        if draws > self._bounds.max_num_seqs:
            raise self._error(f"makes {draws} draws, at most {self._bounds.max_num_seqs} are allowed")

    def _release(self) -> None:
        for slot in self._plan.released_slots:
            if not self._counts.holds(slot):
                raise self._error(f"releases slot {slot}, which is not in use")
            self._counts.set(slot, num_tokens=0, num_computed=0, num_blocks=0)

    def _bind(self, sequence: ranks_pb2.NewSequence) -> None:
        slot, known, bounds = sequence.slot, len(sequence.token_ids), self._bounds
        if slot >= bounds.max_num_seqs:
            raise self._error(f"binds slot {slot}, there are {bounds.max_num_seqs}")
        if self._counts.holds(slot):
            raise self._error(f"binds slot {slot}, which is in use")
        if not 0 < known <= bounds.max_model_len:
            raise self._error(f"slot {slot} begins with {known} tokens, 1 to {bounds.max_model_len} are allowed")
        if not 0 < sequence.num_prompt_tokens <= known:
            raise self._error(f"slot {slot} has {known} tokens, of which {sequence.num_prompt_tokens} are the prompt's")
        if sequence.num_computed_tokens >= known:
            raise self._error(f"slot {slot} has {known} tokens, all computed: one must be left")
        self._check_tokens(slot, "a token id", sequence.token_ids)
        self._check_sampling(slot, sequence.sampling)
        if self._bounds.keeps_states and sequence.num_computed_tokens:
            self._without_states.add(slot)
        self._check_block_ids(slot, sequence.block_ids)
        self._check_room(slot, len(sequence.block_ids), needed=sequence.num_computed_tokens)
        self._counts.set(
            slot, num_tokens=known, num_computed=sequence.num_computed_tokens, num_blocks=len(sequence.block_ids)
        )

    def _check_sampling(self, slot: int, sampling: ranks_pb2.Sampling) -> None:
        if len(sampling.bias_token_ids) != len(sampling.biases):
            raise self._error(
                f"slot {slot} has {len(sampling.biases)} biases for {len(sampling.bias_token_ids)} bias_token_ids"
            )
        self._check_tokens(slot, "a bias_token_id", sampling.bias_token_ids)
        self._check_tokens(slot, "an end_token_id", sampling.end_token_ids)

    def _check_tokens(self, slot: int, what: str, token_ids: Sequence[int]) -> None:
        if token_ids and max(token_ids) >= self._bounds.vocab_size:
            raise self._error(f"slot {slot} has {what} beyond the vocabulary of {self._bounds.vocab_size}")

    def _append_blocks(self) -> None:
        slots, ids = self._plan.block_slots, self._plan.block_ids
        if len(slots) != len(ids):
            raise self._error(f"has {len(slots)} block_slots for {len(ids)} block_ids")
        for slot, block_id in zip(slots, ids, strict=True):
            if not self._counts.holds(slot):
                raise self._error(f"gives a block to slot {slot}, which is not in use")
            self._check_block_ids(slot, (block_id,))
            self._counts.num_blocks[slot] += 1
        for slot in set(slots):
            self._check_room(slot, int(self._counts.num_blocks[slot]), needed=0)

    def _check_block_ids(self, slot: int, ids: Sequence[int]) -> None:
        if ids and not (min(ids) > 0 and max(ids) < self._bounds.num_blocks):
            raise self._error(f"gives slot {slot} a block outside [1, {self._bounds.num_blocks})")

    def _check_room(self, slot: int, num_blocks: int, *, needed: int) -> None:
        if num_blocks > self._bounds.max_blocks:
            raise self._error(f"gives slot {slot} {num_blocks} blocks, at most {self._bounds.max_blocks} are allowed")
        if num_blocks * self._bounds.block_size < needed:
            raise self._error(f"slot {slot} has {num_blocks} blocks of {self._bounds.block_size} for {needed} tokens")

    def _check_command(self) -> None:
        plan = self._plan
        action = plan.command.WhichOneof("action")
        if action is None:
            raise self._error("has a command that this rank does not know")
        if plan.decode_slots or plan.spans or plan.masked_slots or plan.proposals:
            raise self._error(f"computes beside its command {action}")
        if action not in _BETWEEN_STEPS and (in_use := self._counts.in_use):
            raise self._error(f"has the command {action} while {in_use} slots are in use: all must be free")

    def _check_decoding(self) -> None:
        """As `_check_sequence` for each decoding slot, at once."""
        count = len(self._plan.decode_slots)
        if not count:
            return
        if count > self._bounds.max_num_seqs or max(self._plan.decode_slots) >= self._bounds.max_num_seqs:
            raise self._error(f"decodes in slots beyond the {self._bounds.max_num_seqs} that there are")
        slots = self._decoding.fill(self._plan.decode_slots)
        computed, other, fits = self._computed[:count], self._other[:count], self._fits[:count]
        self._roles.put(slots, _SAMPLES, mode="clip")
        if np.count_nonzero(self._roles) != count:
            raise self._error("schedules a slot twice")
        self._counts.num_computed.take(slots, out=computed, mode="clip")
        self._counts.num_tokens.take(slots, out=other, mode="clip")
        np.add(computed, 1, out=computed)
        np.equal(computed, other, out=fits)
        self._check_each(slots, fits)
        np.less_equal(computed, self._bounds.max_model_len, out=fits)
        self._check_each(slots, fits)
        self._counts.num_blocks.take(slots, out=other, mode="clip")
        np.multiply(other, self._bounds.block_size, out=other)
        np.less_equal(computed, other, out=fits)
        self._check_each(slots, fits)

    def _check_each(self, slots: Int64Array, fits: BoolArray) -> None:
        if not fits.all():
            self._check_sequence(int(slots[int(fits.argmin())]), 1, sample=True)

    def _check_proposals(self) -> None:
        """Check the proposals; slots that decode are all that have roles by now."""
        proposing: set[int] = set()
        for proposal in self._plan.proposals:
            slot, count = proposal.slot, len(proposal.token_ids)
            if slot >= self._bounds.max_num_seqs or not self._roles[slot]:
                raise self._error(f"proposes tokens for slot {slot}, which does not decode")
            if slot in proposing or not count:
                raise self._error(f"proposes {'twice' if slot in proposing else 'no tokens'} for slot {slot}")
            proposing.add(slot)
            self._check_tokens(slot, "a proposed token", proposal.token_ids)
            reached = int(self._counts.num_tokens[slot]) + count
            if reached > self._bounds.max_model_len:
                raise self._error(
                    f"slot {slot} reaches {reached} tokens, max_model_len is {self._bounds.max_model_len}"
                )
            self._check_room(slot, int(self._counts.num_blocks[slot]), needed=reached)
            self._check_saves(proposal)
        saved = [snapshot for proposal in self._plan.proposals for snapshot in proposal.snapshots]
        if len(set(saved)) < len(saved):
            raise self._error("saves the states of two proposed tokens in one snapshot")

    def _check_saves(self, proposal: ranks_pb2.Proposal) -> None:
        slot, saved = proposal.slot, proposal.snapshots
        needed = len(proposal.token_ids) if self._bounds.keeps_states else 0
        if len(saved) != needed:
            raise self._error(f"proposes tokens for slot {slot} with {len(saved)} snapshots, it needs {needed}")
        self._check_snapshot_numbers(slot, saved)

    def _check_snapshot_numbers(self, slot: int, used: Sequence[int]) -> None:
        if used and max(used) >= self._bounds.num_snapshots:
            raise self._error(f"slot {slot} uses snapshot {max(used)}, there are {self._bounds.num_snapshots}")

    def _check_drafts(self) -> None:
        slots = self._plan.draft_slots
        if bool(slots) != bool(self._plan.num_drafts):
            raise self._error(f"wants {self._plan.num_drafts} tokens drafted for {len(slots)} slots")
        if len(set(slots)) < len(slots):
            raise self._error("wants tokens drafted twice for a slot")
        for slot in slots:
            if slot >= self._bounds.max_num_seqs or not self._roles[slot]:
                raise self._error(f"wants tokens drafted for slot {slot}, which does not decode")

    def _check_span(self, span: ranks_pb2.ScheduledSpan) -> None:
        if span.slot < self._bounds.max_num_seqs and self._roles[span.slot]:
            raise self._error("schedules a slot twice")
        self._check_sequence(span.slot, span.num_tokens, sample=span.sample)
        self._roles[span.slot] = _SAMPLES if span.sample else _COMPUTES
        self._check_snapshots(span)

    def _check_snapshots(self, span: ranks_pb2.ScheduledSpan) -> None:
        if span.HasField("from_snapshot"):
            if span.slot not in self._without_states:
                raise self._error(f"slot {span.slot} takes states of a snapshot, and has its own")
            self._without_states.remove(span.slot)
        used = [span.from_snapshot] * span.HasField("from_snapshot") + [each.snapshot for each in span.snapshots]
        self._check_snapshot_numbers(span.slot, used)
        computed = int(self._counts.num_computed[span.slot])
        behind = [computed, *(each.num_tokens for each in span.snapshots)]
        if any(a >= b for a, b in pairwise(behind)) or behind[-1] > computed + span.num_tokens:
            raise self._error(
                f"slot {span.slot} takes snapshots behind {behind[1:]} tokens in a span from {computed} to "
                f"{computed + span.num_tokens}"
            )

    def _check_sequence(self, slot: int, num_tokens: int, *, sample: bool) -> None:
        """Raise unless the slot can compute so many tokens, and samples just when they reach its last one."""
        if not self._counts.holds(slot):
            raise self._error(f"schedules slot {slot}, which is not in use")
        known, computed = int(self._counts.num_tokens[slot]), int(self._counts.num_computed[slot])
        reached = computed + num_tokens
        if not 0 < num_tokens <= known - computed:
            raise self._error(
                f"computes {num_tokens} tokens of slot {slot}, of which {computed} of {known} are computed"
            )
        if reached > self._bounds.max_model_len:
            raise self._error(f"slot {slot} reaches {reached} tokens, max_model_len is {self._bounds.max_model_len}")
        if sample != (reached == known):
            raise self._error(f"slot {slot} reaches {reached} of {known} tokens, but sample is {sample}")
        self._check_room(slot, int(self._counts.num_blocks[slot]), needed=reached)

    def _check_masked(self) -> None:
        for slot in self._plan.masked_slots:
            role = self._roles[slot] if slot < self._bounds.max_num_seqs else 0
            if role != _SAMPLES:
                problem = "twice" if role == _MASKED else "which does not sample"
                raise self._error(f"masks slot {slot}, {problem}")
            self._roles[slot] = _MASKED

    def _error(self, problem: str) -> ProtocolError:
        return ProtocolError(f"step plan {self._plan.step_id}: {problem}")

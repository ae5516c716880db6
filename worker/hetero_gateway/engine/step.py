"""What the scheduler hands out and takes back: a step, its outcome for each completion, and counts.

A step of 256 decodes is the usual case, and is worth 0.8 µs a completion. So a step refers to the decode batch as it
stood, which is not copied, and an outcome's updates are tuples, made in bulk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hetero_api.v1 import logprobs_pb2, ranks_pb2
from hetero_gateway.engine.errors import StepMismatch
from hetero_gateway.engine.request import Completion, FinishReason, Request


@dataclass(frozen=True, slots=True)
class DecodeView:
    """The decode batch at one moment: parallel columns that are replaced, never changed, in the batch order.

    `token_ids` are the completions' own lists, `end_token_ids` their sets. `masked` are those that are bound to a form;
    `has_logprobs` says whether any asks for log-probabilities.
    """

    completions: list[Completion]
    slots: list[int]
    token_ids: list[list[int]]
    end_token_ids: list[frozenset[int]]
    masked: tuple[Completion, ...]
    has_logprobs: bool


NO_DECODES = DecodeView([], [], [], [], (), False)


class SpanEntry(NamedTuple):
    """A completion that computes tokens [begin, end) in a step, as a span of the plan.

    `slot` and `residency` are those of the time of scheduling.
    """

    completion: Completion
    slot: int
    residency: int
    begin: int
    end: int
    sample: bool


class GrownEntry(NamedTuple):
    """A completion whose first `num_full_blocks` blocks are computed once the step before this one is done."""

    completion: Completion
    residency: int
    num_full_blocks: int


class ScheduledEntry(NamedTuple):
    """One completion's part of a step, whether decode or span; `slot` is that of the time of scheduling."""

    completion: Completion
    slot: int
    num_tokens: int
    sample: bool


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan to send to every rank, and whom it concerns.

    `last_draws` are the completions that draw their max_tokens-th token. `masked` are, in the order of
    `plan.masked_slots`, the completions whose draw is bound to a mask. A completion may end while a step with it is
    out: its mask then does not matter, but there must be one.
    """

    plan: ranks_pb2.StepPlan
    decodes: DecodeView = NO_DECODES
    spans: tuple[SpanEntry, ...] = ()
    grown: tuple[GrownEntry, ...] = ()
    last_draws: tuple[Completion, ...] = ()
    masked: tuple[Completion, ...] = ()

    @property
    def entries(self) -> list[ScheduledEntry]:
        """Every completion that computes, in batch order. Made anew each time."""
        decodes = zip(self.decodes.completions, self.decodes.slots, strict=True)
        return [
            *(ScheduledEntry(completion, slot, 1, True) for completion, slot in decodes),
            *(ScheduledEntry(span.completion, span.slot, span.end - span.begin, span.sample) for span in self.spans),
        ]

    @property
    def computes(self) -> bool:
        """Whether it computes anything; if not, it only drops slots."""
        return bool(self.decodes.slots or self.spans)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decodes.slots) + sum(span.end - span.begin for span in self.spans)

    def sampled_tokens(self, result: ranks_pb2.StepResult, *, vocab_size: int) -> list[int]:
        """Tokens of the decodes, then of the sampling spans. Raises StepMismatch unless `result` answers this plan."""
        if result.step_id != self.plan.step_id:
            raise StepMismatch(f"step {self.plan.step_id} is in flight, the result is of step {result.step_id}")
        where = f"step {result.step_id}"
        expected = self.decodes.slots
        if self.spans:
            expected = expected + [span.slot for span in self.spans if span.sample]
        if list(result.slots) != expected:
            raise StepMismatch(f"{where}: slots {expected} had to sample, slots {list(result.slots)} did")
        token_ids = list(result.token_ids)
        if len(token_ids) != len(expected):
            raise StepMismatch(f"{where}: {len(expected)} slots sampled, {len(token_ids)} tokens came")
        if token_ids and max(token_ids) >= vocab_size:
            raise StepMismatch(f"{where}: token {max(token_ids)} is outside the vocabulary of {vocab_size}")
        return token_ids


class CompletionUpdate(NamedTuple):
    """A completion got a token. With `reason` it has ended: its blocks are free.

    `stop_token_id` is the token when the token itself is what ended it. `logprobs` is there if it asked for them.
    """

    completion: Completion
    token_id: int
    reason: FinishReason | None
    stop_token_id: int | None
    logprobs: logprobs_pb2.TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step's result changed.

    `prompt_logprobs` has a request once, when those of its whole prompt have come; its first tokens come after it or in
    the same outcome.
    """

    updates: list[CompletionUpdate]
    prompt_logprobs: list[tuple[Request, list[logprobs_pb2.TokenLogprobs]]]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges now and counts since the start, as GetStatsResponse has them. free + used = num_blocks."""

    running_requests: int
    waiting_requests: int
    num_blocks: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    finished_requests: int

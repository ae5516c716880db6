"""What the scheduler hands out and takes back: a step, its outcome for each request, and counts."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.errors import StepMismatch
from hetero_gateway.engine.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class ScheduledEntry:
    """One request's part of a step; `slot` is the request's at the time of scheduling."""

    request: Request
    slot: int
    num_tokens: int
    sample: bool


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan to send to every rank, and whom it concerns, in batch order."""

    plan: ranks_pb2.StepPlan
    entries: tuple[ScheduledEntry, ...]

    def tokens_by_slot(self, result: ranks_pb2.StepResult, *, vocab_size: int) -> dict[int, int]:
        """The sampled tokens. Raises StepMismatch unless `result` answers exactly this plan."""
        if result.step_id != self.plan.step_id:
            raise StepMismatch(f"step {self.plan.step_id} is in flight, the result is of step {result.step_id}")
        where = f"step {result.step_id}"
        expected = [entry.slot for entry in self.entries if entry.sample]
        if list(result.slots) != expected:
            raise StepMismatch(f"{where}: slots {expected} had to sample, slots {list(result.slots)} did")
        if len(result.token_ids) != len(expected):
            raise StepMismatch(f"{where}: {len(expected)} slots sampled, {len(result.token_ids)} tokens came")
        if any(token >= vocab_size for token in result.token_ids):
            raise StepMismatch(f"{where}: token {max(result.token_ids)} is outside the vocabulary of {vocab_size}")
        return dict(zip(result.slots, result.token_ids, strict=True))


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """A request got a token. With `reason` it has ended: the scheduler has forgotten it and freed its blocks.

    `stop_token_id` is the token when the token itself is what ended the request.
    """

    request: Request
    token_id: int
    reason: FinishReason | None
    stop_token_id: int | None


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

"""Steps as the scheduler hands them out and takes them back: a step, and its outcome for each completion.

A step of 256 decodes is the usual case, and is worth 0.8 µs a completion. So a step refers to the decode batch as it
stood, which is not copied, and a result is turned into updates, which are tuples, in bulk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress, groupby, repeat
from operator import attrgetter, contains
from typing import NamedTuple, TypeVar, cast

from hetero_api.v1 import logprobs_pb2, ranks_pb2
from hetero_gateway.engine.errors import StepMismatch
from hetero_gateway.engine.request import Completion, FinishReason, PooledStates, Request

_Logprobs = logprobs_pb2.TokenLogprobs
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class DecodeView:
    """The decode batch at one moment: parallel columns that are replaced, never changed, in the batch order.

    `token_ids` are the completions' own lists, `end_token_ids` their sets. `masked` are the completions that are bound
    to a form; `has_logprobs` is whether any asks for log-probabilities.
    """

    completions: list[Completion]
    slots: list[int]
    token_ids: list[list[int]]
    end_token_ids: list[frozenset[int]]
    masked: tuple[Completion, ...]
    has_logprobs: bool


NO_DECODES = DecodeView([], [], [], [], (), False)


class TakenSnapshot(NamedTuple):
    """A snapshot of a sequence's states behind its first `num_tokens` tokens, which end a block of this digest."""

    num_tokens: int
    snapshot: int
    digest: bytes


class SpanEntry(NamedTuple):
    """Part of a step in which a completion computes its tokens [begin, end).

    `slot` and `residency` are those of the time of scheduling.
    """

    completion: Completion
    slot: int
    residency: int
    begin: int
    end: int
    sample: bool
    snapshots: tuple[TakenSnapshot, ...] = ()


class GrownEntry(NamedTuple):
    """A completion whose first `num_full_blocks` blocks are computed once the step before this one is done."""

    completion: Completion
    residency: int
    num_full_blocks: int


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan to send to every rank, and the completions in it. The plan gets its id when it is sent.

    `last_draws` are the completions that draw their max_tokens-th token. `masked` are, in the order of
    `plan.masked_slots`, the completions whose draw is bound to a mask. A completion may end while a step with it is
    out: its mask then does not matter, but there must be one. `proposals` has proposed tokens by the slot of a decode.
    """

    plan: ranks_pb2.StepPlan
    decodes: DecodeView = NO_DECODES
    spans: tuple[SpanEntry, ...] = ()
    grown: tuple[GrownEntry, ...] = ()
    last_draws: tuple[Completion, ...] = ()
    masked: tuple[Completion, ...] = ()
    proposals: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def computes(self) -> bool:
        """Whether the step computes anything; if not, it only drops slots."""
        return bool(self.decodes.slots or self.spans)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        proposed = sum(map(len, self.proposals.values()))
        return len(self.decodes.slots) + proposed + sum(span.end - span.begin for span in self.spans)

    def sampled_tokens(self, result: ranks_pb2.StepResult, *, vocab_size: int) -> list[int]:
        """Return the tokens of the decodes, then of the sampling spans; of a decode with a proposal maybe several.

        Raises StepMismatch unless `result` answers this plan.
        """
        if result.step_id != self.plan.step_id:
            raise StepMismatch(f"step {self.plan.step_id} is in flight, the result is of step {result.step_id}")
        where = f"step {result.step_id}"
        expected = self.decodes.slots
        if self.spans:
            expected = expected + [span.slot for span in self.spans if span.sample]
        sampled = list(result.slots)
        if (sampled if not self.proposals else [slot for slot, _ in groupby(sampled)]) != expected:
            raise StepMismatch(f"{where}: slots {expected} had to sample, slots {sampled} did")
        token_ids = list(result.token_ids)
        if len(token_ids) != len(sampled):
            raise StepMismatch(f"{where}: {len(sampled)} slots sampled, {len(token_ids)} tokens came")
        self._check_accepted(sampled, token_ids, where)
        if token_ids and max(token_ids) >= vocab_size:
            raise StepMismatch(f"{where}: token {max(token_ids)} is outside the vocabulary of {vocab_size}")
        return token_ids

    def _check_accepted(self, slots: Sequence[int], token_ids: Sequence[int], where: str) -> None:
        """Raise StepMismatch unless all tokens of a slot but its last are those that were proposed."""
        if not self.proposals:
            return
        for slot, group in groupby(zip(slots, token_ids, strict=True), lambda pair: pair[0]):
            accepted = [token for _, token in group][:-1]
            if accepted != list(self.proposals.get(slot, ())[: len(accepted)]):
                raise StepMismatch(f"{where}: slot {slot} got {accepted}, which was not proposed")


class CompletionUpdate(NamedTuple):
    """A token that a completion got. With `reason` the completion has ended: its blocks are free.

    `stop_token_id` is the token if the token itself ended the completion. `logprobs` is there if they were asked for.
    """

    completion: Completion
    token_id: int
    reason: FinishReason | None
    stop_token_id: int | None
    logprobs: _Logprobs | None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Changes that a step's result made.

    `prompt_logprobs` has a request once, when those of its whole prompt have come; its first tokens come after it or in
    the same outcome.
    """

    updates: list[CompletionUpdate]
    prompt_logprobs: list[tuple[Request, list[_Logprobs]]]


# --- a result, turned into updates --------------------------------------------------------------------------


# Does what CompletionUpdate._make does, without a Python call for each.
_new_update = cast(
    "Callable[[tuple[Completion, int, None, None, _Logprobs | None]], CompletionUpdate]",
    partial(tuple.__new__, CompletionUpdate),
)
_ended_of = cast("Callable[[Completion], bool]", attrgetter("ended"))


class TokenUpdates(NamedTuple):
    """All updates of a step, and those of them that end their completion."""

    all: list[CompletionUpdate]
    ending: list[CompletionUpdate]


def append_tokens(step: ScheduledStep, result: ranks_pb2.StepResult, *, vocab_size: int) -> TokenUpdates:
    """Append to each completion that has not ended the token that it drew; return the updates, in batch order.

    Raises StepMismatch, having changed nothing, if `result` does not answer `step`.
    """
    tokens = step.sampled_tokens(result, vocab_size=vocab_size)
    sampling = [span.completion for span in step.spans if span.sample]
    completions = step.decodes.completions + sampling
    known = step.decodes.token_ids + [completion.token_ids for completion in sampling]
    ends = step.decodes.end_token_ids + [completion.end_token_ids for completion in sampling]
    if step.proposals:
        counts = [len(list(group)) for _, group in groupby(result.slots)]
        completions, known, ends = _times(completions, counts), _times(known, counts), _times(ends, counts)
    logprobs = _logprobs_column(step, result, completions)
    if any(map(_ended_of, completions)):
        alive = [not completion.ended for completion in completions]
        completions, tokens = list(compress(completions, alive)), list(compress(tokens, alive))
        known, ends = list(compress(known, alive)), list(compress(ends, alive))
        logprobs = None if logprobs is None else list(compress(logprobs, alive))
    deque(map(list.append, known, tokens), maxlen=0)
    columns = zip(completions, tokens, repeat(None), repeat(None), repeat(None) if logprobs is None else logprobs)
    updates = list(map(_new_update, columns))
    ending = dict.fromkeys(_mark_last_draws(step, updates))
    is_end = list(map(contains, ends, tokens))
    if True in is_end:
        ending.update(dict.fromkeys(_mark_stops(updates, is_end)))
    return TokenUpdates(updates, [updates[index] for index in ending])


def _times(column: Iterable[_T], counts: Iterable[int]) -> list[_T]:
    """Return each element as often as its count says."""
    return list(chain.from_iterable(map(repeat, column, counts)))


def append_prompt_logprobs(step: ScheduledStep, result: ranks_pb2.StepResult) -> list[Request]:
    """Keep what came of prompts' log-probabilities; return the requests that now have all. Raises StepMismatch."""
    spans = {span.slot: span for span in step.spans}
    for part in result.prompt_logprobs:
        span = spans.get(part.slot)
        if span is None:
            raise StepMismatch(
                f"step {result.step_id}: prompt log-probabilities of slot {part.slot}, which has no span"
            )
        collected = span.completion.request.prompt_logprobs
        if collected is None or not _is_collected(span):
            continue
        # The prompt's first token has none, so position 1 is the first.
        if part.positions and part.begin != len(collected) + 1:
            raise StepMismatch(
                f"step {result.step_id}: prompt log-probabilities of slot {part.slot} begin at {part.begin} where "
                f"{len(collected) + 1} is the next"
            )
        collected.extend(part.positions)
    return [span.completion.request for span in step.spans if _has_all_prompt_logprobs(span, result)]


def add_pooled(step: ScheduledStep, result: ranks_pb2.StepResult) -> None:
    """Add the hidden states that came for embeddings. Raises StepMismatch if they are not those that had to come."""
    came = {part.slot: part for part in result.pooled}
    for span in step.spans:
        request, part = span.completion.request, came.get(span.slot)
        pooling, pooled = request.asked.sampling.pooling, request.pooled
        if not pooling or pooled is None or pooled.residency != span.residency:
            continue
        wanted = span.end - span.begin if pooling == ranks_pb2.POOLING_MEAN else int(span.sample)
        num_tokens = 0 if part is None else part.num_tokens
        if num_tokens != wanted:
            raise StepMismatch(
                f"step {result.step_id}: hidden states of {wanted} tokens of slot {span.slot} had to come, "
                f"of {num_tokens} did"
            )
        if part is not None:
            _add_sums(pooled, part, step_id=result.step_id)


def _add_sums(pooled: PooledStates, part: ranks_pb2.PooledSpan, *, step_id: int) -> None:
    try:
        pooled.add(part.sums, part.num_tokens)
    except ValueError as error:
        raise StepMismatch(f"step {step_id}: hidden states of slot {part.slot} have another width") from error


def _has_all_prompt_logprobs(span: SpanEntry, result: ranks_pb2.StepResult) -> bool:
    request = span.completion.request
    if request.prompt_logprobs is None or not _is_collected(span):
        return False
    if span.end < request.num_prompt_tokens:
        return False
    if len(request.prompt_logprobs) != request.num_prompt_tokens - 1:
        raise StepMismatch(
            f"step {result.step_id}: {request.num_prompt_tokens - 1} prompt log-probabilities of slot {span.slot} had "
            f"to come, {len(request.prompt_logprobs)} did"
        )
    return True


def _is_collected(span: SpanEntry) -> bool:
    """Return whether the span is of the residency that gives the prompt's log-probabilities; a preemption ends it."""
    return span.completion.request.prompt_logprobs_source == (span.completion, span.residency)


def _logprobs_column(
    step: ScheduledStep, result: ranks_pb2.StepResult, completions: list[Completion]
) -> list[_Logprobs | None] | None:
    """Return one entry for each completion; None if nobody asks."""
    if not step.decodes.has_logprobs and not any(span.sample and span.completion.has_logprobs for span in step.spans):
        return None
    num_asked = sum(completion.has_logprobs for completion in completions)
    if len(result.logprobs) != num_asked:
        raise StepMismatch(
            f"step {result.step_id}: {num_asked} slots ask for log-probabilities, {len(result.logprobs)} came"
        )
    came = iter(result.logprobs)
    return [next(came) if completion.has_logprobs else None for completion in completions]


def _mark_last_draws(step: ScheduledStep, updates: list[CompletionUpdate]) -> list[int]:
    if not (step.last_draws or step.proposals):
        return []
    index_of = {update.completion: index for index, update in enumerate(updates)}
    marked = [index_of[completion] for completion in step.last_draws if completion in index_of]
    if step.proposals:
        marked = [index for each, index in index_of.items() if each.num_tokens == each.max_num_tokens]
    for index in marked:
        updates[index] = updates[index]._replace(reason=FinishReason.LENGTH)
    return marked


def _mark_stops(updates: list[CompletionUpdate], is_end: list[bool]) -> list[int]:
    marked = list(compress(range(len(updates)), is_end))
    for index in marked:
        token_id = updates[index].token_id
        updates[index] = updates[index]._replace(reason=FinishReason.STOP, stop_token_id=token_id)
    return marked

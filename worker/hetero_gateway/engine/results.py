"""A step's result turned into what it means for each completion, in bulk where all fare alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, contains
from typing import NamedTuple, cast

from hetero_api.v1 import logprobs_pb2, ranks_pb2
from hetero_gateway.engine.errors import StepMismatch
from hetero_gateway.engine.request import Completion, FinishReason, Request
from hetero_gateway.engine.step import CompletionUpdate, ScheduledStep, SpanEntry

_Logprobs = logprobs_pb2.TokenLogprobs

# What CompletionUpdate._make does, without a Python call for each.
_new_update = cast(
    "Callable[[tuple[Completion, int, None, None, _Logprobs | None]], CompletionUpdate]",
    partial(tuple.__new__, CompletionUpdate),
)
_ended_of = cast("Callable[[Completion], bool]", attrgetter("ended"))


class TokenUpdates(NamedTuple):
    """What a step's tokens mean: all updates, and those of them that end their completion."""

    all: list[CompletionUpdate]
    ending: list[CompletionUpdate]


def append_tokens(step: ScheduledStep, result: ranks_pb2.StepResult, *, vocab_size: int) -> TokenUpdates:
    """Append to each completion that has not ended the token that it drew. In batch order; those that end say why.

    Raises StepMismatch, having changed nothing, if `result` does not answer `step`.
    """
    tokens = step.sampled_tokens(result, vocab_size=vocab_size)
    sampling = [span.completion for span in step.spans if span.sample]
    completions = step.decodes.completions + sampling
    logprobs = _logprobs_column(step, result, completions)
    known = step.decodes.token_ids + [completion.token_ids for completion in sampling]
    ends = step.decodes.end_token_ids + [completion.end_token_ids for completion in sampling]
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


def append_prompt_logprobs(step: ScheduledStep, result: ranks_pb2.StepResult) -> list[Request]:
    """Keep what came of prompts' log-probabilities; the requests whose are complete. Raises StepMismatch."""
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
    """Whether it is of the residency that gives the prompt's log-probabilities, which a preemption may have ended."""
    return span.completion.request.prompt_logprobs_source == (span.completion, span.residency)


def _logprobs_column(
    step: ScheduledStep, result: ranks_pb2.StepResult, completions: list[Completion]
) -> list[_Logprobs | None] | None:
    """One a completion; None if nobody asks."""
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
    if not step.last_draws:
        return []
    index_of = {update.completion: index for index, update in enumerate(updates)}
    marked = [index_of[completion] for completion in step.last_draws if completion in index_of]
    for index in marked:
        updates[index] = updates[index]._replace(reason=FinishReason.LENGTH)
    return marked


def _mark_stops(updates: list[CompletionUpdate], is_end: list[bool]) -> list[int]:
    marked = list(compress(range(len(updates)), is_end))
    for index in marked:
        token_id = updates[index].token_id
        updates[index] = updates[index]._replace(reason=FinishReason.STOP, stop_token_id=token_id)
    return marked

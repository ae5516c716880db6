"""The engine's events as messages of inference.proto."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Final

from google.protobuf import duration_pb2

from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.engine.request import FinishReason
from hetero_gateway.engine.stream import FinishedEvent, PromptLogprobsEvent, StreamEvent, Timings, TokensEvent

_NANOS: Final = 1_000_000_000
_REASONS: Final = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}


def started_event(request_id: str, *, prompt_tokens: int, seed: int) -> pb.GenerateEvent:
    return pb.GenerateEvent(started=pb.Started(request_id=request_id, prompt_tokens=prompt_tokens, seed=seed))


def stream_event(event: StreamEvent) -> pb.GenerateEvent:
    """What a request's stream said."""
    if isinstance(event, TokensEvent):
        return _delta_event(event)
    if isinstance(event, PromptLogprobsEvent):
        return pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(positions=event.positions))
    return _finished_event(event)


def _delta_event(tokens: TokensEvent) -> pb.GenerateEvent:
    delta = pb.Delta(index=tokens.index, token_ids=tokens.token_ids, text=tokens.text, logprobs=tokens.logprobs)
    return pb.GenerateEvent(delta=delta)


def _finished_event(finished: FinishedEvent) -> pb.GenerateEvent:
    usage = finished.usage
    message = pb.Finished(
        index=finished.index,
        reason=_REASONS[finished.reason],
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        ),
        timings=_timings(finished.timings),
    )
    if finished.stop_text is not None:
        message.stop_text = finished.stop_text
    elif finished.stop_token_id is not None:
        message.stop_token_id = finished.stop_token_id
    return pb.GenerateEvent(finished=message)


def _timings(timings: Timings) -> pb.Timings:
    return pb.Timings(
        queued=_duration(timings.queued_s),
        first_token=_duration(timings.first_token_s),
        total=_duration(timings.total_s),
    )


def _duration(seconds: float | None) -> duration_pb2.Duration | None:
    """None, i.e. an absent field, for what never came."""
    if seconds is None:
        return None
    whole, nanos = divmod(max(0, round(seconds * _NANOS)), _NANOS)
    return duration_pb2.Duration(seconds=whole, nanos=nanos)


async def merged(events: AsyncIterable[StreamEvent]) -> AsyncIterator[StreamEvent]:
    """All tokens of a completion in one event, just before its end."""
    pieces: dict[int, list[TokensEvent]] = {}
    async for event in events:
        if isinstance(event, TokensEvent):
            pieces.setdefault(event.index, []).append(event)
            continue
        if isinstance(event, FinishedEvent) and event.index in pieces:
            yield _sum(pieces.pop(event.index))
        yield event


def _sum(events: Sequence[TokensEvent]) -> TokensEvent:
    return TokensEvent(
        events[0].index,
        [token_id for event in events for token_id in event.token_ids],
        "".join(event.text for event in events),
        [logprobs for event in events for logprobs in event.logprobs],
    )

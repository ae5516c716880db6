"""The engine's events as messages of inference.proto."""

from __future__ import annotations

from typing import Final

from google.protobuf import duration_pb2

from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.engine.request import FinishReason
from hetero_gateway.engine.stream import FinishedEvent, Timings, TokensEvent

_NANOS: Final = 1_000_000_000
_REASONS: Final = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}


def started_event(request_id: str, *, prompt_tokens: int, seed: int) -> pb.GenerateEvent:
    return pb.GenerateEvent(started=pb.Started(request_id=request_id, prompt_tokens=prompt_tokens, seed=seed))


def delta_event(tokens: TokensEvent) -> pb.GenerateEvent:
    return pb.GenerateEvent(delta=pb.Delta(token_ids=tokens.token_ids, text=tokens.text))


def finished_event(finished: FinishedEvent) -> pb.GenerateEvent:
    usage = finished.usage
    message = pb.Finished(
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

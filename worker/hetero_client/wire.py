"""Between the client's dataclasses and protobuf: the one place where both are known.

`StreamReader` is the part of a Generate stream that the sync and the asyncio client share: it turns
messages into events and knows whether the stream ended as it must.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from hetero_api.v1 import inference_pb2 as pb
from hetero_client.errors import FieldViolation, IncompleteStreamError, InvalidRequestError, ServerError
from hetero_client.messages import (
    ChatMessage,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    ModelInfo,
    Prompt,
    SamplingParams,
    ServerInfo,
    Started,
    Timings,
    Usage,
)

_OPTIONAL_SAMPLING: Final = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "ignore_eos",
)  # fmt: skip
_REASONS: Final = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORT: FinishReason.ABORT,
}


def generate_request(
    prompt: Prompt, *, sampling: SamplingParams | None, request_id: str, cache_salt: str, final_only: bool
) -> pb.GenerateRequest:
    """The request on the wire. Raises InvalidRequestError for what no message can hold, e.g. a negative id."""
    mode = pb.OUTPUT_MODE_FINAL_ONLY if final_only else pb.OUTPUT_MODE_DELTA
    request = pb.GenerateRequest(request_id=request_id, cache_salt=cache_salt, output_mode=mode)
    if isinstance(prompt, str):
        request.text = prompt
    elif _is_chat(prompt):
        request.chat.CopyFrom(chat_messages(prompt))
    else:
        request.token_ids.SetInParent()
        _fill("token_ids", request.token_ids.ids, prompt)
    if sampling is not None:
        _fill_sampling(request.sampling, sampling)
    return request


def tokenize_request(prompt: str | Iterable[ChatMessage]) -> pb.TokenizeRequest:
    if isinstance(prompt, str):
        return pb.TokenizeRequest(text=prompt)
    return pb.TokenizeRequest(chat=chat_messages(prompt))


def detokenize_request(token_ids: Iterable[int]) -> pb.DetokenizeRequest:
    request = pb.DetokenizeRequest()
    _fill("token_ids", request.token_ids, token_ids)
    return request


def chat_messages(messages: Iterable[Any]) -> pb.ChatMessages:
    chat = pb.ChatMessages()
    for index, message in enumerate(messages):
        if not isinstance(message, ChatMessage):
            raise _invalid(f"chat.messages[{index}]", f"must be a ChatMessage, not {type(message).__name__}")
        chat.messages.add(role=message.role, content=message.content)
    return chat


class StreamReader:
    """Turns a Generate stream's messages into events."""

    def __init__(self) -> None:
        self.request_id = ""
        self._finished = False

    def read(self, message: pb.GenerateEvent) -> Event | None:
        """The event; None for a kind that this version does not know."""
        kind = message.WhichOneof("event")
        if kind == "started":
            self.request_id = message.started.request_id
            return _started(message.started)
        if kind == "delta":
            return Delta(message.delta.index, tuple(message.delta.token_ids), message.delta.text)
        if kind == "finished":
            self._finished = True
            return _finished(message.finished)
        return None

    def check_end(self) -> None:
        """To be called when the stream ended with OK. Raises IncompleteStreamError."""
        if not self._finished:
            raise IncompleteStreamError(f"request {self.request_id or '(not started)'}: the stream ended unfinished")


class CompletionBuilder:
    """Collects a stream's events into a Completion."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._end: Finished | None = None

    def add(self, event: Event) -> None:
        match event:
            case Started():
                self._started = event
            case Delta():
                self._token_ids.extend(event.token_ids)
                self._text.append(event.text)
            case Finished():
                self._end = event

    def build(self) -> Completion:
        """The completion. Raises IncompleteStreamError when Started or Finished never came."""
        if self._started is None or self._end is None:
            raise IncompleteStreamError("the stream lacked its Started or its Finished event")
        return Completion(
            request_id=self._started.request_id,
            seed=self._started.seed,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            reason=self._end.reason,
            matched_stop=self._end.matched_stop,
            usage=self._end.usage,
            timings=self._end.timings,
        )


def model_info(message: pb.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        model_uri=message.model_uri,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        dtype=message.dtype,
        eos_token_ids=tuple(message.eos_token_ids),
        has_chat_template=message.has_chat_template,
        num_parameters=message.num_parameters,
    )


def server_info(message: pb.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=message.version,
        name=message.name,
        ready=message.ready,
        world_size=message.world_size,
        epoch=message.epoch,
        uptime_s=message.uptime_s,
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
    )


def _is_chat(prompt: Prompt) -> bool:
    return bool(prompt) and isinstance(prompt[0], ChatMessage)


def _started(message: pb.Started) -> Started:
    return Started(message.request_id, message.prompt_tokens, message.seed)


def _finished(message: pb.Finished) -> Finished:
    stop = message.WhichOneof("matched_stop")
    usage, timings = message.usage, message.timings
    return Finished(
        index=message.index,
        reason=_reason(message),
        matched_stop=getattr(message, stop) if stop else None,
        usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
        timings=Timings(
            timings.queued.ToTimedelta().total_seconds(),
            timings.first_token.ToTimedelta().total_seconds(),
            timings.total.ToTimedelta().total_seconds(),
        ),
    )


def _reason(message: pb.Finished) -> FinishReason:
    reason = _REASONS.get(message.reason)
    if reason is None:
        raise ServerError(f"finish reason {message.reason} is unknown to this client; is it older than the gateway?")
    return reason


def _fill_sampling(message: pb.SamplingParams, sampling: SamplingParams) -> None:
    for name in _OPTIONAL_SAMPLING:
        value = getattr(sampling, name)
        if value is None:
            continue
        try:
            setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise _invalid(f"sampling.{name}", f"{value!r} is out of range or of a wrong type") from error
    _fill("sampling.stop", message.stop, sampling.stop)
    _fill("sampling.stop_token_ids", message.stop_token_ids, sampling.stop_token_ids)


def _fill(field: str, target: Any, values: Iterable[Any]) -> None:
    for index, value in enumerate(values):
        try:
            target.append(value)
        except (TypeError, ValueError) as error:
            raise _invalid(f"{field}[{index}]", f"{value!r} is out of range or of a wrong type") from error


def _invalid(field: str, description: str) -> InvalidRequestError:
    return InvalidRequestError("invalid request", violations=[FieldViolation(field, description)])

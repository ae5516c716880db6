"""Conversion between the client's dataclasses and protobuf: the one place that knows both.

`resuming.py` turns the messages of a Generate stream into events with `event_from`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from google.protobuf.message import Message

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import logprobs_pb2
from hetero_client.errors import FieldViolation, IncompleteStreamError, InvalidRequestError, ServerError
from hetero_client.messages import (
    ChatMessage,
    Choice,
    Completion,
    Constraint,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateOptions,
    Grammar,
    JsonSchema,
    ModelInfo,
    Prompt,
    PromptLogprobs,
    Regex,
    SamplingParams,
    ServerInfo,
    Started,
    Timings,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Made = TypeVar("_Made", bound="DataclassInstance")
_OPTIONAL_SAMPLING: Final = tuple(
    field.name
    for field in pb.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.name in SamplingParams.__dataclass_fields__
)
_REASONS: Final = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORT: FinishReason.ABORT,
}


def dataclass_from(kind: type[_Made], message: Message, **given: Any) -> _Made:
    """Return a dataclass with the values of the message's fields of the same names, repeated ones as tuples.

    `given` holds the fields that the message lacks, or has in another form.
    """
    names = [field.name for field in fields(kind) if field.name not in given]
    return kind(**{name: _plain(getattr(message, name)) for name in names}, **given)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value


def generate_request(
    prompt: Prompt, *, final_only: bool = False, **options: Unpack[GenerateOptions]
) -> pb.GenerateRequest:
    """Return the request as a message. Raises InvalidRequestError for a value that no message can hold."""
    request = pb.GenerateRequest(output_mode=pb.OUTPUT_MODE_FINAL_ONLY if final_only else pb.OUTPUT_MODE_DELTA)
    _set(request, "request_id", options.get("request_id", ""))
    _set(request, "cache_salt", options.get("cache_salt", ""))
    _set(request, "priority", options.get("priority", 0))
    _fill_prompt(request, prompt, options.get("tools", ()))
    sampling = options.get("sampling")
    if sampling is not None:
        _fill_sampling(request.sampling, sampling)
    return request


def tokenize_request(prompt: str | Iterable[ChatMessage]) -> pb.TokenizeRequest:
    """Return the request as a message. Raises InvalidRequestError."""
    if isinstance(prompt, str):
        request = pb.TokenizeRequest()
        _set(request, "text", prompt)
        return request
    return pb.TokenizeRequest(chat=chat_messages(prompt))


def detokenize_request(token_ids: Iterable[int]) -> pb.DetokenizeRequest:
    """Return the request as a message. Raises InvalidRequestError."""
    request = pb.DetokenizeRequest()
    _fill("token_ids", request.token_ids, token_ids)
    return request


def chat_messages(messages: Iterable[Any]) -> pb.ChatMessages:
    """Return a conversation as a message. Raises InvalidRequestError."""
    chat = pb.ChatMessages()
    for index, message in enumerate(messages):
        path = f"chat.messages[{index}]"
        if not isinstance(message, ChatMessage):
            raise _invalid(path, f"must be a ChatMessage, not {type(message).__name__}")
        added = chat.messages.add()
        for name in ("role", "content", "tool_call_id", "name", "reasoning"):
            _set(added, name, getattr(message, name) or "", path=f"{path}.{name}")
        _set(added, "tool_calls_json", _json(f"{path}.tool_calls", message.tool_calls), path=f"{path}.tool_calls")
    return chat


def event_from(message: pb.GenerateEvent) -> Event | None:
    """Return the event; None for a kind that this version does not know."""
    match message.WhichOneof("event"):
        case "started":
            return dataclass_from(Started, message.started)
        case "prompt_logprobs":
            return PromptLogprobs(tuple(map(_logprobs, message.prompt_logprobs.positions)))
        case "delta":
            delta = message.delta
            logprobs = tuple(map(_logprobs, delta.logprobs))
            return Delta(delta.index, tuple(delta.token_ids), delta.text, logprobs, delta.reasoning)
        case "finished":
            return _finished(message.finished)
        case _:
            return None


class CompletionsBuilder:
    """Completions under construction, from a stream's events."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._deltas: dict[int, list[Delta]] = {}
        self._ends: dict[int, Finished] = {}

    def add(self, event: Event) -> None:
        """Take the stream's next event."""
        match event:
            case Started():
                self._started = event
            case PromptLogprobs():
                self._prompt_logprobs += event.positions
            case Delta():
                self._deltas.setdefault(event.index, []).append(event)
            case Finished():
                self._ends[event.index] = event

    def build(self) -> tuple[Completion, ...]:
        """Return all completions, by index. Raises IncompleteStreamError without a Started or any Finished event."""
        if self._started is None or not self._ends:
            raise IncompleteStreamError("the stream lacked its Started or its Finished event")
        return tuple(self._completion(self._started, self._ends[index]) for index in sorted(self._ends))

    def _completion(self, started: Started, end: Finished) -> Completion:
        deltas = self._deltas.get(end.index, [])
        return Completion(
            request_id=started.request_id,
            seed=started.seed,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            reason=end.reason,
            matched_stop=end.matched_stop,
            usage=end.usage,
            timings=end.timings,
            index=end.index,
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            prompt_logprobs=self._prompt_logprobs,
            reasoning="".join(delta.reasoning for delta in deltas),
        )


def check_single(sampling: SamplingParams | None) -> None:
    """Raise InvalidRequestError when more than one completion is asked for."""
    if sampling is not None and (sampling.n or 1) > 1:
        raise _invalid("sampling.n", f"is {sampling.n}; this call returns one completion, generate_texts returns all")


def model_info(message: pb.GetModelInfoResponse) -> ModelInfo:
    """Return the answer as a dataclass."""
    return dataclass_from(ModelInfo, message)


def server_info(message: pb.GetServerInfoResponse) -> ServerInfo:
    """Return the answer as a dataclass."""
    return dataclass_from(ServerInfo, message)


def _is_chat(prompt: Prompt) -> bool:
    return bool(prompt) and isinstance(prompt[0], ChatMessage)


def _finished(message: pb.Finished) -> Finished:
    stop, timings = message.WhichOneof("matched_stop"), message.timings
    return Finished(
        index=message.index,
        reason=_reason(message),
        matched_stop=getattr(message, stop) if stop else None,
        usage=dataclass_from(Usage, message.usage),
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


def _logprobs(message: logprobs_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return TokenLogprobs(message.token_id, message.logprob, message.rank, top)


def _fill_prompt(request: pb.GenerateRequest, prompt: Prompt, tools: Sequence[Mapping[str, Any]]) -> None:
    if tools and not _is_chat(prompt):
        raise _invalid("tools", "need a chat prompt, whose template shows them to the model")
    if isinstance(prompt, str):
        _set(request, "text", prompt)
    elif _is_chat(prompt):
        request.chat.CopyFrom(chat_messages(prompt))
        _set(request.chat, "tools_json", _json("tools", tools), path="tools")
    else:
        request.token_ids.SetInParent()
        _fill("token_ids", request.token_ids.ids, prompt)


def _json(field: str, data: Sequence[Mapping[str, Any]]) -> str:
    """Return the data as a JSON array; "" for none."""
    if not data:
        return ""
    try:
        return json.dumps(list(data), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise _invalid(field, f"is no JSON: {error}") from error


def _fill_sampling(message: pb.SamplingParams, sampling: SamplingParams) -> None:
    for name in _OPTIONAL_SAMPLING:
        value = getattr(sampling, name)
        if value is not None:
            _set(message, name, value, path=f"sampling.{name}")
    _fill("sampling.stop", message.stop, sampling.stop)
    _fill("sampling.stop_token_ids", message.stop_token_ids, sampling.stop_token_ids)
    for token_id, bias in sampling.logit_bias.items():
        with _naming(f"sampling.logit_bias[{token_id}]", bias):
            message.logit_bias[token_id] = bias
    if sampling.constraint is not None:
        _fill_constraint(message, sampling.constraint)


def _fill_constraint(message: pb.SamplingParams, constraint: Constraint) -> None:
    match constraint:
        case JsonSchema(schema):
            text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
            _set(message, "json_schema", text, path="sampling.json_schema")
        case Regex(pattern):
            _set(message, "regex", pattern, path="sampling.regex")
        case Grammar(text):
            _set(message, "grammar", text, path="sampling.grammar")
        case Choice(texts):
            message.choice.SetInParent()
            _fill("sampling.choice", message.choice.texts, texts)


def _set(message: Any, name: str, value: Any, *, path: str = "") -> None:
    with _naming(path or name, value):
        setattr(message, name, value)


def _fill(field: str, target: Any, values: Iterable[Any]) -> None:
    for index, value in enumerate(values):
        with _naming(f"{field}[{index}]", value):
            target.append(value)


@contextmanager
def _naming(field: str, value: Any) -> Iterator[None]:
    """Raise InvalidRequestError, which names the field, for a value that its message cannot hold."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise _invalid(field, f"is no Unicode text: it has a lone surrogate at character {error.start}") from error
    except (TypeError, ValueError) as error:
        raise _invalid(field, f"{value!r} is out of range or of a wrong type") from error


def _invalid(field: str, description: str) -> InvalidRequestError:
    return InvalidRequestError("invalid request", violations=[FieldViolation(field, description)])

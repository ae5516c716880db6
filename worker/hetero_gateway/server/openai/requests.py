"""Bodies to requests: an OpenAI body becomes the GenerateRequest that says the same.

So bounds and defaults have one home, whichever door a request came through.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.server.errors import InvalidArguments, Violation
from hetero_gateway.server.openai.schema import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    Generation,
    Message,
    ResponseFormat,
    StructuredOutputs,
    Tool,
)
from hetero_gateway.server.sampling_params import ANY_OBJECT, SEED_SPACE

_OTHERWISE: Final = {"seed", "top_k", "max_tokens", "logprobs"}
"""Fields that mean something else here, or are named otherwise in one of the bodies."""
_AS_THEY_ARE: Final = tuple(
    field.name
    for field in pb.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.name in Generation.model_fields and field.name not in _OTHERWISE
)


def chat_requests(body: ChatBody, request_id: str) -> list[pb.GenerateRequest]:
    """Return the one request of a chat. Raises InvalidArguments, by the body's field, for values that do not fit."""
    request = _request(body, request_id=request_id)
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    request.chat.CopyFrom(chat_messages(body.messages, body.shown_tools, options))
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if max_tokens is not None:
        _set(request.sampling, "max_tokens", max_tokens)
    if body.logprobs:
        _set(request.sampling, "logprobs", body.top_logprobs or 0)
    return [request]


def chat_messages(
    messages: Sequence[Message], tools: Sequence[Tool] | None, options: Mapping[str, Any] | None
) -> pb.ChatMessages:
    """Return a conversation, with the tools and the options that the template sees."""
    return pb.ChatMessages(
        messages=map(_message, messages),
        tools_json=json.dumps([tool.model_dump(exclude_none=True) for tool in tools]) if tools else "",
        template_options_json=json.dumps(options) if options else "",
    )


def completion_requests(body: CompletionBody, request_id: str) -> list[pb.GenerateRequest]:
    """Return a request for each prompt; of several, ids end with the prompt's number. Raises InvalidArguments."""
    prompts = body.prompts
    ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{index}" for index in range(len(prompts))]
    return [_completion_request(body, prompt, each) for prompt, each in zip(prompts, ids, strict=True)]


def _completion_request(body: CompletionBody, prompt: str | list[int], request_id: str) -> pb.GenerateRequest:
    request = _request(body, request_id=request_id)
    set_prompt(request, prompt, field="prompt")
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    _set(request.sampling, "max_tokens", max_tokens)
    if body.logprobs is not None:
        _set(request.sampling, "logprobs", body.logprobs)
        if body.echo:
            _set(request.sampling, "prompt_logprobs", body.logprobs)
    return request


def set_prompt(request: pb.GenerateRequest, prompt: str | list[int], *, field: str) -> None:
    """Set a prompt, text or token ids. Raises InvalidArguments, which names `field`, for an id that no model has."""
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.SetInParent()
        _try(field, lambda: request.token_ids.ids.extend(prompt))


def _request(body: Generation, *, request_id: str) -> pb.GenerateRequest:
    request = pb.GenerateRequest(request_id=request_id, cache_salt=body.cache_salt)
    _set(request, "priority", body.priority)
    sampling = request.sampling
    sampling.SetInParent()
    for name in _AS_THEY_ARE:
        value = getattr(body, name)
        if value is not None:
            _set(sampling, name, value)
    if body.top_k is not None:
        _set(sampling, "top_k", max(body.top_k, 0) if body.top_k >= -1 else body.top_k)
    if body.seed is not None:
        sampling.seed = body.seed % SEED_SPACE
    sampling.stop.extend([body.stop] if isinstance(body.stop, str) else body.stop or ())
    _try("stop_token_ids", lambda: sampling.stop_token_ids.extend(body.stop_token_ids or ()))
    biases = (body.logit_bias or {}).items()
    # Keys of JSON are text.
    _try("logit_bias", lambda: sampling.logit_bias.update({int(token): bias for token, bias in biases}))
    if body.response_format is not None:
        _constrain_response(sampling, body.response_format)
    if body.structured_outputs is not None:
        _constrain(sampling, body.structured_outputs)
    return request


def _constrain_response(sampling: pb.SamplingParams, form: ResponseFormat) -> None:
    if form.type == "json_object":
        sampling.json_schema = ANY_OBJECT
    elif form.json_schema is not None:
        sampling.json_schema = json.dumps(form.json_schema.schema_)


def _constrain(sampling: pb.SamplingParams, form: StructuredOutputs) -> None:
    if form.json_ is not None:
        sampling.json_schema = form.json_ if isinstance(form.json_, str) else json.dumps(form.json_)
    elif form.regex is not None:
        sampling.regex = form.regex
    elif form.grammar is not None:
        sampling.grammar = form.grammar
    else:
        sampling.choice.SetInParent()
        sampling.choice.texts.extend(form.choice or ())


def _message(message: Message) -> pb.ChatMessage:
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    calls = [call.model_dump() for call in message.tool_calls or ()]
    return pb.ChatMessage(
        # The API's newer name of the same role; templates know the older one.
        role="system" if message.role == "developer" else message.role,
        content=content,
        tool_calls_json=json.dumps(calls) if calls else "",
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        reasoning=message.reasoning_content or "",
    )


def _set(message: Any, name: str, value: Any) -> None:
    _try(name, lambda: setattr(message, name, value))


def _try(name: str, assign: Callable[[], object]) -> None:
    """Call `assign`; raise InvalidArguments when protobuf's types cannot hold the value, e.g. a negative count."""
    try:
        assign()
    except (ValueError, TypeError) as error:
        raise InvalidArguments([Violation(name, str(error))]) from error


_FIELD_NAMES: Final[Mapping[str, str]] = {
    "chat": "messages",
    "token_ids": "prompt",
    "text": "prompt",
    "template_options_json": "chat_template_kwargs",
    "name": "lora_name",
    "directory": "lora_path",
}


def body_field(path: str) -> str:
    """Return the body's field for a path in a GenerateRequest: "top_p" for "sampling.top_p"."""
    for prefix in ("sampling.", "chat."):
        path = path.removeprefix(prefix)
    head, *_ = path.split(".", 1)
    return _FIELD_NAMES.get(head, path)

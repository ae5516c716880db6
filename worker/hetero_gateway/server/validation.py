"""What a call's message must fulfil, by the comments of inference.proto; and the defaults that they state.

Every violation is found before anything is done, so a client learns of all of them at once. What only the engine
knows (the model's length, the size of the KV cache) the engine checks.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Final

from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.engine.request import SamplingConfig
from hetero_gateway.server.errors import InvalidArguments, Violation

MAX_REQUEST_ID_CHARS: Final = 128
MAX_STOP_STRINGS: Final = 16
MAX_STOP_TOKEN_IDS: Final = 64
MAX_TEMPERATURE: Final = 100
ROLES: Final = ("system", "user", "assistant")
SEED_BITS: Final = 63
_SHOWN_CHARS: Final = 40
_SHOWN_VIOLATIONS: Final = 8


def check_generate(request: pb.GenerateRequest, *, vocab_size: int) -> None:
    """Raise InvalidArguments unless every field is within its bounds."""
    _raise_if_any(
        [
            *_request_id(request.request_id),
            *_prompt(request, vocab_size=vocab_size),
            *_sampling(request.sampling, vocab_size=vocab_size),
            *_output_mode(request.output_mode),
        ]
    )


def check_tokenize(request: pb.TokenizeRequest) -> None:
    """Raise InvalidArguments unless there is exactly one well-formed input. Empty text is one."""
    kind = request.WhichOneof("input")
    if kind is None:
        _raise_if_any([Violation("input", "is missing; set text or chat")])
    if kind == "chat":
        _raise_if_any(_chat(request.chat))


def check_detokenize(request: pb.DetokenizeRequest, *, vocab_size: int) -> None:
    """Raise InvalidArguments unless every id is one of the vocabulary."""
    _raise_if_any(_token_ids("token_ids", request.token_ids, vocab_size=vocab_size))


def check_abort(request: pb.AbortRequest) -> None:
    """Raise InvalidArguments unless a request is named."""
    if not request.request_id:
        _raise_if_any([Violation("request_id", "is empty; Started tells a request's id")])
    _raise_if_any([*_request_id(request.request_id)])


def sampling_config(params: pb.SamplingParams) -> SamplingConfig:
    """The parameters with every default filled in; the seed is drawn when there is none."""
    return SamplingConfig(
        seed=params.seed if params.HasField("seed") else secrets.randbits(SEED_BITS),
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        min_p=params.min_p,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        stop=tuple(params.stop),
        stop_token_ids=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
    )


def _raise_if_any(violations: Sequence[Violation]) -> None:
    if violations:
        raise InvalidArguments(violations[:_SHOWN_VIOLATIONS])


def _request_id(request_id: str) -> Iterable[Violation]:
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        yield Violation("request_id", f"must have at most {MAX_REQUEST_ID_CHARS} characters, not {len(request_id)}")


def _prompt(request: pb.GenerateRequest, *, vocab_size: int) -> Iterable[Violation]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        yield Violation("prompt", "is missing; set text, token_ids or chat")
    elif kind == "text" and not request.text:
        yield Violation("text", "is empty; a prompt needs at least one character")
    elif kind == "token_ids":
        if not request.token_ids.ids:
            yield Violation("token_ids.ids", "is empty; a prompt needs at least one token")
        yield from _token_ids("token_ids.ids", request.token_ids.ids, vocab_size=vocab_size)
    elif kind == "chat":
        yield from _chat(request.chat)


def _chat(chat: pb.ChatMessages) -> list[Violation]:
    if not chat.messages:
        return [Violation("chat.messages", "is empty; a conversation needs at least one message")]
    return [
        Violation(f"chat.messages[{index}].role", f"must be one of {', '.join(ROLES)}, not {_shown(message.role)}")
        for index, message in enumerate(chat.messages)
        if message.role not in ROLES
    ]


def _sampling(params: pb.SamplingParams, *, vocab_size: int) -> Iterable[Violation]:
    # Written so that NaN, which compares with nothing, is refused.
    if not 0 <= params.temperature <= MAX_TEMPERATURE:
        yield Violation("sampling.temperature", f"must be between 0 and {MAX_TEMPERATURE}, not {params.temperature:g}")
    if params.HasField("top_p") and not 0 < params.top_p <= 1:
        yield Violation("sampling.top_p", f"must be more than 0 and at most 1, not {params.top_p:g}")
    if not 0 <= params.min_p <= 1:
        yield Violation("sampling.min_p", f"must be between 0 and 1, not {params.min_p:g}")
    if params.HasField("max_tokens") and params.max_tokens < 1:
        yield Violation("sampling.max_tokens", f"must be at least 1, not {params.max_tokens}")
    yield from _stops(params, vocab_size=vocab_size)


def _stops(params: pb.SamplingParams, *, vocab_size: int) -> Iterable[Violation]:
    if len(params.stop) > MAX_STOP_STRINGS:
        yield Violation("sampling.stop", f"must hold at most {MAX_STOP_STRINGS} strings, not {len(params.stop)}")
    for index, text in enumerate(params.stop):
        if not text:
            yield Violation(f"sampling.stop[{index}]", "is empty; every text would end at once")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        number = len(params.stop_token_ids)
        yield Violation("sampling.stop_token_ids", f"must hold at most {MAX_STOP_TOKEN_IDS} ids, not {number}")
    yield from _token_ids("sampling.stop_token_ids", params.stop_token_ids, vocab_size=vocab_size)


def _token_ids(field: str, ids: Sequence[int], *, vocab_size: int) -> list[Violation]:
    # Ids are unsigned; the common case is one pass in C.
    if not ids or max(ids) < vocab_size:
        return []
    index = next(i for i, token_id in enumerate(ids) if token_id >= vocab_size)
    return [Violation(f"{field}[{index}]", f"must be in the vocabulary [0, {vocab_size}), not {ids[index]}")]


def _output_mode(mode: pb.OutputMode.ValueType) -> Iterable[Violation]:
    if mode not in pb.OutputMode.values():
        yield Violation("output_mode", f"must be OUTPUT_MODE_DELTA or OUTPUT_MODE_FINAL_ONLY, not {mode}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")

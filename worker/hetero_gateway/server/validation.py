"""Bounds of the messages that clients send: of their encoding, and of their fields.

Protobuf turns a message of 8 MiB into hundreds of megabytes of objects when it holds millions of tiny parts, and holds
the interpreter while it does so. `parse` therefore walks over the encoded message first, which allocates nothing, and
refuses one with too many parts. (Encoding: https://protobuf.dev/programming-guides/encoding.)

Fields have the bounds that the comments of inference.proto state. Violations are found before any other work, so a
client learns of several at once. They are generated lazily and the search stops at MAX_VIOLATIONS: a message with many
wrong fields costs no more than one with eight. Bounds that only the engine knows (the model's length, the size of the
KV cache) are checked by the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from itertools import chain, islice
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.engine.config import check_prompt_length
from hetero_gateway.server.errors import InvalidArguments, Violation
from hetero_gateway.server.sampling_params import num_completions, sampling_violations, token_id_violations

MAX_REQUEST_ID_CHARS: Final = 128
MAX_CACHE_SALT_CHARS: Final = 1024
MAX_MESSAGES: Final = 4096
MAX_PRIORITY: Final = 100
ROLES: Final = ("system", "user", "assistant", "tool")
MAX_TOOLS_CHARS: Final = 1 << 20
"""Longest JSON text of tools, or of one message's tool calls."""
MAX_TOOLS_DEPTH: Final = 64
MAX_VIOLATIONS: Final = 8
"""Violations reported for one message; the search ends with the last of them."""
_SHOWN_CHARS: Final = 40


def check_generate(request: pb.GenerateRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Raise InvalidArguments unless every field is within its bounds."""
    # Prompts longer than the model are refused before anybody looks at each token.
    check_prompt_length(len(request.token_ids.ids), max_model_len=max_model_len)
    _raise_if_any(
        chain(
            _own_fields(request),
            _prompt(request, vocab_size=vocab_size),
            sampling_violations(request.sampling, vocab_size=vocab_size),
            _received(request, vocab_size=vocab_size, max_model_len=max_model_len),
        )
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
    _raise_if_any(token_id_violations("token_ids", request.token_ids, vocab_size=vocab_size))


def check_abort(request: pb.AbortRequest) -> None:
    """Raise InvalidArguments unless a request is named."""
    if not request.request_id:
        _raise_if_any([Violation("request_id", "is empty; Started tells a request's id")])
    _raise_if_any(_request_id(request.request_id))


def _raise_if_any(violations: Iterable[Violation]) -> None:
    found = list(islice(violations, MAX_VIOLATIONS))
    if found:
        raise InvalidArguments(found)


def _request_id(request_id: str) -> Iterable[Violation]:
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        yield Violation("request_id", f"must have at most {MAX_REQUEST_ID_CHARS} characters, not {len(request_id)}")
    elif not (request_id.isascii() and request_id.isprintable()):
        # Ids travel in HTTP headers and stand in logs.
        yield Violation("request_id", f"must be printable ASCII, not {_shown(request_id)}")


def _own_fields(request: pb.GenerateRequest) -> Iterable[Violation]:
    """Yield what is wrong with the fields of a request that are not messages."""
    yield from _request_id(request.request_id)
    number = len(request.cache_salt)
    if number > MAX_CACHE_SALT_CHARS:
        yield Violation("cache_salt", f"must have at most {MAX_CACHE_SALT_CHARS} characters, not {number}")
    if request.output_mode not in pb.OutputMode.values():
        yield Violation(
            "output_mode", f"must be OUTPUT_MODE_DELTA or OUTPUT_MODE_FINAL_ONLY, not {request.output_mode}"
        )
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        yield Violation("priority", f"must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, not {request.priority}")


def _prompt(request: pb.GenerateRequest, *, vocab_size: int) -> Iterable[Violation]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        yield Violation("prompt", "is missing; set text, token_ids or chat")
    elif kind == "text" and not request.text:
        yield Violation("text", "is empty; a prompt needs at least one character")
    elif kind == "token_ids":
        if not request.token_ids.ids:
            yield Violation("token_ids.ids", "is empty; a prompt needs at least one token")
        yield from token_id_violations("token_ids.ids", request.token_ids.ids, vocab_size=vocab_size)
    elif kind == "chat":
        yield from _chat(request.chat)


def _chat(chat: pb.ChatMessages) -> Iterable[Violation]:
    if len(chat.messages) > MAX_MESSAGES:
        yield Violation("chat.messages", f"must hold at most {MAX_MESSAGES} messages, not {len(chat.messages)}")
        return
    if not chat.messages:
        yield Violation("chat.messages", "is empty; a conversation needs at least one message")
    for index, message in enumerate(chat.messages):
        field = f"chat.messages[{index}]"
        if message.role not in ROLES:
            yield Violation(f"{field}.role", f"must be one of {', '.join(ROLES)}, not {_shown(message.role)}")
        if message.tool_calls_json:
            yield from _json_objects(f"{field}.tool_calls_json", message.tool_calls_json)
            if message.role != "assistant":
                yield Violation(f"{field}.tool_calls_json", "can be set in a message of the assistant only")
        if message.tool_call_id and message.role != "tool":
            yield Violation(f"{field}.tool_call_id", "can be set in a tool's message only")
        if message.reasoning and message.role != "assistant":
            yield Violation(f"{field}.reasoning", "can be set in a message of the assistant only")
    if chat.tools_json:
        yield from _json_objects("chat.tools_json", chat.tools_json)
    if chat.template_options_json:
        yield from _json_object("chat.template_options_json", chat.template_options_json)


def _json_objects(field: str, text: str) -> Iterable[Violation]:
    """Yield a violation unless `text` is a JSON array of objects, neither too long nor too deep."""
    value, problem = _json(field, text)
    if problem is not None:
        yield problem
    elif not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        yield Violation(field, f"must be a JSON array of objects, not {_shown(text)}")


def _json_object(field: str, text: str) -> Iterable[Violation]:
    """Yield a violation unless `text` is a JSON object, neither too long nor too deep."""
    value, problem = _json(field, text)
    if problem is not None:
        yield problem
    elif not isinstance(value, dict):
        yield Violation(field, f"must be a JSON object, not {_shown(text)}")


def _json(field: str, text: str) -> tuple[Any, Violation | None]:
    """Return the value of JSON text, or what is wrong with the text: no JSON, too long or too deep."""
    too_deep = Violation(field, f"must be nested at most {MAX_TOOLS_DEPTH} levels deep")
    if len(text) > MAX_TOOLS_CHARS:
        return None, Violation(field, f"must have at most {MAX_TOOLS_CHARS} characters, not {len(text)}")
    try:
        value: Any = json.loads(text)
    except RecursionError:
        return None, too_deep
    except ValueError as error:
        return None, Violation(field, f"is no JSON: {error}")
    return value, too_deep if _is_deeper(value, MAX_TOOLS_DEPTH) else None


def _is_deeper(value: Any, limit: int) -> bool:
    """Return whether objects and lists are nested more than `limit` levels deep, the outermost counted."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _received(request: pb.GenerateRequest, *, vocab_size: int, max_model_len: int) -> Iterable[Violation]:
    if not request.received:
        return
    number = num_completions(request.sampling)
    if len(request.received) > number:
        yield Violation("received", f"must hold at most {number} completions (sampling.n), not {len(request.received)}")
    if not request.request_id:
        yield Violation("request_id", "must be that of the stream which is taken up, as Started reported it")
    is_greedy = request.sampling.HasField("temperature") and request.sampling.temperature == 0
    if not is_greedy and not request.sampling.HasField("seed"):
        yield Violation("sampling.seed", "must be that of the stream which is taken up, as Started reported it")
    for index, received in enumerate(request.received):
        field = f"received[{index}].token_ids"
        if len(received.token_ids) > max_model_len:
            yield Violation(field, f"has {len(received.token_ids)} tokens, the model's length is {max_model_len}")
            continue
        yield from token_id_violations(field, received.token_ids, vocab_size=vocab_size)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")


MAX_FIELDS: Final = 100_000
"""Fields of a message, those of the messages in it included."""
MAX_PACKED_BYTES: Final = 2 * 1024 * 1024
"""Encoded bytes of one list of numbers."""
_VARINT: Final = 0
_LENGTH: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
"""Wire types: a number, bytes with their length before them, and numbers of so many bytes."""
_MAX_VARINT_BYTES: Final = 10

M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes) -> M:
    """Return the message that `data` encodes. Raises InvalidArguments if it is malformed or has too many parts."""
    try:
        _Walk(data).message(kind.DESCRIPTOR, 0, len(data))
        return kind.FromString(data)
    except (DecodeError, IndexError) as error:
        problem = f"is no {kind.DESCRIPTOR.name} in protobuf's encoding"
        raise InvalidArguments([Violation("request", problem)]) from error


class _Walk:
    """A walk over one encoded message, with the number of fields met so far. IndexError: the message is cut short."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_fields = 0

    def message(self, descriptor: Any, at: int, end: int) -> None:
        """Walk over the fields in [at, end) of a message of this type."""
        nested, packed = _parts(descriptor)
        while at < end:
            key, at = self._varint(at)
            self._count()
            if key & 7 == _LENGTH:
                length, at = self._varint(at)
                if at + length > end:
                    raise IndexError
                self._delimited(key >> 3, nested, packed, at, at + length)
                at += length
            else:
                at = self._skip(key & 7, at)

    def _delimited(self, number: int, nested: dict[int, Any], packed: dict[int, str], at: int, end: int) -> None:
        if number in nested:
            self.message(nested[number], at, end)
        elif number in packed and end - at > MAX_PACKED_BYTES:
            problem = f"must have at most {MAX_PACKED_BYTES} bytes in protobuf's encoding, not {end - at}"
            raise InvalidArguments([Violation(packed[number], problem)])

    def _count(self) -> None:
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            raise InvalidArguments([Violation("request", f"has too many parts; at most {MAX_FIELDS} are allowed")])

    def _skip(self, wire_type: int, at: int) -> int:
        if wire_type == _VARINT:
            return self._varint(at)[1]
        if wire_type in _FIXED_BYTES:
            return at + _FIXED_BYTES[wire_type]
        raise IndexError

    def _varint(self, at: int) -> tuple[int, int]:
        """Return a number and where it ends."""
        value = shift = 0
        for byte in self._data[at : at + _MAX_VARINT_BYTES]:
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, at
            shift += 7
        raise IndexError


@cache
def _parts(descriptor: Any) -> tuple[dict[int, Any], dict[int, str]]:
    """Return the types of fields that are messages, and the names of those that are lists of numbers, by number."""
    nested = {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}
    packed = {field.number: field.name for field in descriptor.fields if field.is_packed}
    return nested, packed

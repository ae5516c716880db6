"""What a user of the client gives and gets: frozen dataclasses, no protobuf.

The meaning of every field is that of the message of the same name in `hetero_api/v1/inference.proto`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. None takes the server's default, which the field's comment names."""

    temperature: float | None = None  # 1; 0 is greedy
    top_k: int | None = None  # 0: all
    top_p: float | None = None  # 1
    min_p: float | None = None  # 0
    seed: int | None = None  # drawn by the server
    max_tokens: int | None = None  # as many as the model's length allows
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None  # False


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request's arrival at the gateway."""

    queued_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted. First, once."""

    request_id: str
    prompt_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens; `text` may be empty while a character is incomplete."""

    index: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The end; nothing follows. `matched_stop`: the stop string or the token id that ended it, if one did."""

    index: int
    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole stream in one piece."""

    request_id: str
    seed: int
    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that is served. `max_model_len` counts prompt plus completion tokens."""

    model_uri: str
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    num_parameters: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server, and how it stands now."""

    version: str
    name: str
    ready: bool
    world_size: int
    epoch: int
    uptime_s: float
    running_requests: int
    waiting_requests: int

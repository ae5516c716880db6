"""What a user of the client gives and gets: frozen dataclasses, no protobuf.

The meaning of every field is that of the message of the same name in `hetero_api/v1/inference.proto`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypedDict


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation; `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """An assistant's calls, as the OpenAI API has them."""
    tool_call_id: str = ""
    """In a "tool" message, the call that it answers."""
    name: str = ""


Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The completion is JSON of this schema, given as data or as JSON text; `{}` is any JSON."""

    schema: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole completion matches the expression (Rust's syntax, without look-around)."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """The completion is a word of a context-free grammar in Lark's notation."""

    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The completion is one of these texts."""

    texts: tuple[str, ...]


Constraint = JsonSchema | Regex | Grammar | Choice
"""What binds a completion to a form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. None takes the server's default, which the field's comment names."""

    temperature: float | None = None  # 1; 0 is greedy
    top_k: int | None = None  # 0: all
    top_p: float | None = None  # 1
    min_p: float | None = None  # 0
    seed: int | None = None  # drawn by the client
    max_tokens: int | None = None  # as many as the model's length allows
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None  # False
    presence_penalty: float | None = None  # 0
    frequency_penalty: float | None = None  # 0
    repetition_penalty: float | None = None  # 1
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to these tokens' logits
    min_tokens: int | None = None  # 0
    n: int | None = None  # 1; completions of the prompt
    logprobs: int | None = None  # none; likeliest tokens told with each token
    prompt_logprobs: int | None = None  # none; the same for the prompt's
    constraint: Constraint | None = None  # none


class GenerateOptions(TypedDict, total=False):
    """What a request may say beside its prompt; all of it may be left out."""

    sampling: SamplingParams | None
    request_id: str
    """Names the request; drawn by the client if it is not given."""
    timeout_s: float | None
    """The request's deadline, resumed streams included; None, the default, means none."""
    cache_salt: str
    """Separates the prefix cache from that of requests with another salt."""
    priority: int
    """Lower goes first; default 0."""
    tools: Sequence[Mapping[str, Any]]
    """Shown to the model by a chat's template, as the OpenAI API has them."""
    resume_timeout_s: float
    """How long a stream that broke is taken up again and again without getting on, 10 seconds at most for one that has
    not begun; 0: not at all. Default 60."""


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
    """The request was accepted. First, once, however often the stream is resumed."""

    request_id: str
    prompt_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position, by the model's own distribution: natural logarithms, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    rank: int
    """The token's place among all, 1 for the likeliest."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and their log-probabilities, best first."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of each token of the prompt but the first. Once, before the first Delta, if asked for."""

    positions: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens; `text` may be empty while a character is incomplete. `logprobs`: one a token, if asked for."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A completion's end; that of the last one ends the stream.

    `matched_stop`: the stop string or the token id that ended it, if one did.
    """

    index: int
    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings


Event = Started | PromptLogprobs | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion in one piece. `seed` is the request's."""

    request_id: str
    seed: int
    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


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
    source: str = ""
    """Origin of weights that were changed on their way; "" for weights as `model_uri` names them."""


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

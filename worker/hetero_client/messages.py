"""Arguments and results of the client: frozen dataclasses, no protobuf.

Fields mean what they mean in the message of the same name in `hetero_api/v1/inference.proto`.
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
    """Calls of an assistant, in the OpenAI API's format."""
    tool_call_id: str = ""
    """Call that a "tool" message answers."""
    name: str = ""
    reasoning: str = ""
    """Thoughts of an assistant before its text or calls."""


Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """Constraint: JSON of this schema, given as data or as JSON text; `{}` allows any JSON."""

    schema: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Regex:
    """Constraint: text that the expression matches as a whole (Rust's syntax, without look-around)."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """Constraint: a word of a context-free grammar in Lark's notation."""

    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Constraint: one of these texts."""

    texts: tuple[str, ...]


Constraint = JsonSchema | Regex | Grammar | Choice
"""Form that a completion must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling. None takes the server's default, which the field's comment names."""

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
    logprobs: int | None = None  # none; number of likeliest tokens reported with each token
    prompt_logprobs: int | None = None  # none; as logprobs, for the prompt's tokens
    constraint: Constraint | None = None  # none


class GenerateOptions(TypedDict, total=False):
    """Optional parameters of a request, beside its prompt."""

    sampling: SamplingParams | None
    request_id: str
    """Id of the request; drawn by the client if it is not given."""
    timeout_s: float | None
    """Limit of the request, resumed streams included; None, the default, means none."""
    cache_salt: str
    """Salt of the prefix cache: requests with different salts share nothing."""
    priority: int
    """Priority; lower goes first. Default 0."""
    tools: Sequence[Mapping[str, Any]]
    """Tools that a chat's template shows to the model, in the OpenAI API's format."""
    resume_timeout_s: float
    """Longest time to resume a broken stream without progress, at most 10 seconds for one that has not begun while the
    client has never heard from its server. 0: never resume. Default 60."""


class FinishReason(StrEnum):
    """Reason for the end of a completion."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class CacheLayout(StrEnum):
    """Layouts of KV blocks, as admin.proto defines them."""

    PAGED = "paged"
    CONTIGUOUS = "contiguous"


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
    """First event: the request was accepted. Comes once, also in a resumed stream."""

    request_id: str
    prompt_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: natural logarithms, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    rank: int
    """Rank of the token among all, 1 for the likeliest."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and their log-probabilities, best first."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens but the first, if asked for, before the first Delta.

    Those of a long prompt may come in several events, in order.
    """

    positions: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens. `text` may be empty while a character is incomplete; `logprobs` has one entry per token, or none."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    """Thoughts of a model that keeps them apart from its text."""


@dataclass(frozen=True, slots=True)
class Finished:
    """End of a completion; the last one ends the stream.

    `matched_stop` is the stop string or token id that ended it, if one did.
    """

    index: int
    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings


Event = Started | PromptLogprobs | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole completion. `seed` is the request's."""

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
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the served model. `max_model_len` counts prompt plus completion tokens."""

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
    """State of the server."""

    version: str
    name: str
    ready: bool
    world_size: int
    epoch: int
    uptime_s: float
    running_requests: int
    waiting_requests: int

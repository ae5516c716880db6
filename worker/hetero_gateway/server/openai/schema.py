"""Bodies of the API's calls: the fields that are served, and their types.

Bounds are not checked here: a body becomes a hetero.v1.GenerateRequest, which has them (`requests.py`). Unknown fields
are refused: to drop one silently would answer another question. Fields that only account for a request (`user`,
`store`, ...) are accepted and ignored.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from hetero_gateway.server.errors import InvalidArguments, Violation

MAX_UNKNOWN: Final = 8
"""Unknown fields that are named when a body is refused."""
MAX_PROMPTS: Final = 64
"""Prompts in one completions call; each is a request of its own."""
DEFAULT_COMPLETION_TOKENS: Final = 16
"""The API's own default of /v1/completions; chats go on to the model's length."""

MAX_OBJECTS: Final = 32_768
MAX_PARTS: Final = 524_288
"""Values of a body, e.g. token ids of its prompts; and its texts."""
MAX_ENTRIES: Final = 1024
"""Entries of a map from text, before anybody looks at each of them."""
T = TypeVar("T")


def _few(data: Any) -> Any:
    if isinstance(data, dict) and len(data) > MAX_ENTRIES:
        raise ValueError(f"must have at most {MAX_ENTRIES} entries, not {len(data)}")
    return data


Listed = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong element is reported, and no other."""
Mapped = Annotated[dict[str, T], BeforeValidator(_few)]
"""A map from text that is not too large."""


class Body(BaseModel):
    """Strict: "1" is no number, and unknown fields are refused. Null is as good as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _shortened(cls, data: Any) -> Any:
        """Leave out nulls, and all but the first unknown fields: an error is made for each of them."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = islice((key for key, value in data.items() if value is not None and key not in known), MAX_UNKNOWN)
        shown = known.union(unknown)
        return {key: value for key, value in data.items() if value is not None and key in shown}


B = TypeVar("B", bound=Body)


def parse_body(kind: type[B], data: bytes) -> B:
    """Return the body that JSON text `data` holds.

    Raises InvalidArguments if it has too many parts, ValidationError if it is not as `kind` says.
    """
    _check_parts(data)
    return kind.model_validate_json(data, strict=True)


def _check_parts(data: bytes) -> None:
    """Count the parts of JSON text without parsing it: many tiny ones would take long and much memory."""
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 2 * MAX_PARTS:
        raise _too_many(MAX_PARTS, "texts")
    outside_texts = b"".join(unescaped.split(b'"')[::2])
    if outside_texts.count(b"{") > MAX_OBJECTS:
        raise _too_many(MAX_OBJECTS, "objects")
    if outside_texts.count(b",") + outside_texts.count(b"[") > MAX_PARTS:
        raise _too_many(MAX_PARTS, "values")


def _too_many(limit: int, parts: str) -> InvalidArguments:
    return InvalidArguments([Violation("body", f"has too many {parts}; at most {limit} are allowed")])


class StreamOptions(Body):
    """Options of a stream beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Usage so far in every chunk."""


class JsonSchema(Body):
    """A schema with a name."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")] = True
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        return self


class StructuredOutputs(Body):
    """Other forms, one of them; vLLM's field."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Listed[str] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _just_one(self) -> StructuredOutputs:
        if sum(form is not None for form in (self.json_, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("exactly one of json, regex, choice and grammar is needed")
        return self


class Generation(Body):
    """Fields of both calls."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1 means all, as 0 does."""
    min_p: float | None = None
    n: int | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    ignore_eos: bool = False
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapped[float] | None = None
    logprobs: bool | int | None = None
    """A flag of chats, a number of completions."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str = ""
    priority: int = 0
    request_id: str | None = None
    user: str | None = None
    store: bool | None = None
    metadata: Mapped[str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Generation:
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("response_format and structured_outputs exclude one another")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true, and only with it")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities come with the answer's tokens."""
        return self.logprobs is not None and self.logprobs is not False

    @property
    def wants_echo(self) -> bool:
        """Whether the prompt is part of the answer."""
        return False


class TextPart(Body):
    """A piece of a message; other kinds (images, audio) are no text."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """A call that the model made."""

    name: str
    arguments: str


class ToolCall(Body):
    """One of an assistant's calls."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message of a chat. The template of the model decides which roles it knows."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Listed[TextPart] | None = None
    name: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    """An assistant's reasoning, as an answer had it."""


class Function(Body):
    """A function that a tool offers."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool, which the template shows to the model."""

    type: Literal["function"]
    function: Function


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[Listed[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    """The API's newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Listed[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    """The model's text is answered as it is: nothing is parsed, nothing is forced."""
    parallel_tool_calls: bool | None = None
    add_generation_prompt: Literal[True] = True

    @model_validator(mode="after")
    def _fits(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true, and only with it")
        return self


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _fits(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must equal n: completions are not drawn to be thrown away")
        if not self.prompts:
            raise ValueError("prompt must not be an empty list")
        if len(self.prompts) > MAX_PROMPTS:
            raise ValueError(f"prompt holds {len(self.prompts)} prompts, at most {MAX_PROMPTS} are allowed")
        return self

    @property
    def wants_echo(self) -> bool:
        """See `Generation.wants_echo`."""
        return self.echo

    @property
    def prompts(self) -> tuple[str | list[int], ...]:
        """Return each prompt by itself, text or token ids."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        tokens = [item for item in self.prompt if isinstance(item, int)]
        return (tokens,) if tokens else tuple(item for item in self.prompt if not isinstance(item, int))

"""Bodies of the API's calls: the fields that are served, and their types.

Bounds are not checked here: a body becomes a hetero.v1.GenerateRequest, which has them (`requests.py`). Unknown fields
are left out and named to the client, since clients send what other servers know; where fields are strict they are
refused. Fields of the API that mean nothing here are left out and named in either case.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from hetero_gateway.server.errors import InvalidArguments, Violation

MAX_UNKNOWN: Final = 8
"""Unknown fields that are named when a body is refused."""
MAX_IGNORED: Final = 16
"""Fields that are named in an answer's header."""
MAX_NAME_CHARS: Final = 64
MEANINGLESS: Final = frozenset(
    ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Fields of the API that account for a request, and change no answer."""
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


class IgnoredFields:
    """Fields of a body that are left out. `is_strict`: those that the API does not know are refused instead."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self._names: dict[str, None] = {}

    def add(self, path: str, name: str) -> None:
        """Note a field of the object at `path`. Beyond MAX_IGNORED they are not noted."""
        if len(self._names) < MAX_IGNORED:
            self._names[path + quote(name[:MAX_NAME_CHARS], safe="")] = None

    def header(self) -> str:
        """Return the names, as a header can hold them; empty if there are none."""
        return ", ".join(self._names)


class Body(BaseModel):
    """Strict: "1" is no number. Null is as good as absent. Unknown fields are noted in the validation's context, an
    IgnoredFields; without one they are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    path: ClassVar[str] = ""
    """Path of such an object in a body."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any, info: ValidationInfo) -> Any:
        """Leave out nulls and unknown fields; of those that are to be refused, leave the first."""
        if not isinstance(data, dict):
            return data
        ignored = info.context if isinstance(info.context, IgnoredFields) else IgnoredFields(is_strict=True)
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [key for key, value in data.items() if value is not None and key not in known]
        meaningless = MEANINGLESS if not cls.path else frozenset[str]()
        refused = [key for key in unknown if key not in meaningless] if ignored.is_strict else []
        for key in unknown:
            if key in meaningless or not ignored.is_strict:
                ignored.add(cls.path, key)
        shown = known.union(refused[:MAX_UNKNOWN])
        return {key: value for key, value in data.items() if value is not None and key in shown}


B = TypeVar("B", bound=Body)


def parse_body(kind: type[B], data: bytes, ignored: IgnoredFields) -> B:
    """Return the body that JSON text `data` holds; fields that are left out are noted in `ignored`.

    Raises InvalidArguments if it has too many parts, ValidationError if it is not as `kind` says.
    """
    _check_parts(data)
    return kind.model_validate_json(data, strict=True, context=ignored)


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

    path = "stream_options."

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Usage so far in every chunk."""


class JsonSchema(Body):
    """A schema with a name."""

    path = "response_format.json_schema."

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")] = True
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer."""

    path = "response_format."

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        return self


class StructuredOutputs(Body):
    """Other forms, one of them; vLLM's field."""

    path = "structured_outputs."

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

    path = "messages.content."

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """A call that the model made."""

    path = "messages.tool_calls.function."

    name: str
    arguments: str


class ToolCall(Body):
    """One of an assistant's calls."""

    path = "messages.tool_calls."

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message of a chat. The template of the model decides which roles it knows."""

    path = "messages."

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

    path = "tools.function."

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool, which the template shows to the model."""

    path = "tools."

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The function that must be called."""

    path = "tool_choice.function."

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    path = "tool_choice."

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """The tools that may be called, of those that are offered."""

    path = "tool_choice.allowed_tools."

    mode: Literal["auto", "required"]
    tools: Listed[NamedTool]


class AllowedChoice(Body):
    """A choice among some of the tools."""

    path = "tool_choice."

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[Listed[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    """The API's newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Listed[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """A variable of templates that know it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's template; vLLM's field."""
    add_generation_prompt: Literal[True] = True

    @model_validator(mode="before")
    @classmethod
    def _functions(cls, data: Any, info: ValidationInfo) -> Any:
        """Leave out tools that are no functions, e.g. a search that only one server has."""
        tools = data.get("tools") if isinstance(data, dict) else None
        if not isinstance(tools, list) or not isinstance(info.context, IgnoredFields) or info.context.is_strict:
            return data
        kinds = [each.get("type") if isinstance(each, dict) else None for each in tools]
        kinds = [kind if isinstance(kind, str) else None for kind in kinds]
        others = {kind for kind in kinds if kind is not None and kind != "function"}
        for kind in islice(sorted(others), MAX_IGNORED):
            info.context.add("tools.type=", kind)
        return {**data, "tools": [tool for tool, kind in zip(tools, kinds, strict=True) if kind not in others]}

    @model_validator(mode="after")
    def _fits(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true, and only with it")
        if self.forces_calls and (self.response_format is not None or self.structured_outputs is not None):
            raise ValueError("tool_choice forces a call, which excludes response_format and structured_outputs")
        if self.forces_calls and not self.callable_tools:
            raise ValueError("tool_choice forces a call of a tool that is not among tools")
        if isinstance(self.tool_choice, AllowedChoice):
            names = {tool.function.name for tool in self.tools or ()}
            for tool in self.tool_choice.allowed_tools.tools:
                if tool.function.name not in names:
                    raise ValueError(f"tool_choice allows {tool.function.name!r:.80}, which is not among tools")
        return self

    @property
    def forces_calls(self) -> bool:
        """Whether the answer must call a tool."""
        if isinstance(self.tool_choice, AllowedChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice not in (None, "none", "auto")

    @property
    def shown_tools(self) -> list[Tool]:
        """Return the tools that the template shows to the model.

        Tools that are not allowed are not shown: an answer that may be text is bound to no grammar, and a model does
        not call what it does not know.
        """
        tools = self.tools or []
        if not isinstance(self.tool_choice, AllowedChoice):
            return [] if self.tool_choice == "none" else tools
        allowed = {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
        return [tool for tool in tools if tool.function.name in allowed]

    @property
    def callable_tools(self) -> dict[str, Any]:
        """Return the schemas of the parameters of functions that may be called, by name."""
        functions = {tool.function.name: tool.function.parameters or {} for tool in self.shown_tools}
        if not isinstance(self.tool_choice, NamedTool):
            return functions
        name = self.tool_choice.function.name
        return {name: functions[name]} if name in functions else {}


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
        return prompts_of(self.prompt)


def prompts_of(field: str | list[str] | list[int] | list[list[int]]) -> tuple[str | list[int], ...]:
    """Return each prompt of a field by itself, text or token ids."""
    if isinstance(field, str):
        return (field,)
    tokens = [item for item in field if isinstance(item, int)]
    return (tokens,) if tokens else tuple(item for item in field if not isinstance(item, int))

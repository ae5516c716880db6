"""Chat templates: messages to the text of a prompt, as transformers renders it.

Templates are programs that come with a model, so they run in Jinja's immutable sandbox. Environment, filters and
globals are those of transformers' `apply_chat_template`, which templates are written against.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Any, Final, NamedTuple

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hetero_api.errors import ModelError
from hetero_gateway.engine.errors import InvalidRequest

_GIVEN: Final = ("messages", "tools", "documents", "add_generation_prompt")
# What a template may run into when messages are not what it expects, beside Jinja's own errors.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError,
)  # fmt: skip
_SHOWN: Final = "shown argument"
_PARAMETERS: Final = {"type": "object", "properties": {"a": {"type": "string"}}}
_TOOL: Final = {"type": "function", "function": {"name": "f", "description": "f", "parameters": _PARAMETERS}}
_CALL: Final = {"name": "f", "arguments": json.dumps({"a": _SHOWN})}
_CALLING: Final = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": _CALL}]},
    {"role": "tool", "content": "a", "tool_call_id": "call00000", "name": "f"},
)
"""Conversation by which a template shows how it takes calls."""


class _CallForm(NamedTuple):
    """Form in which a template takes an assistant's calls."""

    null_content: bool = False
    """Content that is missing beside calls is null, as many clients send it, rather than empty."""
    text_arguments: bool = False
    """Arguments are JSON text, as in the OpenAI API, rather than the object that it stands for."""

    def message(self, given: Mapping[str, Any]) -> dict[str, Any]:
        message = dict(given)
        calls = message.get("tool_calls") or ()
        if calls and self.null_content:
            message["content"] = message["content"] or None
        if calls and not self.text_arguments:
            message["tool_calls"] = [_with_object(call) for call in calls]
        return message


class ChatTemplate:
    """A compiled template. `source` names its file. Raises ModelError if the text is no template.

    `sorts_tools`: it gets the fields of tools in alphabetical order at every depth, as Kimi's tokenizer gives them.
    """

    def __init__(self, text: str, *, special_tokens: Mapping[str, str], source: str, sorts_tools: bool = False) -> None:
        self.text = text
        self._sorts_tools = sorts_tools
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"{source}: the chat template is no valid Jinja, line {error.lineno}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        form: _CallForm | None = None,
    ) -> str:
        """Return the prompt's text with the assistant's turn opened. `options` are variables of the template's own.

        `form`: of an assistant's calls; None: the one that the template shows. Raises InvalidRequest if the template
        refuses, or an option has the name of something that it gets anyway.
        """
        taken = sorted({*_GIVEN, *self._special_tokens}.intersection(options or ()))
        if taken:
            raise InvalidRequest(
                "chat.template_options_json", f"cannot set {taken[0]!r}, which the request says itself"
            )
        if form is None:
            form = self._call_form if any(message.get("tool_calls") for message in messages) else _CallForm()
        try:
            return self._template.render(
                **self._special_tokens,
                **(options or {}),
                messages=[form.message(message) for message in messages],
                tools=self._tools(tools) if tools else None,
                documents=None,
                add_generation_prompt=True,
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest("chat.messages", f"the model's chat template refuses them: {error}") from error

    @cached_property
    def _call_form(self) -> _CallForm:
        """The first form whose arguments the template shows; the usual one if it shows none."""
        for form in (_CallForm(), _CallForm(True), _CallForm(False, True), _CallForm(True, True)):
            with suppress(InvalidRequest):
                if _SHOWN in self.render(_CALLING, tools=[_TOOL], form=form):
                    return form
        return _CallForm()

    def _tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        shown = [dict(tool) for tool in tools]
        return json.loads(json.dumps(shown, sort_keys=True)) if self._sorts_tools else shown


def with_tool_use(text: str, tool_use: str | None) -> str:
    """Return one template of two, each rendered as it would be alone: conversations with tools get `tool_use`."""
    if tool_use is None:
        return text
    # An end of a template loses one newline; + keeps blanks in front of a tag.
    for_tools, others = (each.removesuffix("\n") for each in (tool_use, text))
    return f"{{% if tools %}}\n{for_tools}{{%+ else %}}\n{others}{{%+ endif %}}"


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments, JSON text in the OpenAI API, are the object that most templates expect."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it only has to be understood."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, a known way out of the sandbox."""

    # No named parameter: `self` may be a name in the namespace.
    def __init__(*args: Any, **kwargs: Any) -> None:
        _refuse_private({**dict(*args[1:]), **kwargs})
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private((name,))
        super().__setitem__(name, value)


def _refuse_private(names: Sequence[str] | Mapping[str, Any]) -> None:
    for name in names:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template cannot store {name!r} in a namespace")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    added: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _TemplateNamespace,
    }
    environment.globals.update(added)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(template: str) -> str:
    return datetime.now().strftime(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

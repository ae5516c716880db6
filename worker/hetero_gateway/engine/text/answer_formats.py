"""Formats of answers: how models of each family write what they think and the tools that they call.

A family is data: what its chat template says, the forms in which its models write a call, and how a call is written
when one is forced. `answer_parser` reads answers by it, `call_grammars` forces calls by it. A call is a header with the
function's name, its arguments as JSON or as tagged parameters, and an end.

Patterns match partially at the end of what has come, so a header may be cut anywhere. All repetitions are bounded:
so much text at most is held back, and a search over it takes little time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import regex

_GAP: Final = r"\s{0,8}"
_NAME: Final = r"(?P<name>[^\s\"<>{}\[\]\\]{1,128})"


class Place(enum.Enum):
    """Place in an answer where a form of calls may begin."""

    ANYWHERE = "anywhere"
    START = "start"
    """Before all text. Such a call has no mark of its own, so it must name one of the request's tools."""
    AFTER_CALL = "after a call"


class Arguments(enum.Enum):
    """Kind of what follows a call's header."""

    JSON = "JSON"
    """The arguments' JSON object, passed on as it comes. It begins with the header's group `rest`."""
    TAGS = "tags"
    """Parameters, each between tags of its own."""
    OBJECT = "object"
    """A JSON object with name and arguments, in any order, read once it is whole. It begins with the group `rest`."""
    NOTHING = "nothing"
    """Markup that says nothing, e.g. the end of a list of calls."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """One form of calls. `end` follows the arguments; an answer without it is taken all the same."""

    header: regex.Pattern[str]
    arguments: Arguments
    end: regex.Pattern[str] | None = None
    place: Place = Place.ANYWHERE


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of a parameter: `opening` has the group `key`, and what `closing` matches is no part of the value."""

    opening: regex.Pattern[str]
    closing: regex.Pattern[str]


@dataclass(frozen=True, slots=True)
class Writing:
    """How a call is written when it is forced. `{}` stands for the function's name, in a tag for the parameter's."""

    head: str
    tail: str
    joint: str = "\n"
    """Between two calls."""
    begin: str = ""
    end: str = ""
    tag: str = ""
    """Before a parameter's value; empty where arguments are JSON."""
    end_tag: str = ""


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Marks around what a model thinks before it answers."""

    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format of a family's calls. A chat template that holds all `signs` is one of the family."""

    signs: tuple[str, ...]
    forms: tuple[CallForm, ...]
    writing: Writing
    tags: Tags | None = None
    marks: tuple[str, ...] = ()
    """Texts of tokens that frame calls. Where a tokenizer has them as special tokens, they are kept in the text."""
    id_chars: int | None = None
    """Characters of a call's id, letters and digits only, where the template knows no other ids."""
    framed_thought: ThoughtMarks | None = None
    """Marks of a forced answer's thought, where the engine keeps thoughts apart by channels."""


THINK: Final = ThoughtMarks("<think>", "</think>")
_THOUGHTS: Final = (THINK, ThoughtMarks("[THINK]", "[/THINK]"))


def _form(
    header: str, arguments: Arguments = Arguments.JSON, *, end: str = "", place: Place = Place.ANYWHERE
) -> CallForm:
    """Return a form. A blank in its patterns is a gap: white space, or nothing."""
    return CallForm(_pattern(" " + header), arguments, _pattern(" " + end) if end else None, place)


def _pattern(text: str) -> regex.Pattern[str]:
    return regex.compile(text.replace(" ", _GAP))


def _tags(opening: str, closing: str) -> Tags:
    return Tags(_pattern(" " + opening), regex.compile(closing))


def _silent(markup: str) -> CallForm:
    return _form(markup, Arguments.NOTHING, place=Place.AFTER_CALL)


_OBJECT: Final = r"(?P<rest>\{)"
_NAMED_OBJECT: Final = rf'\{{ (?:"type" : "function" , )?"name" : "{_NAME}" , "(?:arguments|parameters)" : {_OBJECT}'
_END_OF_OBJECT: Final = r"(?:, \"id\" : \"\w{0,64}\" )?\}"

_HERMES: Final = CallFormat(
    signs=("<tool_call>",),
    forms=(
        _form(f"<tool_call> {_NAMED_OBJECT}", end=_END_OF_OBJECT),
        _form(f"<tool_call> {_OBJECT}", Arguments.OBJECT),
        _silent("</tool_call>"),
    ),
    writing=Writing('<tool_call>\n{"name": "{}", "arguments": ', "}\n</tool_call>"),
    marks=("<tool_call>", "</tool_call>"),
)
_QWEN3_CODER: Final = CallFormat(
    signs=("<tool_call>", "<function="),
    forms=(
        # Models of this family leave the outer tag out at times.
        _form(rf"(?:<tool_call> )?<function={_NAME}>", Arguments.TAGS, end="</function>"),
        _silent("</tool_call>"),
    ),
    writing=Writing(
        "<tool_call>\n<function={}>\n", "</function>\n</tool_call>", tag="<parameter={}>\n", end_tag="\n</parameter>\n"
    ),
    # A line's end after the opening tag, and one before the closing tag, are no part of the value.
    tags=_tags(r"<parameter=(?P<key>[^<>\n]{1,128})>(?:\n|(?=[^\n]))", r"\n?</parameter>"),
    marks=("<tool_call>", "</tool_call>"),
)
_LLAMA3: Final = CallFormat(
    signs=("ipython", 'Respond in the format {"name"'),
    forms=(
        _form(rf"(?:<\|python_tag\|> )?{_NAMED_OBJECT}", end=r"\}", place=Place.START),
        _form(rf"; {_NAMED_OBJECT}", end=r"\}", place=Place.AFTER_CALL),
    ),
    writing=Writing('{"name": "{}", "parameters": ', "}", joint="; "),
    marks=("<|python_tag|>",),
)
_MISTRAL_FORMS: Final = (
    _form(rf"\[TOOL_CALLS\] {_NAME} (?:\[CALL_ID\]\w{{1,64}} )?(?:\[ARGS\] )?{_OBJECT}"),
    _form(rf"\[TOOL_CALLS\] \[ {_NAMED_OBJECT}", end=_END_OF_OBJECT),
    _form(rf"\[TOOL_CALLS\] \[ {_OBJECT}", Arguments.OBJECT),
    _form(rf", {_NAMED_OBJECT}", end=_END_OF_OBJECT, place=Place.AFTER_CALL),
    _form(rf", {_OBJECT}", Arguments.OBJECT, place=Place.AFTER_CALL),
    _silent(r"\]"),
)
_MISTRAL_MARKS: Final = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_MISTRAL: Final = CallFormat(
    signs=("[TOOL_CALLS]", "[ARGS]"),
    forms=_MISTRAL_FORMS,
    writing=Writing("[TOOL_CALLS]{}[ARGS]", "", joint=""),
    marks=_MISTRAL_MARKS,
    id_chars=9,
)
_MISTRAL_LIST: Final = CallFormat(
    signs=("[TOOL_CALLS]",),
    forms=_MISTRAL_FORMS,
    writing=Writing('{"name": "{}", "arguments": ', "}", joint=", ", begin="[TOOL_CALLS][", end="]"),
    marks=_MISTRAL_MARKS,
    id_chars=9,
)
_DEEPSEEK_OPEN: Final = "(?:<｜tool▁calls▁begin｜> )?<｜tool▁call▁begin｜>"
_DEEPSEEK_FORMS: Final = (
    _form(rf"{_DEEPSEEK_OPEN}\w{{0,16}}<｜tool▁sep｜>{_NAME} ```(?:json)? {_OBJECT}", end="``` <｜tool▁call▁end｜>"),
    _form(rf"{_DEEPSEEK_OPEN}{_NAME}<｜tool▁sep｜> {_OBJECT}", end="<｜tool▁call▁end｜>"),
    _silent("<｜tool▁calls▁end｜>"),
)
_DEEPSEEK_MARKS: Final = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_DEEPSEEK_V3: Final = CallFormat(
    signs=("<｜tool▁calls▁begin｜>", "```json"),
    forms=_DEEPSEEK_FORMS,
    writing=Writing(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    marks=_DEEPSEEK_MARKS,
)
_DEEPSEEK_V31: Final = CallFormat(
    signs=("<｜tool▁calls▁begin｜>",),
    forms=_DEEPSEEK_FORMS,
    writing=Writing(
        "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        joint="",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    marks=_DEEPSEEK_MARKS,
)
_GLM: Final = CallFormat(
    signs=("<tool_call>", "<arg_key>"),
    forms=(_form(f"<tool_call> {_NAME} (?=<)", Arguments.TAGS, end="</tool_call>"),),
    writing=Writing(
        "<tool_call>{}\n", "</tool_call>", tag="<arg_key>{}</arg_key>\n<arg_value>", end_tag="</arg_value>\n"
    ),
    tags=_tags(r"<arg_key>(?P<key>[^<>\n]{1,128})</arg_key> <arg_value>", "</arg_value>"),
    marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_MINIMAX_M2: Final = CallFormat(
    signs=("<minimax:tool_call>", "<invoke"),
    forms=(
        _form(rf'(?:<minimax:tool_call> )?<invoke name="{_NAME}">', Arguments.TAGS, end="</invoke>"),
        _silent("</minimax:tool_call>"),
    ),
    writing=Writing(
        '<invoke name="{}">\n',
        "</invoke>\n",
        joint="",
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        tag='<parameter name="{}">',
        end_tag="</parameter>\n",
    ),
    tags=_tags(r'<parameter name="(?P<key>[^"<>\n]{1,128})">', "</parameter>"),
    marks=("<minimax:tool_call>", "</minimax:tool_call>"),
)
_GPT_OSS: Final = CallFormat(
    signs=("<|channel|>", "<|message|>", "functions."),
    # The header as `channels` writes it: recipient and channel in either order.
    forms=(
        _form(
            r"<\|start\|>assistant[^\n{]{0,64}?to=functions\.(?P<name>[\w.-]{1,128})(?![\w.-])"
            rf"[^\n{{]{{0,64}}?<\|message\|> {_OBJECT}"
        ),
    ),
    writing=Writing("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", "", joint=""),
    marks=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
    framed_thought=ThoughtMarks("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
)

FORMATS: Final[Mapping[str, CallFormat]] = {
    "GptOss": _GPT_OSS,
    "MiniMaxM2": _MINIMAX_M2,
    "Glm": _GLM,
    "Qwen3Coder": _QWEN3_CODER,
    "DeepSeekV3": _DEEPSEEK_V3,
    "DeepSeekV31": _DEEPSEEK_V31,
    "Mistral": _MISTRAL,
    "MistralList": _MISTRAL_LIST,
    "Hermes": _HERMES,
    "Llama3": _LLAMA3,
}
"""Formats by name. The first whose signs a template holds is the model's."""


def family_of(template: str) -> str:
    """Return the name in FORMATS of a chat template's family; "" if its calls are of none."""
    return next((name for name, each in FORMATS.items() if all(sign in template for sign in each.signs)), "")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Format of one model's answers: None where it has no calls, or does not think."""

    calls: CallFormat | None
    thought: ThoughtMarks | None
    special_ids: Mapping[str, int] = field(default_factory=dict)
    """Ids of the marks that are special tokens of the model's tokenizer."""

    @classmethod
    def find(cls, template: str, *, special_id: Callable[[str], int | None], calls: str | None = None) -> AnswerFormat:
        """Return the format of a model's chat template; "" has none.

        `special_id` returns the id of a special token by its text. `calls` names a format in place of the template's.
        """
        found = FORMATS.get(calls or family_of(template))
        thought = next((each for each in _THOUGHTS if each.opening in template), None)
        marks = (*(found.marks if found else ()), *((thought.opening, thought.closing) if thought else ()))
        ids = {mark: special_id(mark) for mark in marks}
        return cls(found, thought, {mark: token_id for mark, token_id in ids.items() if token_id is not None})

    def opens_thought(self, prompt_end: str) -> bool:
        """Return whether a prompt that ends so leaves a thought open."""
        return self.thought is not None and prompt_end.rstrip().endswith(self.thought.opening)

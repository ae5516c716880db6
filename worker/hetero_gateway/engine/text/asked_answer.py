"""The answer that a chat asks for: the tools that it offers, those that must be called, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.request import Constraint
from hetero_gateway.engine.text.answer_formats import AnswerFormat
from hetero_gateway.engine.text.answer_parser import AnswerParser
from hetero_gateway.engine.text.call_grammars import behind_thought, forced_calls


@dataclass(frozen=True, slots=True)
class AskedAnswer:
    """Answer that one chat asks for, in the format of the model that gives it.

    `tools` are schemas of the parameters of functions, by name. With `is_forced` at least one of them must be called,
    and with `in_parallel` several may be.
    """

    form: AnswerFormat
    tools: Mapping[str, Any] = field(default_factory=dict)
    is_forced: bool = False
    in_parallel: bool = True

    @property
    def shown_token_ids(self) -> frozenset[int]:
        """Return the special tokens that have to be part of the text."""
        return frozenset(self.form.special_ids.values())

    def constraint(self, own: Constraint | None, *, prompt_end: str) -> Constraint | None:
        """Return the form of the answer to a prompt with this end; `own` is the one that the request names.

        Raises InvalidRequest if calls are forced that the model's format cannot be forced to.
        """
        is_thinking = self.form.opens_thought(prompt_end)
        if not self.is_forced:
            return behind_thought(self.form, own) if own is not None and is_thinking else own
        if self.form.calls is None:
            problem = "cannot force a call: the format of this model's calls is not known (gateway.http.toolCallFormat)"
            raise InvalidRequest("tool_choice", problem)
        return forced_calls(
            self.form, self.form.calls, self.tools, is_thinking=is_thinking, in_parallel=self.in_parallel
        )

    def parser(self, prompt_end: str) -> AnswerParser:
        """Return the parser of an answer to a prompt with this end."""
        return AnswerParser(
            self.form,
            tools=self.tools,
            is_thinking=self.form.opens_thought(prompt_end),
            max_calls=None if self.in_parallel else 1,
        )

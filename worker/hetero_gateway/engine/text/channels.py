"""Channels of answers in the Harmony format (GPT-OSS): what the model thinks, and what it says.

An answer is messages, each a header and a body between tokens of their own:

    <|channel|>analysis<|message|>the user greets<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>

The prompt has opened the first header (`<|start|>assistant`), so a prompt tells whether its answer will look like that.
Bodies of the channel `analysis` are reasoning, those of all other channels are text. A call of a tool names a recipient
in its header; it is text with its header, as the model wrote it, so that nothing of a call is lost. An answer without
any channel is text, known as such once it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from hetero_gateway.engine.text.detokenizer import ByteLevelText, WindowText

_REASONING: Final = "analysis"
_RECIPIENT: Final = "to="
_LONGEST_HEADER: Final = 64
"""Tokens at a prompt's end among which an open header is looked for."""


class HarmonyTokens(NamedTuple):
    """Ids of the tokens that frame messages."""

    start: int
    channel: int
    message: int
    end: int

    @classmethod
    def find(cls, token_id: Callable[[str], int | None]) -> HarmonyTokens | None:
        """Return the tokens of a vocabulary; None if it lacks one. `token_id` returns the id of a token's text."""
        ids = [token_id(f"<|{name}|>") for name in cls._fields]
        known = [each for each in ids if each is not None]
        return cls(*known) if len(known) == len(ids) else None

    def open_header(self, prompt: Sequence[int]) -> list[int] | None:
        """Return the tokens of the header that a prompt ends with; None if its last header is closed or missing."""
        tail = list(prompt[-_LONGEST_HEADER:])
        begin = max((place for place, token in enumerate(tail) if token == self.start), default=None)
        if begin is None or self.message in tail[begin:]:
            return None
        return tail[begin:]


class MarkedText:
    """Text of tokens, some special ones of which are part of it. `marks` are these tokens' texts by id.

    `new_text` makes the decoder of the text between two marks.
    """

    def __init__(self, marks: Mapping[int, str], *, new_text: Callable[[], ByteLevelText | WindowText]) -> None:
        self._marks = marks
        self._new_text = new_text
        self._text = new_text()

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is certain with them."""
        shown: list[str] = []
        begin = 0
        for place, token_id in enumerate(token_ids):
            if token_id in self._marks:
                shown += (self._text.push(token_ids[begin:place]), self._text.flush(), self._marks[token_id])
                self._text, begin = self._new_text(), place + 1
        return "".join((*shown, self._text.push(token_ids[begin:])))

    def flush(self) -> str:
        """Return the text that was held back: no more tokens come."""
        return self._text.flush()


class ChannelText:
    """Text of an answer's tokens, its reasoning apart. `header` is the prompt's open one.

    `new_text` makes the decoder of a message's body; `written` returns tokens' text, that of special tokens included.
    """

    def __init__(
        self,
        tokens: HarmonyTokens,
        *,
        header: Sequence[int],
        new_text: Callable[[], ByteLevelText | WindowText],
        written: Callable[[Sequence[int]], str],
    ) -> None:
        self._tokens = tokens
        self._new_text = new_text
        self._written = written
        self._header = list(header)
        self._num_given = len(header)
        """Tokens of the header that are the prompt's."""
        self._body: ByteLevelText | WindowText | None = None
        self._is_reasoning = False
        self._has_messages = False
        self._reasoning: list[str] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is certain with them; reasoning is kept for `take_reasoning`."""
        return "".join(map(self._push, token_ids))

    def flush(self) -> str:
        """Return the text that was held back: no more tokens come."""
        said = self._end_message()
        own = self._header[self._num_given :]
        if self._has_messages or self._tokens.channel in own:
            return said
        self._header = []
        text = self._new_text()
        return said + text.push(own) + text.flush()

    def take_reasoning(self) -> str:
        """Return the reasoning since the last call."""
        reasoning = "".join(self._reasoning)
        self._reasoning.clear()
        return reasoning

    def _push(self, token_id: int) -> str:
        if token_id in (self._tokens.start, self._tokens.end):
            said = self._end_message()
            if token_id == self._tokens.start:
                self._header, self._num_given = [token_id], 0
            return said
        if self._body is not None:
            return self._told(self._body.push((token_id,)))
        if token_id == self._tokens.message:
            return self._begin_message()
        self._header.append(token_id)
        return ""

    def _begin_message(self) -> str:
        header = self._written(self._header)
        at = self._header.index(self._tokens.channel) + 1 if self._tokens.channel in self._header else None
        channel = self._written(self._header[at:]).split() if at is not None else []
        is_call = _RECIPIENT in header
        self._is_reasoning = channel[:1] == [_REASONING] and not is_call
        self._body, self._has_messages = self._new_text(), True
        return header + self._written((self._tokens.message,)) if is_call else ""

    def _end_message(self) -> str:
        if self._body is None:
            return ""
        said = self._told(self._body.flush())
        self._body, self._header, self._num_given = None, [], 0
        return said

    def _told(self, text: str) -> str:
        if not self._is_reasoning:
            return text
        if text:
            self._reasoning.append(text)
        return ""

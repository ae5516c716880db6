"""Tokens to text as they come, up to the first stop string: O(1) a token, and every piece valid UTF-8.

A token is bytes, not text: a character may be spread over several tokens, so its first bytes are held back until
the rest is there; bytes that turn out to be no UTF-8 become U+FFFD. The pieces together equal the text of all tokens
decoded at once, special tokens left out. There are two ways, by the tokenizer's decoder:

- `ByteLevelText` for byte-level BPE (Llama 3, Qwen, SmolLM, ...): each token's bytes are known exactly and go through
  an incremental UTF-8 decoder. Exact for any ids.
- `WindowText` for every other decoder (SentencePiece with byte fallback, ...): decodes the last few tokens with and
  without the new one and shows the difference. Exact but for one case: such decoders turn a whole run of byte
  tokens into U+FFFD when any byte of it is wrong, so how many U+FFFD a run with a wrong byte (or with U+FFFD itself,
  which looks like one) has, and whether valid characters in it are kept, may differ.

Stop strings are matched character by character with Knuth-Morris-Pratt, O(1) amortised a character and a stop string.
So long ones cost no more than short ones, and the outcome does not depend on how the text was cut into pieces: the stop
string that is complete first wins, of several the longest.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, Protocol

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER: Final = 4
"""Bytes of the longest UTF-8 character, hence the most tokens that one can be spread over."""


class ByteLevelText:
    """Text of a completion's tokens, which are bytes. The pieces' sum does not depend on how tokens are cut into calls.

    `bytes_of` returns a token's bytes, none for a token without text.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is certain with them. Tokens without text may be among them."""
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """Return the text that was held back: no more tokens come."""
        return self._decoder.decode(b"", final=True)


class WindowText:
    """Text of any tokens. `decode` turns token ids into text; `is_silent` returns whether a token has none.

    `_context` are tokens whose text, `_shown`, has been shown: a decoder may treat the first token it sees differently
    (SentencePiece drops its leading space). `_pending` are those after them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, is_silent: Callable[[int], bool]) -> None:
        self._decode = decode
        self._is_silent = is_silent
        self._context: list[int] = []
        self._shown = ""
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is certain with them. Tokens without text may be among them."""
        return "".join(self._push(token_id) for token_id in token_ids if not self._is_silent(token_id))

    def _push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        # With as many tokens as any character has bytes and still no end, these bytes are no UTF-8.
        if text.endswith(REPLACEMENT) and len(self._pending) < _LONGEST_CHARACTER:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """Return the text that was held back: no more tokens come."""
        return self._show(self._decode(self._context + self._pending))

    def _show(self, text: str) -> str:
        """Return the text that pending tokens add, and make them the context of the next ones."""
        # A run of bytes that turns out wrong changes what its beginning, shown already, decodes to.
        new = text[len(self._shown) :] if text.startswith(self._shown) else self._decode(self._pending)
        self._context, self._pending = self._pending, []
        self._shown = self._decode(self._context)
        return new


class _Pattern:
    """A stop string, and the number of its first characters that the text now ends with."""

    __slots__ = ("fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self.fallback = _fallbacks(text)

    def advance(self, character: str) -> bool:
        """Add a character; return whether the text now ends with the whole stop string."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self.fallback[self.matched - 1]
        if self.text[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.text)


class StopStrings:
    """Search for stop strings, none of them empty, in text that comes in pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        # The longest first, so that it wins when several are complete at one character.
        self._patterns = [_Pattern(text) for text in sorted(set(stop), key=lambda text: (-len(text), text))]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, may_match: bool = True) -> str:
        """Add text, and return what can be shown now: no character that may belong to a stop string.

        One that is complete where it may not match is text like any other. After a match `matched` names it and nothing
        is shown any more.
        """
        if self.matched is not None or not text:
            return ""
        if not self._patterns:
            return text
        pending = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            for pattern in self._patterns:
                if not pattern.advance(character):
                    continue
                if may_match:
                    self.matched, self._held = pattern.text, ""
                    return pending[: index - len(pattern.text)]
                pattern.matched = pattern.fallback[-1]
        shown = len(pending) - max(pattern.matched for pattern in self._patterns)
        self._held = pending[shown:]
        return pending[:shown]

    def flush(self) -> str:
        """Return the text that was held back: no more text comes."""
        held, self._held = self._held, ""
        return held


class TextOfTokens(Protocol):
    """Text of a completion's tokens, as it becomes certain."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is certain with them."""

    def flush(self) -> str:
        """Return the text that was held back: no more tokens come."""


class IncrementalDetokenizer:
    """Text of one completion: that of its tokens, up to the first stop string.

    `take_reasoning` returns the reasoning since its last call, of models that keep it apart from what they say.
    """

    def __init__(
        self, text: TextOfTokens, *, stop: Sequence[str], take_reasoning: Callable[[], str] = lambda: ""
    ) -> None:
        self._text = text
        self.min_tokens = 0
        """Tokens to come in whose text no stop string is met."""
        self.take_reasoning = take_reasoning
        self._stop = StopStrings(stop) if stop else None

    @property
    def looks_for_stops(self) -> bool:
        """Return whether tokens have to be pushed as they come, because one may complete a stop string."""
        return self._stop is not None

    @property
    def matched_stop(self) -> str | None:
        """Return the stop string that was met, after which there is no more text; None before."""
        return None if self._stop is None else self._stop.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text to show now, possibly empty."""
        if self._stop is None:
            return self._text.push(token_ids)
        early, late = token_ids[: self.min_tokens], token_ids[self.min_tokens :]
        self.min_tokens -= len(early)
        return self._stop.feed(self._text.push(early), may_match=False) + self._stop.feed(self._text.push(late))

    def finish(self) -> str:
        """Return the rest, up to a stop string that may be met only now: no more tokens come."""
        text = self._text.flush()
        return text if self._stop is None else self._stop.feed(text, may_match=not self.min_tokens) + self._stop.flush()


@lru_cache(maxsize=256)  # a call's stop strings, for each of its completions
def _fallbacks(text: str) -> list[int]:
    """Return, for each prefix of `text`, the length of its longest proper prefix that is its suffix too."""
    lengths = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = lengths[length - 1]
        if text[index] == text[length]:
            length += 1
        lengths[index] = length
    return lengths

"""Tokens to text as they come: O(1) a token, and every piece valid UTF-8.

A token is bytes, not text: a character may be spread over several tokens, so its first bytes are held back until
the rest is there; bytes that turn out to be no UTF-8 become U+FFFD. The pieces together are what decoding all tokens
at once gives, special tokens left out. Two ways, by the tokenizer's decoder:

- `ByteLevelText` for byte-level BPE (Llama 3, Qwen, SmolLM, ...): each token's bytes are known exactly and go through
  an incremental UTF-8 decoder. Exact for any ids.
- `WindowText` for every other decoder (SentencePiece with byte fallback, ...): decodes the last few tokens with and
  without the new one and shows the difference. Exact but for one case: such decoders turn a whole run of byte
  tokens into U+FFFD when any byte of it is wrong, so how many U+FFFD a run with a wrong byte (or with U+FFFD itself,
  which looks like one) has, and whether valid characters in it are kept, may differ.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from hetero_gateway.engine.stop_strings import StopStrings

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER: Final = 4
"""Bytes of the longest UTF-8 character, hence the most tokens that one can be spread over."""


class TokenText(Protocol):
    """Turns tokens into text. How they are cut into calls makes no difference to the pieces' sum."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is certain with these tokens. Those without text may be among them."""
        ...

    def flush(self) -> str:
        """No more tokens come: what was held back."""
        ...


class ByteLevelText:
    """For tokenizers whose tokens are bytes; `bytes_of` tells a token's, none for one without text."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowText:
    """For any tokenizer; `decode` turns token ids into text, `is_silent` tells those that have none.

    `_context` are tokens whose text, `_shown`, is shown: a decoder may treat the first token it sees differently
    (SentencePiece drops its leading space). `_pending` are those after them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, is_silent: Callable[[int], bool]) -> None:
        self._decode = decode
        self._is_silent = is_silent
        self._context: list[int] = []
        self._shown = ""
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self._push(token_id) for token_id in token_ids if not self._is_silent(token_id))

    def _push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        # With as many tokens as any character has bytes and still no end, these bytes are no UTF-8.
        if text.endswith(REPLACEMENT) and len(self._pending) < _LONGEST_CHARACTER:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode(self._context + self._pending))

    def _show(self, text: str) -> str:
        """What the pending tokens add; they are the context of those to come."""
        # A run of bytes that turns out wrong changes what its beginning, shown already, decodes to.
        new = text[len(self._shown) :] if text.startswith(self._shown) else self._decode(self._pending)
        self._context, self._pending = self._pending, []
        self._shown = self._decode(self._context)
        return new


class IncrementalDetokenizer:
    """One completion's text: token text, up to the first stop string."""

    def __init__(self, text: TokenText, *, stop: Sequence[str]) -> None:
        self._text = text
        self._stop = StopStrings(stop) if stop else None

    @property
    def looks_for_stops(self) -> bool:
        """Whether tokens have to be pushed as they come, because one may complete a stop string."""
        return self._stop is not None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that was met; from then on there is no more text."""
        return None if self._stop is None else self._stop.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; the text to show now, possibly empty."""
        text = self._text.push(token_ids)
        return text if self._stop is None else self._stop.feed(text)

    def finish(self) -> str:
        """No more tokens come: the rest, up to a stop string that may be met only now."""
        text = self._text.flush()
        return text if self._stop is None else self._stop.feed(text) + self._stop.flush()


def byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte, turned around.

    Printable Latin-1 characters stand for themselves, other bytes for the characters from U+0100 on, in order
    (GPT-2's `bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet

"""Token ids of a long text, window by window.

The library's record of a text takes 100 to 200 times the text's bytes until all of it is encoded: 500 to 900 MiB for
four megabytes. Windows overlap, and each begins where the one before has a token begin. What a tokenizer makes of a
place depends on the text nearby: so where two windows agree about the tokens on both sides of a place, the first one is
right up to there, and the second one from there on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenizers import Encoding

WINDOW_CHARS: Final = 1 << 15
OVERLAP_CHARS: Final = 1 << 12
_AGREED_TOKENS: Final = 16
"""Tokens on each side of a seam that both windows have."""


@dataclass(frozen=True, slots=True)
class _Window:
    """A part of the text from the character `begin` to `end`."""

    begin: int
    end: int
    ids: list[int]
    spans: list[tuple[int, int]]
    """Characters of each token, in the window."""

    @classmethod
    def of(cls, encode: Callable[[str], Encoding], text: str, begin: int) -> _Window:
        end = min(begin + WINDOW_CHARS, len(text))
        encoding = encode(text[begin:end])
        return cls(begin, end, encoding.ids, encoding.offsets)

    def first_at(self, place: int) -> int:
        """Return the first token that begins at a character of the text or behind it."""
        return bisect_left(self.spans, (place - self.begin,))

    def start(self, token: int) -> int:
        return self.begin + self.spans[token][0]

    def around(self, token: int) -> tuple[list[int], list[int]]:
        """Return the tokens on both sides of a token's start, and where they begin."""
        first, behind = max(0, token - _AGREED_TOKENS), token + _AGREED_TOKENS
        return self.ids[first:behind], [self.begin + start for start, _ in self.spans[first:behind]]


def ids_by_windows(encode: Callable[[str], Encoding], text: str, *, most: int | None) -> list[int] | None:
    """Return the ids of a text, without special tokens around it; None if two windows agree about no place.

    `encode` encodes a part of the text so. More than `most` ids may be only the first of all there are.
    """
    ids: list[int] = []
    window, first = _Window.of(encode, text, 0), 0
    while window.end < len(text) and (most is None or len(ids) <= most):
        overlap = window.first_at(window.end - OVERLAP_CHARS)
        if overlap == len(window.ids) or not window.begin < window.start(overlap) < window.end:
            return None
        following = _Window.of(encode, text, window.start(overlap))
        seam = _seam(window, following)
        if seam is None:
            return None
        ids += window.ids[first : seam[0]]
        window, first = following, seam[1]
    ids += window.ids[first:]
    return ids


def _seam(window: _Window, following: _Window) -> tuple[int, int] | None:
    """Return a token of the first window and the same one of the second, about which and whose neighbours they agree.

    The ends of the overlap do not count: there one of them knows only one side.
    """
    margin = (window.end - following.begin) // 4
    begin, end = following.first_at(following.begin + margin), following.first_at(window.end - margin)
    for theirs in range(max(begin, _AGREED_TOKENS), end, _AGREED_TOKENS):
        ours = window.first_at(following.start(theirs))
        theirs = following.first_at(following.start(theirs))  # one character may be several tokens
        tokens, starts = window.around(ours)
        if len(tokens) == 2 * _AGREED_TOKENS and (tokens, starts) == following.around(theirs):
            return ours, theirs
    return None

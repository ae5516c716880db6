"""Stop strings in a stream of text: what may be shown already, and where the text ends.

Characters are matched one by one with Knuth-Morris-Pratt, O(1) amortised a character and a stop string, so long
stop strings cost no more than short ones and the outcome does not depend on how the text was cut into pieces: the
stop string that is complete first wins, of several the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """One stop string and how many of its first characters the text now ends with."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = _fallbacks(text)

    def advance(self, character: str) -> bool:
        """Whether the text now ends with the whole stop string."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        if self.text[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.text)


class StopStrings:
    """Looks for `stop` (none of them empty) in text that comes in pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        # The longest first, so that it wins when several are complete at one character.
        self._patterns = [_Pattern(text) for text in sorted(set(stop), key=lambda text: (-len(text), text))]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Add text; what can be shown now: never a character that may belong to a stop string.

        After a match `matched` names it and nothing is shown any more.
        """
        if self.matched is not None:
            return ""
        if not self._patterns:
            return text
        pending = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            for pattern in self._patterns:
                if pattern.advance(character):
                    self.matched, self._held = pattern.text, ""
                    return pending[: index - len(pattern.text)]
        shown = len(pending) - max(pattern.matched for pattern in self._patterns)
        self._held = pending[shown:]
        return pending[:shown]

    def flush(self) -> str:
        """No more text comes: what was held back."""
        held, self._held = self._held, ""
        return held


def _fallbacks(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is its suffix too."""
    lengths = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = lengths[length - 1]
        if text[index] == text[length]:
            length += 1
        lengths[index] = length
    return lengths

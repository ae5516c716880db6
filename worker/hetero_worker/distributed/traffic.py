"""What an exchange moved, counted where it is moved: the cost table of a plan can be checked against it.

Bytes are those that this rank *published*: what it wrote for others to read, once, however many read it. A rank that
only reads, or only raises its counter, publishes none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Since the exchange was made."""

    published_bytes: int = 0
    rounds: int = 0
    """Calls of a round of the group or of a subgroup that had something to share, whoever shared it."""
    messages: int = 0
    """Tensors sent over links, empty ones not counted."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.published_bytes + other.published_bytes, self.rounds + other.rounds, self.messages + other.messages
        )

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.published_bytes - earlier.published_bytes,
            self.rounds - earlier.rounds,
            self.messages - earlier.messages,
        )


NO_TRAFFIC = Traffic()


class TrafficCounter:
    """Counts for one rank; of one thread."""

    def __init__(self) -> None:
        self._published_bytes = 0
        self._rounds = 0
        self._messages = 0

    def count_round(self, published_bytes: int) -> None:
        self._published_bytes += published_bytes
        self._rounds += 1

    def count_message(self, published_bytes: int) -> None:
        self._published_bytes += published_bytes
        self._messages += 1

    def total(self) -> Traffic:
        return Traffic(self._published_bytes, self._rounds, self._messages)

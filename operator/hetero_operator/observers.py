"""What is told to whoever counts, where nobody does."""

from __future__ import annotations


def unobserved(*_: object) -> None:
    """Nobody listens."""

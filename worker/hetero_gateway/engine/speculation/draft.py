"""Proposals of the draft model: what rank 0 said may follow the newest token of a completion."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_gateway.engine.request import Completion


class DraftProposer:
    """Proposer of what the draft model drew behind a step's tokens, until the next token is known."""

    def __init__(self) -> None:
        self._drafts: dict[Completion, tuple[int, Sequence[int]]] = {}
        """Drafted tokens, and the number of known tokens that they follow."""

    def take(self, completion: Completion, token_ids: Sequence[int]) -> None:
        """Keep what was drafted behind the completion's known tokens."""
        self._drafts[completion] = completion.num_tokens, token_ids

    def propose(self, completion: Completion, most: int) -> Sequence[int]:
        """Return at most so many drafted tokens; none if they followed other tokens."""
        known, token_ids = self._drafts.get(completion, (0, ()))
        return token_ids[:most] if known == completion.num_tokens else ()

    def ended(self, completion: Completion) -> None:
        """Take note that a completion has ended."""
        self._drafts.pop(completion, None)

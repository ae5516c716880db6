"""Proposals from text that was there before: what followed the last few tokens where they stood already.

A completion that quotes its prompt, edits code or repeats itself is proposed what came next the last time; one that
begins like a recent output of the same tenant is proposed how that went on. Tenants are kept apart as in the prefix
cache, by their salts.

An index maps the n-grams of a growing list of tokens to where they ended last. The list is the completion's own and is
never copied. A look-up first takes in the tokens that are new, at most `MOST_AT_ONCE` of them, so that a long prompt
does not stop the loop: until all are in, there are no proposals. Memory is bounded by the tokens of all indexes: a
completion for which there is no room has none until others have ended. To make room by dropping one that is in use
would drop, and make again, each of them in every step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from hetero_gateway.engine.request import Completion

LENGTHS: Final = (6, 3)
"""Lengths of the n-grams, which are tried in this order."""
MOST_AT_ONCE: Final = 1024
"""New tokens that one look-up takes in, in about a millisecond; a step looks up several completions."""
MOST_INDEXED: Final = 1 << 17
"""Tokens in all indexes of completions; each takes up to 300 bytes."""
RECENT_TOKENS: Final = 4096
"""Tokens of recent outputs that are kept of each tenant; twice as many until old ones are dropped."""
RECENT_TENANTS: Final = 32
"""Tenants whose recent outputs are kept."""


class NGramProposer:
    """Proposer of what followed the last n-gram in the completion itself or in recent outputs of its tenant.

    A wrong proposal costs time, and changes nothing else.
    """

    def __init__(self) -> None:
        self._indexes: dict[Completion, NGramIndex] = {}
        self._recent: OrderedDict[str, NGramIndex] = OrderedDict()

    def propose(self, completion: Completion, most: int) -> Sequence[int]:
        """Return at most so many tokens that may follow the completion's known ones; none if there is no idea."""
        own = self._own(completion, most)
        recent = self._recent.get(_tenant_of(completion))
        if own or recent is None:
            return own
        recent.take_in(MOST_AT_ONCE)
        return recent.following(completion.token_ids, most)

    def ended(self, completion: Completion) -> None:
        """Take note that a completion has ended: its output joins the tenant's recent ones."""
        self._indexes.pop(completion, None)
        output = completion.output_token_ids[-RECENT_TOKENS:]
        if not output:
            return
        tenant = _tenant_of(completion)
        recent = self._recent.setdefault(tenant, NGramIndex([]))
        self._recent.move_to_end(tenant)
        recent.tokens.extend(output)
        if len(recent.tokens) > 2 * RECENT_TOKENS:
            self._recent[tenant] = NGramIndex(recent.tokens[-RECENT_TOKENS:])
        if len(self._recent) > RECENT_TENANTS:
            self._recent.popitem(last=False)

    @property
    def num_indexed(self) -> int:
        """Tokens that are in the indexes of completions, or will be."""
        return sum(len(index.tokens) for index in self._indexes.values())

    def _own(self, completion: Completion, most: int) -> Sequence[int]:
        """Return what followed in the completion itself."""
        index = self._indexes.pop(completion, None)
        if self._indexes and self.num_indexed + len(completion.token_ids) > MOST_INDEXED:
            return ()
        index = self._indexes[completion] = index or NGramIndex(completion.token_ids)
        index.take_in(MOST_AT_ONCE)
        return index.following(completion.token_ids, most)


class NGramIndex:
    """Places of the n-grams of a list of tokens that only grows at its end."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.num_taken = 0
        """Leading tokens whose n-grams are in, but for those that end with the last."""
        self._ends: tuple[dict[int, int], ...] = tuple({} for _ in LENGTHS)
        """Where an n-gram of each length ended last, by its hash."""

    def take_in(self, most: int) -> None:
        """Take in at most so many new tokens."""
        tokens = self.tokens
        end = min(len(tokens), self.num_taken + most)
        # An n-gram is in once a token follows it.
        for length, ends in zip(LENGTHS, self._ends, strict=True):
            for last in range(max(self.num_taken, length), end):
                ends[hash(tuple(tokens[last - length : last]))] = last
        self.num_taken = end

    def following(self, known: list[int], most: int) -> Sequence[int]:
        """Return what followed the last n-gram of `known` tokens, at most `most` tokens; none if nothing did."""
        if self.num_taken < len(self.tokens):
            return ()
        for length, ends in zip(LENGTHS, self._ends, strict=True):
            wanted = known[-length:]
            end = ends.get(hash(tuple(wanted)))
            # Equal hashes do not make equal tokens.
            if end is not None and self.tokens[end - length : end] == wanted:
                return self._from(end, most)
        return ()

    def _from(self, begin: int, most: int) -> Sequence[int]:
        """Return the tokens from a place on; behind the last they repeat, as the text does that comes back to it."""
        tokens = self.tokens[begin : begin + most]
        period = len(self.tokens) - begin
        while len(tokens) < most:
            tokens.append(tokens[len(tokens) - period])
        return tokens


def _tenant_of(completion: Completion) -> str:
    return completion.request.asked.cache_salt

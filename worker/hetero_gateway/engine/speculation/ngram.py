"""Proposals from text that was there before: what followed the last few tokens where they stood already.

A completion that quotes its prompt, edits code or repeats itself is proposed what came next the last time; one that
begins like a recent output of the same tenant is proposed how that went on. Tenants are kept apart as in the prefix
cache, by their salts.

An index chains the places of each pair of tokens in a growing list, and a look-up takes the one before which most
tokens are alike. The list is the completion's own and is never copied. A look-up first takes in the tokens that are
new, at most `MOST_AT_ONCE` of them, so that a long prompt does not stop the loop: until all are in, there are no
proposals. Memory is bounded by the tokens of all indexes: a completion for which there is no room has none until
others have ended. To make room by dropping one that is in use would drop, and make again, each of them in every step.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from hetero_gateway.engine.request import Completion

LEAST_MATCH: Final = 2
"""Tokens that stand before a place and are alike, at least."""
LONGEST_MATCH: Final = 16
"""Most such tokens that are compared."""
MOST_PLACES: Final = 8
"""Latest places of a pair of tokens that are compared."""
MOST_AT_ONCE: Final = 1024
"""New tokens that one look-up takes in, in about a millisecond; a step looks up several completions."""
MOST_INDEXED: Final = 1 << 17
"""Tokens in all indexes of completions; each takes up to 300 bytes."""
RECENT_TOKENS: Final = 4096
"""Tokens of recent outputs that are kept of each tenant; twice as many until old ones are dropped."""
RECENT_TENANTS: Final = 32
"""Tenants whose recent outputs are kept."""


class Proposal(NamedTuple):
    """Tokens that may follow a completion's known ones."""

    token_ids: Sequence[int] = ()
    match: int = 0
    """Tokens that stood before them there as here; 0: they come of something else."""


class NGramProposer:
    """Proposer of what followed the longest match in the completion itself or in recent outputs of its tenant.

    A wrong proposal costs time, and changes nothing else.
    """

    def __init__(self) -> None:
        self._indexes: dict[Completion, NGramIndex] = {}
        self._recent: OrderedDict[str, NGramIndex] = OrderedDict()

    def propose(self, completion: Completion, most: int) -> Proposal:
        """Return at most so many tokens that may follow the completion's known ones; none if there is no idea."""
        own = self._own(completion, most)
        recent = self._recent.get(_tenant_of(completion))
        if recent is None:
            return own
        recent.take_in(MOST_AT_ONCE)
        return max(own, recent.following(completion.token_ids, most), key=lambda proposal: proposal.match)

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

    def _own(self, completion: Completion, most: int) -> Proposal:
        """Return what followed in the completion itself."""
        index = self._indexes.pop(completion, None)
        if self._indexes and self.num_indexed + len(completion.token_ids) > MOST_INDEXED:
            return Proposal()
        index = self._indexes[completion] = index or NGramIndex(completion.token_ids)
        index.take_in(MOST_AT_ONCE)
        return index.following(completion.token_ids, most)


class NGramIndex:
    """Places of each pair of tokens in a list that only grows at its end."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._last: dict[int, int] = {}
        """The last place behind each pair."""
        self._earlier = array("L")
        """The place before that behind the same pair, by place; 0: none."""

    @property
    def num_taken(self) -> int:
        """Leading tokens that are in: a pair is in once a token follows it."""
        return len(self._earlier)

    def take_in(self, most: int) -> None:
        """Take in at most so many new tokens."""
        tokens, last, earlier = self.tokens, self._last, self._earlier
        for place in range(self.num_taken, min(len(tokens), self.num_taken + most)):
            if place < LEAST_MATCH:
                earlier.append(0)
                continue
            pair = _pair_before(tokens, place)
            earlier.append(last.get(pair, 0))
            last[pair] = place

    def following(self, known: list[int], most: int) -> Proposal:
        """Return what followed where most tokens were as the last of `known`, and last of these; at most `most`."""
        if self.num_taken < len(self.tokens) or len(known) < LEAST_MATCH:
            return Proposal()
        place, best, match = self._last.get(_pair_before(known, len(known)), 0), 0, 0
        for _ in range(MOST_PLACES):
            alike = self._count_alike(place, known) if place else 0
            if alike > match:
                best, match = place, alike
            if not place or match == LONGEST_MATCH:
                break
            place = self._earlier[place]
        return Proposal(self._from(best, most), match) if match else Proposal()

    def _count_alike(self, place: int, known: list[int]) -> int:
        """Return how many tokens before a place are the last of `known`, of which `LEAST_MATCH` are."""
        longest = min(LONGEST_MATCH, place, len(known))
        pairs = ((self.tokens[place - length], known[-length]) for length in range(LEAST_MATCH + 1, longest + 1))
        return LEAST_MATCH + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _from(self, begin: int, most: int) -> Sequence[int]:
        """Return the tokens from a place on; behind the last they repeat, as the text does that comes back to it."""
        tokens = self.tokens[begin : begin + most]
        period = len(self.tokens) - begin
        while len(tokens) < most:
            tokens.append(tokens[len(tokens) - period])
        return tokens


def _pair_before(tokens: list[int], place: int) -> int:
    return tokens[place - 2] << 32 | tokens[place - 1]


def _tenant_of(completion: Completion) -> str:
    return completion.request.asked.cache_salt

"""A proposer that knows what ranks will draw, and is right as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from hetero_gateway.engine.request import Completion
from hetero_gateway.engine.speculation.ngram import NGramProposer, Proposal
from tests.unit.engine.fake_ranks import tokens_alone


class OracleProposer(NGramProposer):
    """Each token that it proposes is right with the chance `rate`, if those before it are.

    `answer` returns at least so many tokens of a completion's output as it is asked for, or all.
    """

    def __init__(
        self, answer: Callable[[Completion, int], Sequence[int]], *, rate: float, vocab_size: int, seed: int = 0
    ) -> None:
        super().__init__()
        self._answer = answer
        self._rate = rate
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self.num_ended = 0

    def propose(self, completion: Completion, most: int) -> Proposal:
        known = completion.num_output_tokens
        right = self._answer(completion, known + most)[known : known + most]
        return Proposal([token if self._random.random() < self._rate else self._wrong(token) for token in right])

    def ended(self, completion: Completion) -> None:
        self.num_ended += 1

    def _wrong(self, token: int) -> int:
        return (token + self._random.randrange(1, self._vocab_size)) % self._vocab_size


def fake_oracle(*, rate: float, vocab_size: int) -> OracleProposer:
    """Of what FakeRanks draw."""

    def answer(completion: Completion, count: int) -> Sequence[int]:
        asked = completion.request.asked
        tenant = asked.sampling.top_k
        return tokens_alone(
            asked.prompt_token_ids, seed=completion.seed, count=count, vocab_size=vocab_size, tenant=tenant
        )

    return OracleProposer(answer, rate=rate, vocab_size=vocab_size)

"""Speculator: whether to propose tokens, and how many.

Proposals pay where they are often right and a row more costs a step little. Steps with proposals go out one at a time,
because the next proposal follows from what this one gave; other steps overlap. So three things are measured while
requests are served: how often proposed tokens are right, for each completion; how long steps take that only decode; and
how long steps with proposals take, up to the next. Where no steps with so many rows were measured, they are estimated:
between those with fewer and more rows, or from those with fewer, with `ROW_COST` a row more.

How often a proposal is right is seen without proposing: a *guess* is kept until the completion's tokens have come and
show what of it was right. So a completion whose guesses fail costs ranks nothing. Real proposals are such guesses, too.

As many tokens are proposed as promise the most tokens per second by these numbers, and none that a completion's own
acceptance makes improbable. With `only_if_faster` (Auto) none are proposed unless that is `MARGIN` times the tokens per
second of steps that overlap. With more than `MOST_COMPLETIONS` nothing is looked up: each row costs arithmetic then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hetero_gateway.engine.config import SpeculationConfig
from hetero_gateway.engine.request import Completion
from hetero_gateway.engine.speculation.ngram import NGramProposer
from hetero_gateway.engine.step import ScheduledStep

MOST_COMPLETIONS: Final = 16
MARGIN: Final = 1.1
ROW_COST: Final = 0.1
"""Part of a step's time that a row more is taken to cost before it was measured."""
MIN_CHANCE: Final = 0.25
"""A token is proposed if it is accepted with this chance at least."""
RETRY_STEPS: Final = 500
"""Steps that only decode after which measured steps with proposals are forgotten: they may be faster by now."""
_FIRST_RATE: Final = 0.4
"""Acceptance that is assumed at first, with the weight of `_FIRST_WEIGHT` tokens."""
_FIRST_WEIGHT: Final = 2.0
_KEPT: Final = 0.9
"""Weight of what was seen before, when another guess is settled."""
_MEMORY: Final = 8
"""Steps after which one that was unlike the others hardly counts."""


class Acceptance:
    """How often proposed tokens of one completion are right: the chance of each if those before it are."""

    def __init__(self) -> None:
        self._right = _FIRST_RATE * _FIRST_WEIGHT
        self._tried = _FIRST_WEIGHT
        self._guess: Sequence[int] = ()
        self._begin = 0

    @property
    def rate(self) -> float:
        """The chance, in (0, 1)."""
        return self._right / self._tried

    @property
    def is_guessing(self) -> bool:
        """Whether a guess is kept that may still turn out right."""
        return bool(self._guess)

    def guess(self, token_ids: Sequence[int], *, begin: int) -> None:
        """Keep a guess of the tokens from index `begin` on."""
        self._guess, self._begin = token_ids, begin

    def look(self, known: list[int]) -> None:
        """Compare the guess with the known tokens, and settle it once it is all right or one is wrong."""
        if not self._guess:
            return
        came = known[self._begin : self._begin + len(self._guess)]
        right = next((i for i, token in enumerate(came) if token != self._guess[i]), len(came))
        if right == len(came) < len(self._guess):
            return
        self._right = self._right * _KEPT + right
        self._tried = self._tried * _KEPT + min(right + 1, len(self._guess))
        self._guess = ()


@dataclass(slots=True)
class _Mean:
    """Mean of recent seconds; the first value, which prepares something, does not count."""

    seconds: float | None = None
    number: int = 0

    def add(self, seconds: float) -> None:
        self.number += 1
        if self.number == 2:
            self.seconds = seconds
        elif self.seconds is not None:
            self.seconds += (seconds - self.seconds) / min(self.number - 1, _MEMORY)


class StepSeconds:
    """Seconds of steps by their number of rows: of those that only decode, and of those with proposals."""

    def __init__(self) -> None:
        self._plain: dict[int, _Mean] = {}
        self._proposing: dict[int, _Mean] = {}
        self._answered_s = 0.0
        self._since_proposal = 0

    def add(self, step: ScheduledStep, *, began_s: float, seconds: float, on_ranks_s: float) -> None:
        """Count an answered step.

        Answers of steps that overlap come together, so ranks know better how long each took.
        """
        gap_s, self._answered_s = began_s - self._answered_s, began_s + seconds
        if step.spans or step.masked or not step.decodes.slots:
            return
        if not step.proposals:
            self._plain.setdefault(step.num_tokens, _Mean()).add(on_ranks_s)
            self._since_proposal += 1
            if self._since_proposal == RETRY_STEPS:
                self._proposing.clear()
            return
        self._since_proposal = 0
        # Making the next step takes time, too, while ranks wait; a longer gap is one in which nobody asked.
        waited_s = gap_s if 0 < gap_s < seconds else 0.0
        self._proposing.setdefault(step.num_tokens, _Mean()).add(seconds + waited_s)

    def plain(self, rows: int) -> float | None:
        """Return the seconds of a step that only decodes; None if they are not known."""
        mean = self._plain.get(rows)
        return None if mean is None else mean.seconds

    def proposing(self, rows: int, *, plain_s: float, plain_rows: int) -> float:
        """Return or estimate the seconds of a step with proposals, of so many rows in all."""
        known = {plain_rows: plain_s}
        known |= {other: mean.seconds for other, mean in self._proposing.items() if mean.seconds is not None}
        fewer = max(other for other in known if other <= rows)
        more = min((other for other in known if other >= rows), default=fewer)
        slope = (known[more] - known[fewer]) / (more - fewer) if more > fewer else plain_s * ROW_COST
        return known[fewer] + slope * (rows - fewer)


@dataclass(slots=True)
class _Came:
    """Steps with proposals, what was proposed in them, and how much of it was accepted."""

    steps: int = 0
    proposals: int = 0
    proposed: int = 0
    accepted: int = 0

    def add(self, step: ScheduledStep, *, num_tokens: int) -> None:
        self.steps += 1
        self.proposals += len(step.proposals)
        self.proposed += sum(map(len, step.proposals.values()))
        self.accepted += num_tokens - len(step.decodes.slots) - sum(span.sample for span in step.spans)

    def describe(self) -> str:
        if not self.steps:
            return "nothing proposed yet"
        return (
            f"{self.accepted} of {self.proposed} proposed tokens accepted, {self.proposed / self.proposals:.1f} a "
            f"proposal, {1 + self.accepted / self.proposals:.2f} tokens a request and step"
        )


class Speculator:
    """Decides on the proposals of one engine. Without a config it proposes nothing, and does nothing."""

    def __init__(self, config: SpeculationConfig | None, proposer: NGramProposer | None = None) -> None:
        self._config = config
        self._proposer = proposer or NGramProposer()
        self._acceptances: dict[Completion, Acceptance] = {}
        self._seconds, self._came = StepSeconds(), _Came()

    def add_step(
        self, step: ScheduledStep, *, began_s: float, seconds: float, on_ranks_s: float, num_tokens: int
    ) -> None:
        """Count a step that was sent, or became the oldest one out, at `began_s`, and was answered `seconds` later.

        It took ranks `on_ranks_s` and brought so many tokens.
        """
        if self._config is None:
            return
        self._seconds.add(step, began_s=began_s, seconds=seconds, on_ranks_s=on_ranks_s)
        if step.proposals:
            self._came.add(step, num_tokens=num_tokens)

    def describe(self) -> str:
        """Return the config in force and what has come of it, for a person; "" without a config."""
        if self._config is None:
            return ""
        return f"{'Auto' if self._config.only_if_faster else 'NGram'}, {self._came.describe()}"

    def begin_epoch(self) -> None:
        """Forget how fast the ranks were: there are others."""
        self._seconds, self._came = StepSeconds(), _Came()

    def ended(self, completion: Completion) -> None:
        """Take note that a completion has ended."""
        if self._config is not None:
            self._acceptances.pop(completion, None)
            self._proposer.ended(completion)

    def is_worth_a_wait(self, completions: Sequence[Completion]) -> bool:
        """Return whether to let the steps out come back, so that tokens may be proposed to completions that decode."""
        return bool(self._config is not None and self._choose(self._config, completions, most=MOST_COMPLETIONS))

    def proposals(self, completions: Sequence[Completion], *, most: int) -> dict[Completion, Sequence[int]]:
        """Return the proposals for a step in which these decode, with at most `most` tokens in all."""
        if self._config is None:
            return {}
        chosen = self._choose(self._config, completions, most=most)
        for completion, token_ids in chosen.items():
            self._acceptances[completion].guess(token_ids, begin=completion.num_tokens)
        return chosen

    def _choose(
        self, config: SpeculationConfig, completions: Sequence[Completion], *, most: int
    ) -> dict[Completion, Sequence[int]]:
        if not 0 < len(completions) <= MOST_COMPLETIONS:
            return {}
        ideas: dict[Completion, Sequence[int]] = {}
        for completion in completions:
            tokens = self._idea(config, completion)[:most]
            if tokens:
                ideas[completion] = tokens
                most -= len(tokens)
        plain_s = self._seconds.plain(len(completions))
        if not ideas or plain_s is None:
            return {} if config.only_if_faster else ideas
        return self._fastest(ideas, len(completions), plain_s, margin=MARGIN if config.only_if_faster else 0.0)

    def _idea(self, config: SpeculationConfig, completion: Completion) -> Sequence[int]:
        """Return the tokens that are worth a proposal by the completion's own acceptance."""
        room = completion.max_num_tokens - completion.num_tokens - 1
        if room < 1:
            return ()
        acceptance = self._acceptances.setdefault(completion, Acceptance())
        acceptance.look(completion.token_ids)
        tokens = self._proposer.propose(completion, min(config.max_tokens, room))
        # Nothing is drawn behind a token that ends the completion.
        ends = completion.end_token_ids
        tokens = tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]
        if not acceptance.is_guessing:
            acceptance.guess(tokens, begin=completion.num_tokens)
        return tokens[: _width(acceptance.rate, config.max_tokens)]

    def _fastest(
        self, ideas: dict[Completion, Sequence[int]], number: int, plain_s: float, *, margin: float
    ) -> dict[Completion, Sequence[int]]:
        """Return the ideas, cut to the length that promises the most tokens per second.

        None if that is less than `margin` times what `number` completions get in steps of `plain_s`.
        """
        best, best_length = margin * number / plain_s, 0
        for length in range(1, max(map(len, ideas.values())) + 1):
            cut = {completion: tokens[:length] for completion, tokens in ideas.items()}
            rows = number + sum(map(len, cut.values()))
            tokens = number + sum(_expected(self._acceptances[each].rate, len(cut[each])) for each in cut)
            speed = tokens / self._seconds.proposing(rows, plain_s=plain_s, plain_rows=number)
            if speed > best:
                best, best_length = speed, length
        return {completion: tokens[:best_length] for completion, tokens in ideas.items()} if best_length else {}


def _width(rate: float, most: int) -> int:
    """Return how many tokens are accepted with `MIN_CHANCE` each; guesses go on where that is none."""
    width, chance = 0, rate
    while width < most and chance >= MIN_CHANCE:
        width, chance = width + 1, chance * rate
    return width


def _expected(rate: float, length: int) -> float:
    """Return how many tokens of a proposal are accepted in the mean."""
    return sum(rate**i for i in range(1, length + 1))


NO_SPECULATION: Final = Speculator(None)

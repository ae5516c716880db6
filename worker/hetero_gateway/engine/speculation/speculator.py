"""Speculator: whether to propose tokens, and how many.

Proposals pay where they are often right and a row more costs a step little. Steps with proposals go out one at a time,
because the next proposal follows from what this one gave; other steps overlap. So three things are measured while
requests are served: how often proposed tokens are right, for each completion and by how long a match they follow; how
long steps take that only decode; and how long steps with proposals take, up to the next. Where no steps with so many
rows were measured, they are estimated: between those with fewer and more rows, or from those with fewer, with
`ROW_COST` a row more. A new completion is expected to be as easy as the last ones.

How often a proposal is right is seen without proposing: a *guess* is kept until the completion's tokens have come and
show what of it was right. So a completion whose guesses fail costs ranks nothing. Real proposals are such guesses, too.

As many tokens are proposed as promise the most tokens per second by these numbers, and none that a completion's own
acceptance makes improbable. With `only_if_faster` (Auto) none are proposed unless that is `MARGIN` times the tokens per
second of steps that overlap. With more than `MOST_COMPLETIONS` nothing is looked up: each row costs arithmetic then.

Guesses of a draft model or a prediction head are not free: ranks compute them behind a step's draws. So what is
chosen by these numbers is how many tokens to draft behind a step; what was drafted is proposed. Where nothing was
drafted for `RETRY_STEPS`, all that was learned is forgotten. Each time that the next try does not gain, twice as many
steps go by before another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from hetero_gateway.engine.config import SpeculationConfig
from hetero_gateway.engine.request import Completion
from hetero_gateway.engine.speculation.ngram import NGramProposer, Proposal
from hetero_gateway.engine.step import ScheduledStep

MOST_COMPLETIONS: Final = 16
MARGIN: Final = 1.1
ROW_COST: Final = 0.1
"""Part of a step's time that a row more is taken to cost before it was measured."""
MIN_CHANCE: Final = 0.25
"""A token is proposed if it is accepted with this chance at least."""
RETRY_STEPS: Final = 500
"""Steps that only decode after which measured steps with proposals are forgotten: they may be faster by now."""
MOST_RETRY_STEPS: Final = 16 * RETRY_STEPS
"""Most such steps, where tries have not gained."""
_FIRST_RATES: Final = {0: 0.4, 3: 0.6, 4: 0.8, 8: 0.9}
"""Acceptance that is assumed at first, with the weight of `_FIRST_WEIGHT` tokens, by the length of the match from which
on it holds."""
_FIRST_WEIGHT: Final = 2.0
_KEPT: Final = 0.9
"""Weight of what was seen before, when another guess is settled."""
_MEMORY: Final = 8
"""Steps after which one that was unlike the others hardly counts."""
_GAIN_KEPT: Final = 0.98
"""Weight of earlier steps in the gain, when another step with proposals is counted."""


class Proposer(Protocol):
    """Source of proposals. A wrong one costs time, and changes nothing else."""

    def propose(self, completion: Completion, most: int) -> Proposal:
        """Return at most so many tokens that may follow the completion's known ones; none if there is no idea."""
        ...

    def ended(self, completion: Completion) -> None:
        """Take note that a completion has ended."""
        ...


class DraftProposer:
    """Proposer of what the draft model drew behind a step's tokens, until the next token is known."""

    def __init__(self) -> None:
        self._drafts: dict[Completion, tuple[int, Sequence[int]]] = {}
        """Drafted tokens, and the number of known tokens that they follow."""

    def take(self, completion: Completion, token_ids: Sequence[int]) -> None:
        """Keep what was drafted behind the completion's known tokens."""
        self._drafts[completion] = completion.num_tokens, token_ids

    def propose(self, completion: Completion, most: int) -> Proposal:
        """Return at most so many drafted tokens; none if they followed other tokens."""
        known, token_ids = self._drafts.get(completion, (0, ()))
        return Proposal(token_ids[:most] if known == completion.num_tokens else ())

    def ended(self, completion: Completion) -> None:
        """Take note that a completion has ended."""
        self._drafts.pop(completion, None)


class Acceptance:
    """How often proposed tokens of a completion are right, by their match: the chance of each if those before it are.

    `first`: what is assumed before any was tried, by the length of the match from which on it holds.
    """

    def __init__(self, first: Mapping[int, float]) -> None:
        self._right = {match: rate * _FIRST_WEIGHT for match, rate in first.items()}
        self._tried = dict.fromkeys(first, _FIRST_WEIGHT)
        self._guess, self._begin = Proposal(), 0

    @property
    def rates(self) -> dict[int, float]:
        """The chances, in (0, 1), by the length of the match from which on they hold."""
        return {match: right / self._tried[match] for match, right in self._right.items()}

    def rate(self, match: int) -> float:
        """Return the chance of tokens with such a match."""
        longest = self._class_of(match)
        return self._right[longest] / self._tried[longest]

    @property
    def is_guessing(self) -> bool:
        """Whether a guess is kept that may still turn out right."""
        return bool(self._guess.token_ids)

    def guess(self, proposal: Proposal, *, begin: int) -> None:
        """Keep a guess of the tokens from index `begin` on."""
        self._guess, self._begin = proposal, begin

    def look(self, known: list[int]) -> None:
        """Compare the guess with the known tokens, and settle it once it is all right or one is wrong."""
        guess = self._guess.token_ids
        if not guess:
            return
        came = known[self._begin : self._begin + len(guess)]
        right = next((i for i, token in enumerate(came) if token != guess[i]), len(came))
        if right == len(came) < len(guess):
            return
        match = self._class_of(self._guess.match)
        self._right[match] = self._right[match] * _KEPT + right
        self._tried[match] = self._tried[match] * _KEPT + min(right + 1, len(guess))
        self._guess = Proposal()

    def _class_of(self, match: int) -> int:
        return max(least for least in self._right if least <= match)


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
        self._since_proposal, self._retry_steps = 0, RETRY_STEPS
        self._gain_plain_s = self._gain_s = 0.0
        """Seconds of late steps with proposals, and of as many tokens without."""

    @property
    def gain(self) -> float:
        """Tokens per second of late steps with proposals, times those of steps without; 0: not measured."""
        return self._gain_plain_s / self._gain_s if self._gain_s else 0.0

    def add(self, step: ScheduledStep, *, began_s: float, seconds: float, on_ranks_s: float, num_tokens: int) -> bool:
        """Count an answered step that brought so many tokens; return whether steps with proposals were forgotten.

        Answers of steps that overlap come together, so ranks know better how long each took.
        """
        gap_s, self._answered_s = began_s - self._answered_s, began_s + seconds
        if step.spans or step.masked or not step.decodes.slots:
            return False
        if not step.proposals:
            if step.plan.draft_slots:
                return False
            self._plain.setdefault(step.num_tokens, _Mean()).add(on_ranks_s)
            self._since_proposal += 1
            if self._since_proposal < self._retry_steps:
                return False
            self._since_proposal = 0
            self._retry_steps = min(2 * self._retry_steps, MOST_RETRY_STEPS)
            self._proposing.clear()
            return True
        self._since_proposal = 0
        # Making the next step takes time, too, while ranks wait; a longer gap is one in which nobody asked.
        seconds += gap_s if 0 < gap_s < seconds else 0.0
        mean, number = self._proposing.setdefault(step.num_tokens, _Mean()), len(step.decodes.slots)
        mean.add(seconds)
        plain_s = self.plain(number)
        if plain_s is not None and mean.seconds is not None:
            self._gain_plain_s = self._gain_plain_s * _GAIN_KEPT + plain_s * num_tokens / number
            self._gain_s = self._gain_s * _GAIN_KEPT + seconds
        if self.gain > 1:
            self._retry_steps = RETRY_STEPS
        return False

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

    def __init__(self, config: SpeculationConfig | None, proposer: Proposer | None = None) -> None:
        self._config = config
        self._drafts = DraftProposer() if config is not None and config.drafts else None
        self._proposer = proposer or self._drafts or NGramProposer()
        self._acceptances: dict[Completion, Acceptance] = {}
        self._usual_rates = dict(_FIRST_RATES)
        """Acceptance of the last completions."""
        self._seconds, self._came = StepSeconds(), _Came()

    def add_step(
        self, step: ScheduledStep, *, began_s: float, seconds: float, on_ranks_s: float, num_tokens: int
    ) -> None:
        """Count a step that was sent, or became the oldest one out, at `began_s`, and was answered `seconds` later.

        It took ranks `on_ranks_s` and brought so many tokens.
        """
        if self._config is None:
            return
        forgot = self._seconds.add(step, began_s=began_s, seconds=seconds, on_ranks_s=on_ranks_s, num_tokens=num_tokens)
        if forgot and self._drafts is not None:
            self._acceptances.clear()
            self._usual_rates = dict(_FIRST_RATES)
        if step.proposals:
            self._came.add(step, num_tokens=num_tokens)

    def describe(self) -> str:
        """Return the config in force and what has come of it, for a person; "" without a config."""
        if self._config is None:
            return ""
        source = "NGram" if self._drafts is None else "MTP" if self._config.has_head else "Draft"
        gain = f", {self.gain:.2f} times as fast as without" if self.gain else ""
        return f"{f'Auto ({source})' if self._config.only_if_faster else source}, {self._came.describe()}{gain}"

    @property
    def gain(self) -> float:
        """Tokens per second of late steps with proposals, times those of steps without; 0: not measured."""
        return self._seconds.gain

    def begin_epoch(self) -> None:
        """Forget how fast the ranks were: there are others."""
        self._seconds, self._came = StepSeconds(), _Came()

    def ended(self, completion: Completion) -> None:
        """Take note that a completion has ended."""
        if self._config is not None:
            acceptance = self._acceptances.pop(completion, None)
            if acceptance is not None:
                acceptance.look(completion.token_ids)
                for match, rate in acceptance.rates.items():
                    self._usual_rates[match] += (rate - self._usual_rates[match]) / 2
            self._proposer.ended(completion)

    def is_worth_a_wait(self, completions: Sequence[Completion]) -> bool:
        """Return whether to let the steps out come back, so that tokens may be proposed to completions that decode."""
        if self._drafts is not None:
            return self.num_drafts(completions, most=MOST_COMPLETIONS * len(completions)) > 0
        return bool(self._config is not None and self._choose(self._config, completions, most=MOST_COMPLETIONS))

    def num_drafts(self, completions: Sequence[Completion], *, most: int) -> int:
        """Return how many tokens to draft for each behind a step in which these decode, `most` in all; 0: none."""
        config, number = self._config, len(completions)
        if config is None or self._drafts is None or not 0 < number <= MOST_COMPLETIONS:
            return 0
        ideas = [self._draft_idea(config, each, most // number) for each in completions]
        plain_s = self._seconds.plain(number)
        if plain_s is None:
            return 0 if config.only_if_faster else max(length for length, _ in ideas)
        return self._best_length(ideas, plain_s, margin=MARGIN if config.only_if_faster else 0.0)

    def take_draft(self, completion: Completion, token_ids: Sequence[int]) -> None:
        """Take what the draft model proposes behind the completion's known tokens."""
        if self._drafts is not None:
            self._drafts.take(completion, token_ids)

    def proposals(self, completions: Sequence[Completion], *, most: int) -> dict[Completion, Sequence[int]]:
        """Return the proposals for a step in which these decode, with at most `most` tokens in all."""
        if self._config is None:
            return {}
        chosen = self._choose(self._config, completions, most=most)
        for completion, proposal in chosen.items():
            self._acceptances[completion].guess(proposal, begin=completion.num_tokens)
        return {completion: proposal.token_ids for completion, proposal in chosen.items()}

    def _choose(
        self, config: SpeculationConfig, completions: Sequence[Completion], *, most: int
    ) -> dict[Completion, Proposal]:
        if not 0 < len(completions) <= MOST_COMPLETIONS:
            return {}
        ideas: dict[Completion, Proposal] = {}
        for completion in completions:
            proposal = _cut(self._idea(config, completion), most)
            if proposal.token_ids:
                ideas[completion] = proposal
                most -= len(proposal.token_ids)
        plain_s = self._seconds.plain(len(completions))
        if not ideas or self._drafts is not None:
            return ideas
        if plain_s is None:
            return {} if config.only_if_faster else ideas
        lengths = [(0, 0.0)] * (len(completions) - len(ideas))
        for completion, proposal in ideas.items():
            lengths.append((len(proposal.token_ids), self._acceptances[completion].rate(proposal.match)))
        best = self._best_length(lengths, plain_s, margin=MARGIN if config.only_if_faster else 0.0)
        return {completion: _cut(proposal, best) for completion, proposal in ideas.items()} if best else {}

    def _acceptance(self, completion: Completion) -> Acceptance:
        """Return what is known of a completion, with all its tokens taken into account."""
        acceptance = self._acceptances.get(completion)
        if acceptance is None:
            acceptance = self._acceptances[completion] = Acceptance(self._usual_rates)
        acceptance.look(completion.token_ids)
        return acceptance

    def _draft_idea(self, config: SpeculationConfig, completion: Completion, most: int) -> tuple[int, float]:
        """Return how many tokens to draft behind the next one are worth it by the completion's own acceptance; it."""
        rate = self._acceptance(completion).rate(0)
        room = completion.max_num_tokens - completion.num_tokens - 2
        width = _width(rate, config.max_tokens)
        return max(0, min(width if config.only_if_faster else max(width, 1), room, most)), rate

    def _idea(self, config: SpeculationConfig, completion: Completion) -> Proposal:
        """Return the tokens that are worth a proposal by the completion's own acceptance."""
        room = completion.max_num_tokens - completion.num_tokens - 1
        if room < 1:
            return Proposal()
        acceptance = self._acceptance(completion)
        token_ids, match = self._proposer.propose(completion, min(config.max_tokens, room))
        # Nothing is drawn behind a token that ends the completion.
        ends = completion.end_token_ids
        end = next((i for i, token in enumerate(token_ids) if token in ends), len(token_ids))
        proposal = Proposal(token_ids[:end], match)
        if not acceptance.is_guessing:
            acceptance.guess(proposal, begin=completion.num_tokens)
        return (
            proposal if self._drafts is not None else _cut(proposal, _width(acceptance.rate(match), config.max_tokens))
        )

    def _best_length(self, ideas: Sequence[tuple[int, float]], plain_s: float, *, margin: float) -> int:
        """Return the length, to which proposals are cut, that promises the most tokens per second.

        `ideas`: for each completion the length of its proposal and the chance that a token is right. 0 if the best is
        less than `margin` times what the completions get in steps of `plain_s`.
        """
        number = len(ideas)
        best, best_length = margin * number / plain_s, 0
        for length in range(1, max(own for own, _ in ideas) + 1):
            cut = [(min(length, own), rate) for own, rate in ideas]
            rows = number + sum(own for own, _ in cut)
            tokens = number + sum(_expected(rate, own) for own, rate in cut)
            speed = tokens / self._seconds.proposing(rows, plain_s=plain_s, plain_rows=number)
            if speed > best:
                best, best_length = speed, length
        return best_length


def _cut(proposal: Proposal, most: int) -> Proposal:
    return proposal._replace(token_ids=proposal.token_ids[:most])


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

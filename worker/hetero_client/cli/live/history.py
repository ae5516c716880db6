"""Looks at a group over time, and what follows from two of them: rates, times of steps, and events.

Counts of a gateway begin again when it is replaced, and those of a rank with every epoch. Differences are taken only
where both looks count from the same beginning; otherwise all that was counted since then stands for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from hetero_api.group_state import GroupState
from hetero_client.admin import GroupTopology, RankView, StatsView, StepTimesView

WINDOW_S: Final = 5.0
"""Rates are of the looks within this time."""
MAX_EVENTS: Final = 6


@dataclass(frozen=True, slots=True)
class Look:
    """A group at one moment. `at_s` is a monotonic time, `clock` the time of day for people."""

    at_s: float
    clock: str
    topology: GroupTopology
    stats: StatsView


@dataclass(frozen=True, slots=True)
class StepPace:
    """Mean times of steps of one kind; 0 steps: there were none."""

    steps: int
    step_s: float
    exchange_s: float

    @property
    def exchange_share(self) -> float:
        """Share of the time in the exchange, 0 to 1."""
        return self.exchange_s / self.step_s if self.step_s else 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a group: tokens and steps a second. None: one look does not tell."""

    generated: float
    prompt: float | None = None
    steps: float | None = None


@dataclass(slots=True)
class History:
    """Looks of the last seconds, and events since the first. Call `add` with every look, in their order."""

    looks: deque[Look] = field(default_factory=deque)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    _silent_since_s: float | None = None
    _down_since_s: float | None = None

    @property
    def last(self) -> Look:
        """The newest look; there must be one."""
        return self.looks[-1]

    def add(self, look: Look) -> None:
        """Take a look in, and note what changed since the one before."""
        if self.looks:
            self._note_changes(self.last, look)
        self.looks.append(look)
        while look.at_s - self.looks[0].at_s > WINDOW_S:
            self.looks.popleft()

    def note_silence(self, clock: str, *, at_s: float, problem: str) -> None:
        """Note that the gateway does not answer; once until it does."""
        if self._silent_since_s is None:
            self._silent_since_s = at_s
            self.events.append(f"{clock}  {problem}")

    def rates(self) -> Rates:
        """Return rates within the window; with a single look only the gateway's own rate of generated tokens."""
        first, last = self.looks[0], self.last
        seconds = last.at_s - first.at_s
        if not seconds or _restarted(first.stats, last.stats):
            return Rates(last.topology.tokens_per_second)
        return Rates(
            generated=(last.stats.generated_tokens - first.stats.generated_tokens) / seconds,
            prompt=(_prompt_tokens(last.stats) - _prompt_tokens(first.stats)) / seconds,
            steps=(last.stats.steps - first.stats.steps) / seconds,
        )

    def decode_pace(self, rank: int) -> StepPace:
        """Return the pace of a rank's steps that only decoded."""
        first, last = self._ends(rank)
        return _pace(first.decode if first else None, last.decode)

    def prefill_pace(self, rank: int) -> StepPace:
        """Return the pace of a rank's other steps."""
        first, last = self._ends(rank)
        return _pace(first.prefill if first else None, last.prefill)

    def _ends(self, rank: int) -> tuple[RankView | None, RankView]:
        """Return the rank in the first look of the newest epoch, None if that is the newest look, and in this one."""
        last = self.last
        first = next(look for look in self.looks if look.topology.epoch == last.topology.epoch)
        return None if first is last else _rank_of(first.topology, rank), last.topology.ranks[rank]

    def _note_changes(self, before: Look, now: Look) -> None:
        if self._silent_since_s is not None:
            self._note(now, f"the gateway answers again, after {now.at_s - self._silent_since_s:.1f} s")
            self._silent_since_s = None
        old, new = before.topology, now.topology
        if (old.state, old.epoch) == (new.state, new.epoch):
            return
        reason = f" ({new.reason})" if new.reason else ""
        self._note(now, f"epoch {new.epoch} is {new.state.value}{reason}{self._healed(now)}")
        if new.state == GroupState.READY:
            self._down_since_s = None
        elif old.state == GroupState.READY:
            self._down_since_s = now.at_s

    def _healed(self, now: Look) -> str:
        """Return how long the group did not serve, if it does again."""
        if now.topology.state != GroupState.READY or self._down_since_s is None:
            return ""
        return f", after {now.at_s - self._down_since_s:.1f} s"

    def _note(self, look: Look, event: str) -> None:
        self.events.append(f"{look.clock}  {event}")


def _prompt_tokens(stats: StatsView) -> int:
    return stats.prompt_tokens + stats.cached_tokens


def _restarted(first: StatsView, last: StatsView) -> bool:
    return last.steps < first.steps or last.generated_tokens < first.generated_tokens


def _rank_of(topology: GroupTopology, rank: int) -> RankView | None:
    return topology.ranks[rank] if rank < len(topology.ranks) else None


def _pace(first: StepTimesView | None, last: StepTimesView) -> StepPace:
    """Return the pace between two counts; of all since the epoch began where none came between them."""
    begin = first if first and first.steps < last.steps else StepTimesView()
    steps = last.steps - begin.steps
    if not steps:
        return StepPace(0, 0.0, 0.0)
    return StepPace(steps, (last.seconds - begin.seconds) / steps, (last.exchange_s - begin.exchange_s) / steps)

"""StepCounts: a rank's steps of one epoch and their time, for its heartbeats.

The main thread adds steps, in less than a microsecond each; the heartbeat's thread reads.
"""

from __future__ import annotations

from collections.abc import Callable

from hetero_api.v1 import ranks_pb2
from hetero_worker.runners.plan_check import num_decode_rows


class _Times:
    """Sums over the steps of one phase."""

    __slots__ = ("exchange_s", "rows", "seconds", "steps")

    def __init__(self) -> None:
        self.steps = self.rows = 0
        self.seconds = self.exchange_s = 0.0

    def message(self) -> ranks_pb2.StepTimes:
        return ranks_pb2.StepTimes(
            steps=self.steps, rows=self.rows, seconds=self.seconds, exchange_s=min(self.exchange_s, self.seconds)
        )


def num_rows(plan: ranks_pb2.StepPlan) -> int:
    """Return the rows that a plan computes."""
    return num_decode_rows(plan) + sum(span.num_tokens for span in plan.spans)


def _nothing_exchanged() -> float:
    return 0.0


class StepCounts:
    """Steps by phase: those that only decode, and others. `exchange_s` returns the seconds exchanged so far."""

    def __init__(self, exchange_s: Callable[[], float] = _nothing_exchanged) -> None:
        self._exchange_s = exchange_s
        self._exchanged_s = exchange_s()
        self._decode = _Times()
        self._prefill = _Times()

    def add(self, plan: ranks_pb2.StepPlan, seconds: float) -> float:
        """Add a step that took `seconds`, and return those that were exchanged in it.

        A plan that computes nothing, or is a command, does not count.
        """
        exchanged_s, before_s = self._exchange_s(), self._exchanged_s
        self._exchanged_s = exchanged_s
        times = self._prefill if plan.spans else self._decode
        if rows := num_rows(plan):
            times.steps += 1
            times.rows += rows
            times.seconds += seconds
            times.exchange_s += exchanged_s - before_s
        return exchanged_s - before_s

    def messages(self) -> tuple[ranks_pb2.StepTimes, ranks_pb2.StepTimes]:
        """Return the sums over steps that only decoded, and over others."""
        return self._decode.message(), self._prefill.message()

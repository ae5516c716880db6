"""Pauses between attempts, the time of day, and a callback for when nobody listens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

CAP_S: Final = 30.0
"""Longest pause between attempts to reach the API server: after an outage everything is tried again within it."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses of `first_s`, doubled each time, up to `cap_s`; each shortened by up to `jitter` of itself."""

    first_s: float = 0.5
    cap_s: float = CAP_S
    jitter: float = 0.5

    def pause_s(self, failures: int) -> float:
        """Return the pause after so many failures in a row (from 1)."""
        whole: float = min(self.cap_s, self.first_s * 2.0 ** min(failures - 1, 32))
        return whole * (1 - self.jitter * random.random())

    def __iter__(self) -> Iterator[float]:
        """Yield pauses without end. Each iteration starts over: kopf iterates once a request."""
        failures = 0
        while True:
            failures += 1
            yield self.pause_s(failures)


def now_utc() -> datetime:
    """Return the time of day with its time zone. Durations are measured on a monotonic clock."""
    return datetime.now(UTC)


def unobserved(*_: object) -> None:
    """Ignore the arguments: the callback of those who do not count."""

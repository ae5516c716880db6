"""Use that each principal makes of its limits. One asyncio loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from hetero_api.api_keys import Limits
from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.server.access.principals import Principal
from hetero_gateway.server.errors import LimitExceeded

_MINUTE_S: Final = 60.0
_CONCURRENCY_RETRY_S: Final = 1.0
"""Nobody knows when a completion ends."""


class TokenBucket:
    """Amount that grows by `rate` a second up to `capacity`. What was spent beyond it must grow back first."""

    def __init__(self, *, rate: float, capacity: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._capacity = capacity
        self._clock = clock
        self._level = capacity
        self._at_s = clock()

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` is there, or as much as there can be; 0 if it is."""
        now_s = self._clock()
        self._level = min(self._capacity, self._level + self._rate * (now_s - self._at_s))
        self._at_s = now_s
        return max(0.0, (min(amount, self._capacity) - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """Spend `amount`, whether or not it is there."""
        self._level -= amount


class Meter:
    """Use of one principal."""

    def __init__(self, name: str, *, clock: Callable[[], float]) -> None:
        self.running = 0
        """Completions in flight."""
        self._name = name
        self._clock = clock
        self.apply(Limits())

    def apply(self, limits: Limits) -> None:
        """Hold the principal to these limits from now on: rates begin again, and what runs still counts."""
        self.limits = limits
        per_s, per_minute = limits.requests_per_second, limits.tokens_per_minute
        self._calls = None if per_s is None else self._bucket(per_s, max(1.0, per_s))
        self._tokens = None if per_minute is None else self._bucket(per_minute / _MINUTE_S, per_minute)

    def _bucket(self, rate: float, capacity: float) -> TokenBucket:
        return TokenBucket(rate=rate, capacity=capacity, clock=self._clock)

    def count_call(self) -> None:
        """Count a call. Raises LimitExceeded, and then counts nothing."""
        if self._calls is not None:
            self._check(self._calls.wait_s(1), f"{self.limits.requests_per_second:g} calls a second")
            self._calls.take(1)

    def begin(self, *, completions: int, prompt_tokens: int, prompts: int = 1) -> None:
        """Count requests that begin together. Raises LimitExceeded or InvalidRequest, and then counts nothing."""
        most = self.limits.concurrent_completions
        if most is not None and completions > most:
            field = "sampling.n" if prompts == 1 else "prompt"
            times = "" if prompts == 1 else f"times n, of {prompts} prompts, "
            raise InvalidRequest(field, f"{times}must be at most {most} with this key, not {completions}")
        if most is not None and self.running + completions > most:
            self._check(_CONCURRENCY_RETRY_S, f"{most} completions at a time")
        if self._tokens is not None and prompt_tokens:  # none: they were counted before
            self._check(self._tokens.wait_s(prompt_tokens), f"{self.limits.tokens_per_minute} tokens a minute")
            self._tokens.take(prompt_tokens)
        self.running += completions

    def end(self, *, completions: int, more_tokens: int) -> None:
        """Count the end of a request, and tokens that were not counted at its beginning; below 0: too many were."""
        self.running -= completions
        if self._tokens is not None:
            self._tokens.take(more_tokens)

    def _check(self, wait_s: float, limit: str) -> None:
        if wait_s > 0:
            retry_s = math.ceil(wait_s)
            raise LimitExceeded(f"{self._name!r} may have {limit}; try again in {retry_s} s", retry_after_s=retry_s)


class Meters:
    """Use of all principals."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meters: dict[str, Meter] = {}

    def of(self, principal: Principal) -> Meter:
        """Return a principal's use, for a call that arrives: under the limits that its key has now."""
        meter = self.under_way(principal)
        if meter.limits != principal.limits:
            meter.apply(principal.limits)
        return meter

    def under_way(self, principal: Principal) -> Meter:
        """Return a principal's use, for a call under way: its key may have got other limits since it arrived."""
        meter = self._meters.get(principal.name)
        if meter is None:
            meter = self._meters[principal.name] = Meter(principal.name, clock=self._clock)
            meter.apply(principal.limits)
        return meter

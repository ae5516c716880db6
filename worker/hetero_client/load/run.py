"""A load: requests of fixed lengths, some at a time or at a rate, and when each piece of their answers came.

At a rate, requests come at random times (a Poisson process, drawn from the seed) and do not wait for one another. Their
times count from when they were due, so that a client which is late does not make the server look faster. Prompts
are random, so the prefix cache has them only where an earlier load had the same seed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from hetero_client.errors import ClientError
from hetero_client.load.doors import Door

_FIRST_TOKEN, _NUM_TOKENS = 8, 240
"""Token ids of prompts: every vocabulary has them, and few are marks that begin or end texts."""
MAX_THREADS: Final = 512
"""Requests that are under way at a rate, at most."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load. `rate` in requests a second replaces `concurrency`."""

    num_requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    rate: float | None = None
    seed: int = 0

    def prompt(self, number: int) -> list[int]:
        """Return the token ids of a request's prompt."""
        draw = random.Random(f"{self.seed} {number}")
        return [_FIRST_TOKEN + draw.randrange(_NUM_TOKENS) for _ in range(self.prompt_tokens)]

    def due_times(self) -> Iterator[float]:
        """Yield when each request is due, in seconds since the beginning; all at once without a rate."""
        draw, due_s = random.Random(self.seed), 0.0
        for _ in range(self.num_requests):
            yield due_s
            due_s += draw.expovariate(self.rate) if self.rate else 0.0

    @property
    def num_threads(self) -> int:
        """Most requests that are under way."""
        return min(self.num_requests, MAX_THREADS if self.rate else self.concurrency)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it. Times are seconds since the load began."""

    due_s: float
    """When it was to be sent; without a rate, when it was."""
    ended_s: float
    pieces: tuple[tuple[float, int], ...]
    """When each piece of the answer came, and its number of tokens."""
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return sum(count for _, count in self.pieces)


def run_load(door: Door, plan: LoadPlan, *, clock: Callable[[], float] = time.monotonic) -> list[Sample]:
    """Run the load to its end; return a sample of each request."""
    began_s = clock()

    def ask(number: int, due_s: float | None) -> Sample:
        sent_s = clock() - began_s
        return _ask(door, plan, number, due_s=sent_s if due_s is None else due_s, now=lambda: clock() - began_s)

    futures = []
    pool = ThreadPoolExecutor(plan.num_threads)
    try:
        for number, due_s in enumerate(plan.due_times()):
            if plan.rate:
                time.sleep(max(0.0, due_s - (clock() - began_s)))
            futures.append(pool.submit(ask, number, due_s if plan.rate else None))
        return [future.result() for future in futures]
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        door.close()  # ends the streams, for which the interpreter would wait
        raise
    finally:
        pool.shutdown()


def _ask(door: Door, plan: LoadPlan, number: int, *, due_s: float, now: Callable[[], float]) -> Sample:
    pieces: list[tuple[float, int]] = []
    try:
        for count in door.stream(plan.prompt(number), output_tokens=plan.output_tokens):
            pieces.append((now(), count))
    except ClientError as error:
        return Sample(due_s, now(), tuple(pieces), str(error) or type(error).__name__)
    return Sample(due_s, now(), tuple(pieces))

"""Eight clients at once, each reading a stream to its end, whatever happens meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from hetero_client import Delta, Finished, HeteroClient, SamplingParams

STREAMS = 8
FLOW_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What one stream gave."""

    text: str
    num_tokens: int
    num_ends: int


class Streams:
    """All flow when entered; `finish` gives what they gave. A broken stream fails there."""

    def __init__(self, client: HeteroClient, prompts: Sequence[str], *, max_tokens: int) -> None:
        self._client = client
        self._prompts = prompts
        self._sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._flowing = threading.Barrier(len(prompts) + 1)
        self._pool = ThreadPoolExecutor(len(prompts))
        self._readings: list[Future[Reading]] = []

    @property
    def num_over(self) -> int:
        """Streams that have ended."""
        return sum(reading.done() for reading in self._readings)

    def finish(self, timeout_s: float) -> list[Reading]:
        """In the order of the prompts."""
        return [reading.result(timeout_s) for reading in self._readings]

    def _read(self, prompt: str) -> Reading:
        parts, tokens, ends, flowing = [], 0, 0, False
        with self._client.generate(prompt, sampling=self._sampling) as stream:
            for event in stream:
                if isinstance(event, Delta):
                    parts.append(event.text)
                    tokens += len(event.token_ids)
                    if not flowing:
                        flowing = True
                        self._flowing.wait(FLOW_TIMEOUT_S)
                ends += isinstance(event, Finished)
        return Reading("".join(parts), tokens, ends)

    def __enter__(self) -> Self:
        self._readings = [self._pool.submit(self._read, prompt) for prompt in self._prompts]
        self._flowing.wait(FLOW_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flowing.abort()
        self._pool.shutdown(wait=error is None, cancel_futures=True)

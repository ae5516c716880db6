"""The steps that a workload is made of, as the scheduler would make them.

Chunks of one prompt differ in what was computed before them. They are taken as equal, with the mean of it, so that a
workload is a handful of different steps, each with a number of times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from hetero_api.spec import WorkloadSpec
from hetero_placement.decision import Bounds

_BALANCE_ROWS: Final = 32
"""Rows whose computation takes a stage as long as reading its weights; the worker's decoder cuts by the same number."""


class Span(NamedTuple):
    """Rows of one prompt, `context` tokens of which are computed already."""

    rows: float
    context: float


@dataclass(frozen=True, slots=True)
class Step:
    """Rows that go through the model together; numbers may be means, hence fractions."""

    decode_rows: float = 0
    context: float = 0
    """Tokens that a row that decodes attends to."""
    spans: tuple[Span, ...] = ()
    draws: int = 0

    @property
    def rows(self) -> float:
        """Rows that decode and rows of prompts."""
        return self.decode_rows + sum(span.rows for span in self.spans)

    def part(self, number: int) -> Step:
        """One of `number` equal micro-batches; of a span the mean one."""
        if number == 1:
            return self
        spans = tuple(Span(s.rows / number, s.context + s.rows * (number - 1) / (2 * number)) for s in self.spans)
        return Step(self.decode_rows / number, self.context, spans, self.draws)


class Repeated(NamedTuple):
    """A step, and how often it is made."""

    step: Step
    times: float


@dataclass(frozen=True, slots=True)
class WorkloadSteps:
    """All steps of a workload."""

    prefill: tuple[Repeated, ...]
    decode: tuple[Repeated, ...]

    @classmethod
    def of(cls, workload: WorkloadSpec, bounds: Bounds) -> WorkloadSteps:
        """Return the steps that an engine with these bounds makes."""
        batch = min(workload.concurrency, bounds.max_num_seqs)
        decode = Repeated(
            decode_step(batch, workload.decode_context), workload.output_tokens * workload.concurrency / batch
        )
        return cls(tuple(_prefill(workload, bounds)), (decode,))

    @property
    def all(self) -> tuple[Repeated, ...]:
        """Steps of prefill, then of decode."""
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of work, to compare placements by: prompts of one request, or outputs of several."""

    tokens: int
    """Tokens of the prompt, or in the cache of each stream."""
    streams: int = 0
    """Requests that decode together; 0: a prompt is computed."""

    @property
    def name(self) -> str:
        """Name for a table."""
        if self.streams:
            return f"decode {self.streams}"
        return f"prefill {self.tokens // 1024}k"

    def steps(self, bounds: Bounds) -> tuple[Repeated, ...]:
        """Return the steps of a whole prompt, or of a token of each stream."""
        if self.streams:
            return (Repeated(decode_step(self.streams, self.tokens), 1),)
        return tuple(prompt_steps(self.tokens, bounds.max_num_batched_tokens))

    def fits(self, bounds: Bounds) -> bool:
        """Return whether the engine's bounds allow for it."""
        return self.tokens < bounds.max_model_len and self.streams <= bounds.max_num_seqs


LOADS: Final = (Load(2048, 1), Load(2048, 4), Load(2048, 16), Load(2048), Load(32768))


def decode_step(batch: int, context: float) -> Step:
    """One token each of `batch` sequences."""
    return Step(decode_rows=batch, context=context, draws=batch)


def prompt_steps(tokens: int, chunk: int) -> Iterator[Repeated]:
    """One prompt in chunks; the last one draws."""
    before = (tokens - 1) // chunk
    if before:
        yield Repeated(Step(spans=(Span(chunk, chunk * (before - 1) / 2),)), before)
    yield Repeated(Step(spans=(Span(tokens - before * chunk, before * chunk),), draws=1), 1)


def micro_batches(rows: float, num_stages: int) -> int:
    """Parts that a step is cut in, so that stages compute at the same time; as the worker's decoder does."""
    whole = max(1, round(rows))
    return min(whole, math.isqrt((num_stages - 1) * whole // _BALANCE_ROWS)) or 1


def _prefill(workload: WorkloadSpec, bounds: Bounds) -> Iterator[Repeated]:
    """Long prompts one after another, short ones several a step."""
    tokens, chunk = workload.prompt_tokens, bounds.max_num_batched_tokens
    together = min(chunk // tokens, bounds.max_num_seqs, workload.concurrency)
    if together <= 1:
        for step, times in prompt_steps(tokens, chunk):
            yield Repeated(step, times * workload.concurrency)
        return
    full, rest = divmod(workload.concurrency, together)
    yield Repeated(_prompts_step(together, tokens), full)
    if rest:
        yield Repeated(_prompts_step(rest, tokens), 1)


def _prompts_step(number: int, tokens: int) -> Step:
    return Step(spans=(Span(tokens, 0),) * number, draws=number)

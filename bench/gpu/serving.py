"""The gateway's scheduler and rank processes in a loop: what a replica does, without a network and without text.

With two steps in flight the next plan goes out before the last result came (the scheduler's overlap); with one, ranks
wait for the scheduler between steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from bench.gpu.orders import Allocate, Bounds, Load, Loaded
from bench.gpu.ranks import RankProcesses
from bench.gpu.recipes import Recipe
from bench.gpu.roofline import Roofline, works_of
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.scheduler import Scheduler
from hetero_gateway.engine.step import ScheduledStep, StepOutcome
from hetero_gateway.engine.steps_in_flight import StepsInFlight
from hetero_gateway.group.warm_up import StepBounds, warm_up_plans

BLOCK_SIZE: Final = 16
_NULL_BLOCKS: Final = 1


class CapacityError(RuntimeError):
    """A rank has too little memory for its part of the model, or for a cache."""


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a recipe."""

    output_tokens: int
    elapsed_s: float
    first_token_s: float
    """From the start to the first result that had a token."""
    complete: bool
    """False: time ran out, and requests were dropped."""
    steps: tuple[ScheduledStep, ...] = field(repr=False)
    preemptions: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second, prompts' time included."""
        return self.output_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens a second after the first step that gave any."""
        first = next((len(step.decodes.slots) + len(step.spans) for step in self.steps if _draws(step)), 0)
        seconds = self.elapsed_s - self.first_token_s
        return (self.output_tokens - first) / seconds if seconds > 0 else 0.0

    def bound_s(self, roofline: Roofline, *, decode_only: bool = False) -> float:
        """The least time that the steps could have taken; `decode_only`: those without prompts."""
        works = zip(self.steps, works_of(self.steps), strict=True)
        return roofline.run_s(work for step, work in works if not (decode_only and step.spans) and step.computes)


class Replica:
    """A loaded model behind a scheduler."""

    def __init__(self, group: RankProcesses, load: Load, *, most_tokens: int, overlap: bool = True) -> None:
        """Loads, and makes a cache for `most_tokens`, or as many as fit. Raises RankFailedError, CapacityError."""
        self._group = group
        self.loaded: list[Loaded] = group.ask(load)
        num_blocks = blocks_for(self.loaded, most_tokens)
        if problem := next(filter(None, group.ask(Allocate(num_blocks, BLOCK_SIZE))), ""):
            raise CapacityError(f"experts cannot be streamed: {problem}")
        self.streams_from: int | None = None
        """Tokens from which on a step with prompts streams experts."""
        self._in_flight = StepsInFlight()
        self._warm_up(load.bounds, num_blocks)
        self._scheduler = Scheduler(_engine(load, overlap=overlap), num_blocks=num_blocks)

    def _warm_up(self, bounds: Bounds, num_blocks: int) -> None:
        """As a gateway does: the largest step, and those that graphs are made in."""
        steps = StepBounds(
            max_num_seqs=bounds.max_num_seqs,
            max_num_batched_tokens=bounds.max_num_batched_tokens,
            max_model_len=bounds.max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
        )
        sizes = {size for rank in self.loaded for size in rank.graph_sizes}
        for plan in warm_up_plans(steps, graph_sizes=sizes):
            self._in_flight.submit(ScheduledStep(plan))
            self._group.send(plan)
            self._in_flight.answer(self._group.result())
            self._in_flight.take()

    @property
    def kernels(self) -> tuple[str, ...]:
        """Of rank 0."""
        return self.loaded[0].kernels

    def serve(self, recipe: Recipe, *, limit_s: float) -> Served:
        """All of it, or as much as there is time for."""
        scheduler, prefix = self._scheduler, f"{time.perf_counter_ns()}-"
        preemptions = scheduler.stats().preemptions
        for request in recipe.requests:
            scheduler.add(replace(request, request_id=prefix + request.request_id), now=0.0)
        run = _Run(self._group, scheduler, self._in_flight, limit_s, self.streams_from)
        run.drive()
        return replace(run.served(), preemptions=scheduler.stats().preemptions - preemptions)


class _Run:
    def __init__(
        self,
        group: RankProcesses,
        scheduler: Scheduler,
        in_flight: StepsInFlight,
        limit_s: float,
        streams_from: int | None,
    ) -> None:
        self._group = group
        self._streams_from = streams_from
        self._scheduler = scheduler
        self._in_flight = in_flight
        self._limit_s = limit_s
        self._steps: list[ScheduledStep] = []
        self._tokens = 0
        self._first_s = 0.0
        self._elapsed_s = 0.0
        self._complete = True

    def drive(self) -> None:
        began_s = time.perf_counter()
        while self._in_flight or not self._scheduler.is_idle:
            while (step := self._scheduler.schedule(0.0, in_flight=self._in_flight)) is not None:
                self._in_flight.submit(step)
                rows = sum(span.num_tokens for span in step.plan.spans)
                step.plan.streams_experts = self._streams_from is not None and rows >= self._streams_from
                self._group.send(step.plan)
                self._steps.append(step)
            updates = self._next_outcome().updates
            now_s = time.perf_counter() - began_s
            if updates:
                self._tokens += len(updates)
                self._first_s = self._first_s or now_s
                self._elapsed_s = now_s
            if now_s > self._limit_s and self._complete:
                self._complete = not self._scheduler.clear()

    def _next_outcome(self) -> StepOutcome:
        """Wait for the result of the oldest step, and apply it."""
        result = self._group.result()
        answered = self._in_flight.answer(result)
        self._in_flight.take()
        return self._scheduler.apply(answered.step, result)

    def served(self) -> Served:
        return Served(self._tokens, self._elapsed_s, self._first_s, self._complete, tuple(self._steps))


def blocks_for(loaded: Sequence[Loaded], most_tokens: int) -> int:
    """Blocks of a cache, null block included, that every rank has memory for. Raises CapacityError."""
    for number, rank in enumerate(loaded):
        if rank.refusal:
            raise CapacityError(f"rank {number}: {rank.refusal}")
    holders = [rank for rank in loaded if rank.kv_bytes_per_token]
    fitting = min(rank.kv_budget_bytes // (rank.kv_bytes_per_token * BLOCK_SIZE) for rank in holders)
    if fitting <= _NULL_BLOCKS:
        raise CapacityError(f"ranks have memory for {fitting} blocks of {BLOCK_SIZE} tokens")
    return int(min(fitting, _NULL_BLOCKS - (-most_tokens // BLOCK_SIZE)))


def bounds_of(recipe: Recipe, *, max_num_batched_tokens: int) -> Bounds:
    """As large as the recipe needs."""
    return Bounds(recipe.longest + 1, max_num_batched_tokens, len(recipe.requests))


def _engine(load: Load, *, overlap: bool) -> EngineConfig:
    bounds = load.bounds
    return EngineConfig(
        max_num_seqs=bounds.max_num_seqs,
        max_num_batched_tokens=bounds.max_num_batched_tokens,
        block_size=BLOCK_SIZE,
        max_model_len=bounds.max_model_len,
        max_queued_requests=4096,
        enable_prefix_caching=False,
        eos_token_ids=frozenset(),
        vocab_size=load.config.vocab_size,
        max_steps_in_flight=2 if overlap else 1,
    )


def _draws(step: ScheduledStep) -> bool:
    return bool(step.decodes.slots) or any(span.sample for span in step.spans)

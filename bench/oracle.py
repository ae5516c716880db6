"""Proposals that are right as often as one says, beside the arithmetic: a part of `python -m bench.speculation`.

One rank in this process, without a gateway's way to it. What the model draws is known from a run without proposals, so
each proposed token is right with the chance that is wanted. They come of nothing, as those of n-grams, or of a draft
model, which computes all that it would, before each draw is replaced. The arithmetic: with the chance a, proposals of k
tokens give 1 + a + ... + a^k tokens each; steps take the time that they were measured to take.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.config import EngineConfig, SpeculationConfig
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.engine.scheduler import Scheduler
from hetero_gateway.engine.speculation.speculator import Speculator
from hetero_gateway.engine.step import ScheduledStep
from hetero_gateway.engine.steps_in_flight import StepsInFlight
from hetero_worker.backends.cpu import cpu_backend, start_compute_threads
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.layers.sampler import SampledRows, sample_tokens
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.draft import DraftModel
from hetero_worker.runners.plan_runner import PlanRunner
from hetero_worker.sampling.request import SamplingRow
from tests.unit.engine.oracle import OracleProposer

RATES: Final = (0.3, 0.6, 0.9)
NEW_TOKENS: Final = 256
BLOCKS: Final = 64
BLOCK_SIZE: Final = 16
MAX_MODEL_LEN: Final = 512
MAX_TOKENS: Final = 8


@dataclass(slots=True)
class Course:
    """One request: its tokens, all seconds after the first token, and the steps that had proposals."""

    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    proposing: int = 0
    proposing_s: float = 0.0
    proposed: int = 0
    accepted: int = 0

    @property
    def tokens_per_s(self) -> float:
        return (len(self.token_ids) - 1) / self.seconds

    def expected(self, rate: float) -> float:
        """Tokens that a proposal of the mean length gives by the arithmetic."""
        length = self.proposed / self.proposing
        whole = sum(rate**i for i in range(int(length) + 1))
        return whole + rate ** (int(length) + 1) * (length - int(length))


class OracleRank:
    """A model on this process's cores, and maybe a draft model beside it."""

    def __init__(self, model: Path, *, draft: Path | None, dtype: str, quantization: str, threads: int) -> None:
        start_compute_threads(threads)
        backend = cpu_backend()
        backend.open()
        config = ModelConfig.from_directory(model).quantized(quantization)
        self._oracle, self._num_prompt = _Oracle((), rate=0.0, vocab_size=config.vocab_size), 0
        drafting = None if draft is None else DraftModel(backend, draft, sample=self._replace_draws)
        self._runner = PlanRunner(backend, draft=drafting)
        draft_plan = None if draft is None else ShardPlan.whole(ModelConfig.from_directory(draft))
        self._vocab_size, self._drafts = config.vocab_size, draft is not None
        self._request = LoadRequest(
            directory=model,
            config=config,
            dtype=dtype,
            shard_plan=ShardPlan.whole(config),
            rank=0,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_MODEL_LEN,
            max_num_seqs=16,
            memory_bytes=4 << 30,
            draft_plan=draft_plan,
        )

    def serve(self, prompt: Sequence[int], *, known: Sequence[int] = (), rate: float = 0.0) -> Course:
        """Serve one request; with the `known` tokens of its output, tokens are proposed that are right at this rate."""
        self._runner.attach(LocalExchange())
        self._runner.load(self._request)
        self._runner.allocate(BLOCKS, BLOCK_SIZE)
        oracle = self._oracle = _Oracle(known, rate=rate, vocab_size=self._vocab_size)
        self._num_prompt = len(prompt)
        speculator = Speculator(None)
        if known:
            speculation = SpeculationConfig(max_tokens=MAX_TOKENS, drafts=self._drafts)
            speculator = Speculator(speculation, None if self._drafts else oracle)
        scheduler = Scheduler(_engine_config(self._vocab_size), num_blocks=BLOCKS, speculator=speculator)
        scheduler.add(_asked(prompt), now=0.0)
        course, in_flight, began_s = Course(), StepsInFlight(), 0.0
        while (step := scheduler.schedule(0.0, in_flight=in_flight)) is not None:
            in_flight.submit(step)
            step_began_s = time.perf_counter()
            output = self._runner.execute(step.plan)
            result = ranks_pb2.StepResult(
                step_id=step.plan.step_id,
                slots=[token.slot for token in output.sampled],
                token_ids=[token.token for token in output.sampled],
                drafts=output.drafts,
            )
            step_s = time.perf_counter() - step_began_s
            in_flight.answer(result)
            taken = in_flight.take()
            assert taken is not None
            speculator.add_step(
                step, began_s=step_began_s, seconds=step_s, on_ranks_s=step_s, num_tokens=len(result.token_ids)
            )
            course.token_ids += [update.token_id for update in scheduler.apply(taken.step, result).updates]
            if step.spans:
                began_s = time.perf_counter()
            elif step.computes:
                _count(course, step, step_s, num_tokens=len(result.token_ids))
        course.seconds = time.perf_counter() - began_s
        self._runner.detach()
        return course

    def _replace_draws(self, logits: torch.Tensor, rows: Sequence[SamplingRow], **more: Any) -> SampledRows:
        sampled = sample_tokens(logits, rows, **more)
        tokens = [self._oracle.at(row.position - self._num_prompt) for row in rows]
        return SampledRows(tokens, sampled.logprobs)


class _Oracle(OracleProposer):
    def __init__(self, known: Sequence[int], *, rate: float, vocab_size: int) -> None:
        super().__init__(lambda _, count: known[:count], rate=rate, vocab_size=vocab_size)
        self._known = known

    def at(self, place: int) -> int:
        """Return a token to propose in this place of the output."""
        token = self._known[place] if place < len(self._known) else 0
        return token if self._random.random() < self._rate else self._wrong(token)


def _count(course: Course, step: ScheduledStep, seconds: float, *, num_tokens: int) -> None:
    course.steps += 1
    if step.proposals:
        course.proposing += 1
        course.proposing_s += seconds
        course.proposed += sum(map(len, step.proposals.values()))
        course.accepted += num_tokens - 1


def _engine_config(vocab_size: int) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=16,
        max_num_batched_tokens=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_queued_requests=1,
        enable_prefix_caching=False,
        eos_token_ids=frozenset(),
        vocab_size=vocab_size,
        max_steps_in_flight=1,
    )


def _asked(prompt: Sequence[int]) -> GenerationRequest:
    return GenerationRequest(
        request_id="one",
        prompt_token_ids=tuple(prompt),
        sampling=ranks_pb2.Sampling(temperature=0.0, top_p=1.0),
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
    )


def measure_oracle(
    model: Path, draft: Path | None, *, dtype: str, quantization: str, threads: int
) -> list[Mapping[str, float]]:
    """Figures at each rate, off before and behind: A B A."""
    rank = OracleRank(model, draft=draft, dtype=dtype, quantization=quantization, threads=threads)
    source = random.Random(0)
    prompt = [source.randrange(1000, 20_000) for _ in range(64)]
    rank.serve(prompt)
    figures: list[Mapping[str, float]] = []
    for rate in RATES:
        before = rank.serve(prompt)
        course = rank.serve(prompt, known=before.token_ids, rate=rate)
        behind = rank.serve(prompt)
        if not course.token_ids == before.token_ids == behind.token_ids:
            raise RuntimeError(f"tokens differ at acceptance {rate}")
        off = (before.tokens_per_s + behind.tokens_per_s) / 2
        by_arithmetic = course.expected(rate) / (course.proposing_s / course.proposing)
        figures.append(
            {
                "acceptance": rate,
                "tokens_per_s": course.tokens_per_s,
                "off": off,
                "gain": course.tokens_per_s / off,
                "gain_by_arithmetic": by_arithmetic / off,
                "tokens_a_step": 1 + course.accepted / course.proposing,
                "tokens_by_arithmetic": course.expected(rate),
                "proposed_a_step": course.proposed / course.proposing,
            }
        )
    return figures

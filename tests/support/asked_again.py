"""One request, asked of a group again and again: on every way of its prompt to the cache, and in any company.

For batch-invariant mode, in which all that is told of it is the same to the last bit. No transformers, no pydantic: a
machine with a GPU may have neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.distributed.exchange import Exchange
from tests.support.mixed_runners import SoloTaker, backend_of, load_request
from tests.support.rank_group import PlanBuilder, PlanTaker, StepOutcome
from tests.support.rank_processes import RankContext
from tests.support.rank_shares import Shares

BLOCK_SIZE, BLOCKS, MOST_TOKENS = 4, 300, 220
"""What a group has to have for all of it."""
LENGTH, DRAWS = 23, 3
"""Of the prompt, and tokens that are drawn."""
HIT_BLOCKS = 4
"""Of a prefix that is in the cache."""
_SLOT = 0
_TOKENS = 200
_SAMPLING = ranks_pb2.Sampling(temperature=0.8, top_p=0.95, seed=11, num_logprobs=2, num_prompt_logprobs=1)


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a group computed of the request, to the last bit; log-probabilities on rank 0 only."""

    logits: tuple[bytes, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[bytes, ...]
    prompt_logprobs: tuple[tuple[int, bytes], ...]
    """By position; those of a prefix that is in the cache are not computed."""

    def equals(self, whole: Answer) -> bool:
        """`whole`: of a prompt that was computed from its beginning."""
        parts = (self.logits, self.tokens, self.logprobs)
        same = parts == (whole.logits, whole.tokens, whole.logprobs)
        return same and set(whole.prompt_logprobs).issuperset(self.prompt_logprobs)


def prompt(length: int, *, seed: int = 1) -> list[int]:
    return [(seed * 37 + i * i * 11 + i) % _TOKENS for i in range(length)]


class Requests:
    """The request in one slot, again and again, with others in other slots."""

    def __init__(self, group: PlanTaker) -> None:
        self.builder = PlanBuilder(group)
        self._logits: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._prompt: dict[int, bytes] = {}

    def answer(self, *, chunk: int | None = None, shared: list[int] | None = None, most: int | None = None) -> Answer:
        """With all sequences that there are decoding meanwhile, or `most` rows of their prompts a step."""
        builder = self.builder
        self._logits, self._logprobs, self._prompt = [], [], {}
        builder.start(_SLOT, prompt(LENGTH), sampling=_SAMPLING, shared_blocks=shared or [])
        while len(self._logits) < DRAWS:
            for slot in sorted(builder.sequences, key=lambda slot: -builder.sequences[slot].computed):
                builder.schedule(slot, chunk if slot == _SLOT else most)
            self._take(builder.run())
        tokens = builder.sequences[_SLOT].tokens[LENGTH : LENGTH + DRAWS]
        builder.release(_SLOT)
        return Answer(tuple(self._logits), tuple(tokens), tuple(self._logprobs), tuple(sorted(self._prompt.items())))

    def answers(self) -> dict[str, Answer]:
        """On every way of the request to its tokens."""
        answers = {"alone": self.answer(), "in chunks": self.answer(chunk=5)}
        for slot, length in {1: 9, 2: 61, 3: 2}.items():
            self.builder.start(slot, prompt(length, seed=slot + 4))
            self.builder.schedule(slot)
        self.builder.run()
        answers["among others that decode"] = self.answer()
        answers["among others, in chunks"] = self.answer(chunk=7)
        self.builder.start(4, [*prompt(HIT_BLOCKS * BLOCK_SIZE), 5, 6])
        self.builder.start(5, prompt(100, seed=3))
        answers["among others' prompts"] = self.answer(most=13)
        self.builder.start(6, prompt(110, seed=9))
        answers["in a step of so many rows that it goes in micro-batches"] = self.answer()
        answers["after a prefix hit"] = self.answer(shared=self.builder.sequences[4].blocks[:HIT_BLOCKS])
        return answers

    def _take(self, outcome: StepOutcome) -> None:
        for row, (slot, _) in enumerate(outcome.sampled):
            if slot == _SLOT:
                self._logits.append(outcome.logits[row].contiguous().view(torch.uint8).numpy().tobytes())
        self._logprobs += [logprobs.SerializeToString(deterministic=True) for logprobs in outcome.outputs[0].logprobs]
        for span in outcome.outputs[0].prompt_logprobs:
            told = (position.SerializeToString(deterministic=True) for position in span.positions)
            self._prompt.update(enumerate(told, start=span.begin))


def differing(answers: dict[str, Answer]) -> list[str]:
    """Ways that have other bits than the first."""
    whole = next(iter(answers.values()))
    return [way for way, answer in answers.items() if not answer.equals(whole)]


def asked(
    backend: DeviceBackend, directory: Path, shares: Shares, rank: int, exchange: Exchange, *, dtype: str
) -> dict[str, Answer]:
    """On one rank of a group in batch-invariant mode: the answers on every way."""
    request = load_request(directory, shares, rank, dtype=dtype, memory_bytes=backend.memory_bytes)
    request = replace(request, batch_invariant=True, max_num_batched_tokens=MOST_TOKENS)
    return Requests(SoloTaker(backend, request, exchange, num_blocks=BLOCKS, block_size=BLOCK_SIZE)).answers()


def body(
    ranks: RankContext, directory: Path, shares: Shares, num_gpu_ranks: int, dtype: str, pseudo: bool
) -> list[str]:
    """For rank_processes.run_ranks: what `differing` tells. The first ranks compute on GPUs, or on pseudo GPUs."""
    backend = backend_of(ranks.rank, num_gpu_ranks, pseudo=pseudo)
    backend.open()
    group = ranks.coordinate_backend(ranks_pb2.EXCHANGE_KIND_SHM, backend, num_gpu_ranks)
    config = ModelConfig.from_directory(directory)
    plan = shares.plan_for(config)
    exchange = group.connect(plan, batch_invariant=True)
    try:
        return differing(asked(backend, directory, shares, ranks.rank, exchange, dtype=dtype))
    finally:
        ranks.meet()
        group.close()

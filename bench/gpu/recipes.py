"""What is asked of a model: requests whose lengths and tokens follow from a seed.

`throughput` is the recipe that nano-vllm publishes its figures for (bench.py of github.com/GeeeekExplorer/nano-vllm):
256 requests at once, prompts and outputs uniformly of 100 to 1024 tokens, temperature 0.6, no end of sequence; its
figure is output tokens a second, prompts' time included, after a warm-up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from hetero_api.v1.ranks_pb2 import Sampling
from hetero_gateway.engine.request import GenerationRequest

SEQUENCES: Final = 256
SHORTEST: Final = 100
LONGEST: Final = 1024
TEMPERATURE: Final = 0.6
_LARGEST_TOKEN: Final = 10_000


@dataclass(frozen=True, slots=True)
class Recipe:
    """Requests that come at once, and the longest sequence among them."""

    requests: tuple[GenerationRequest, ...]

    @property
    def output_tokens(self) -> int:
        return sum(request.max_tokens or 0 for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, its output included."""
        return max(len(r.prompt_token_ids) + (r.max_tokens or 0) for r in self.requests)


def throughput(
    vocab_size: int, *, sequences: int = SEQUENCES, shortest: int = SHORTEST, longest: int = LONGEST
) -> Recipe:
    """See the module; smaller numbers give a shorter run of the same kind."""
    chooser = random.Random(0)
    top = min(_LARGEST_TOKEN, vocab_size - 1)
    prompts = [[chooser.randint(0, top) for _ in range(chooser.randint(shortest, longest))] for _ in range(sequences)]
    lengths = [chooser.randint(shortest, longest) for _ in range(sequences)]
    return Recipe(
        tuple(
            _request(f"throughput-{number}", prompt, max_tokens=length, temperature=TEMPERATURE, seed=number)
            for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        )
    )


def decoding(vocab_size: int, *, sequences: int, prompt: int, output: int) -> Recipe:
    """`sequences` greedy requests of one shape."""
    chooser = random.Random(1)
    return Recipe(
        tuple(
            _request(
                f"decoding-{number}",
                [chooser.randrange(min(_LARGEST_TOKEN, vocab_size)) for _ in range(prompt)],
                max_tokens=output,
                temperature=0.0,
                seed=number,
            )
            for number in range(sequences)
        )
    )


def _request(name: str, prompt: list[int], *, max_tokens: int, temperature: float, seed: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=Sampling(seed=seed, temperature=temperature),
        max_tokens=max_tokens,
        ignore_eos=True,
    )

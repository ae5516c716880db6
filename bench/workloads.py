"""The prompts and workloads of the benchmark: English prose of Python's own help topics, as token ids.

Every contender gets the same ids, generates exactly `max_new` tokens a prompt greedily, end tokens ignored.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

from tokenizers import Tokenizer

SEED: Final = 1
CHARACTERS: Final = 600_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts handed over together."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_new: int

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return self.max_new * len(self.prompts)


def make_workloads(model: Path) -> dict[str, Workload]:
    """decode1: 32 + 128 tokens; prefill512: 512 + 1; batch8 and batch32: 32..256 + 128 each."""
    text = "\n\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    source = random.Random(SEED)

    def cut(length: int) -> tuple[int, ...]:
        start = source.randrange(len(ids) - length)
        return tuple(ids[start : start + length])

    mixed = tuple(cut(source.randint(32, 256)) for _ in range(32))
    workloads = (
        Workload("decode1", (cut(32),), 128),
        Workload("prefill512", (cut(512),), 1),
        Workload("batch8", mixed[:8], 128),
        Workload("batch32", mixed, 128),
    )
    return {workload.name: workload for workload in workloads}

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
    temperature: float = 0.0
    """Above 0 tokens are drawn, with a fixed seed; by ours alone."""

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return self.max_new * len(self.prompts)


def make_workloads(model: Path) -> dict[str, Workload]:
    """decode1: 32 + 128 tokens; prefill512: 512 + 1; batch8 and batch32: 32..256 + 128 each."""
    prose = _Prose(model)
    mixed = tuple(prose.cut(prose.source.randint(32, 256)) for _ in range(32))
    workloads = (
        Workload("decode1", (prose.cut(32),), 128),
        Workload("prefill512", (prose.cut(512),), 1),
        Workload("batch8", mixed[:8], 128),
        Workload("batch32", mixed, 128),
    )
    return {workload.name: workload for workload in workloads}


def make_prompt(model: Path, length: int) -> tuple[int, ...]:
    """So many tokens of running prose."""
    return _Prose(model).cut(length)


class _Prose:
    """Help topics as tokens of the model's tokenizer, and where to cut them."""

    def __init__(self, model: Path) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]
        self._ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
        self.source = random.Random(SEED)

    def cut(self, length: int) -> tuple[int, ...]:
        start = self.source.randrange(len(self._ids) - length)
        return tuple(self._ids[start : start + length])

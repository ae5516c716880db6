"""Gain of CUDA graphs, fused steps, our attention, async steps and overlap: the same decoding with one off at a time.

And what batch-invariant mode costs, with all of them on.

All but overlap are the runner's, turned off in its load request; overlap is the scheduler's, and without it no step
begins before the one before is finished. What was not in force anyway, on a device that has no kernels for it, makes no
difference: the rank's report says what was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from bench.gpu.orders import Load, Options
from bench.gpu.ranks import RankProcesses
from bench.gpu.recipes import decoding
from bench.gpu.serving import Replica, bounds_of

BATCHES: Final = (1, 32)
PROMPT: Final = 64
OUTPUT: Final = 96


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table."""

    name: str
    options: Options = field(default_factory=Options)
    overlap: bool = True


VARIANTS: Final = (
    Variant("all on"),
    Variant("graphs off", Options(graphs=False)),
    Variant("fusion off", Options(fused=False)),
    Variant("plain attention", Options(own_attention=False)),
    Variant("async steps off", Options(async_steps=False)),
    Variant("overlap off", overlap=False),
    Variant("batch-invariant", Options(batch_invariant=True)),
    Variant("all off", Options(graphs=False, fused=False, own_attention=False, async_steps=False), overlap=False),
)


@dataclass(frozen=True, slots=True)
class Ablation:
    """What a variant gave."""

    name: str
    tokens_per_s: dict[int, float]
    """Decoding, by batch size."""
    kernels: tuple[str, ...] = ()
    """What it was computed with, as the rank reports it."""


def measure(group: RankProcesses, load: Load, *, output: int = OUTPUT, limit_s: float) -> Iterator[Ablation]:
    """One after another, each for `limit_s` at most a batch size; `load`'s bounds and options are replaced."""
    recipes = {n: decoding(load.config.vocab_size, sequences=n, prompt=PROMPT, output=output) for n in BATCHES}
    bounds = bounds_of(recipes[max(BATCHES)], max_num_batched_tokens=max(BATCHES) * PROMPT)
    for variant in VARIANTS:
        order = replace(load, bounds=bounds, options=variant.options)
        replica = Replica(group, order, most_tokens=max(BATCHES) * (PROMPT + output), overlap=variant.overlap)
        for recipe in recipes.values():  # kernels are chosen and compiled, graphs captured
            replica.serve(recipe, limit_s=limit_s)
        speeds = {n: replica.serve(recipe, limit_s=limit_s).decode_tokens_per_s for n, recipe in recipes.items()}
        yield Ablation(variant.name, speeds, replica.kernels)

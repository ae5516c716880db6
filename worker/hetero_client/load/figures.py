"""Figures of a load: times to first tokens and between tokens, throughput, and their percentiles."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hetero_client.load.run import LoadPlan, Sample

PERCENTILES: Final = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a time, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Return the spread of values; None without any."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(statistics.fmean(ordered), *(percentile(ordered, percent) for percent in PERCENTILES))


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Figures of the requests that ended well. Spreads are None where nothing was seen to measure."""

    requests: int
    failed: int
    error: str
    """Why the first one failed; "" if none did."""
    duration_s: float
    """From the first request to the end of the last."""
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Tokens of prompts and outputs."""
    time_to_first_token_s: Spread | None
    inter_token_latency_s: Spread | None
    """One token to the next; tokens that came together share the time to them."""
    time_per_output_token_s: Spread | None
    """Mean of a request's time between tokens, over requests."""
    request_latency_s: Spread | None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of ascending values, at least one, between the two values nearest to it."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def figures_of(plan: LoadPlan, samples: Sequence[Sample]) -> LoadFigures:
    """Return the figures of a load."""
    done = [sample for sample in samples if not sample.error]
    errors = [sample.error for sample in samples if sample.error]
    began_s = min((sample.due_s for sample in samples), default=0.0)
    duration_s = max((sample.ended_s for sample in samples), default=0.0) - began_s
    output_tokens = sum(sample.num_tokens for sample in done)
    prompt_tokens = plan.prompt_tokens * len(done)
    a_second = 1 / duration_s if duration_s else 0.0
    return LoadFigures(
        requests=len(done),
        failed=len(errors),
        error=errors[0] if errors else "",
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(done) * a_second,
        output_tokens_per_s=output_tokens * a_second,
        total_tokens_per_s=(prompt_tokens + output_tokens) * a_second,
        time_to_first_token_s=Spread.of(sample.pieces[0][0] - sample.due_s for sample in done if sample.pieces),
        inter_token_latency_s=Spread.of(gap for sample in done for gap in token_gaps(sample)),
        time_per_output_token_s=Spread.of(_mean_gap(sample) for sample in done if len(sample.pieces) > 1),
        request_latency_s=Spread.of(sample.ended_s - sample.due_s for sample in done),
    )


def token_gaps(sample: Sample) -> Iterator[float]:
    """Yield the time to each token after the first piece; those of one piece share the time to it."""
    for (before_s, _), (at_s, count) in pairwise(sample.pieces):
        yield from [(at_s - before_s) / count] * count


def _mean_gap(sample: Sample) -> float:
    (first_s, count), (last_s, _) = sample.pieces[0], sample.pieces[-1]
    return (last_s - first_s) / (sample.num_tokens - count)

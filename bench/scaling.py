"""Cost as work grows: tokens/s over the number of sequences and over the length of the context.

    python -m bench.scaling [--only NAME ...] [--model NAME] [--rounds 3]

    batch      1, 2, 4 … 64 prompts of 16 tokens at once, 64 tokens each: output tokens/s, prompts included
    context    128, 256 … 8,192 tokens, the last 32 of them new: prompt tokens/s, and tokens/s of the new ones

By default ours in all widths, and llama.cpp. Points are taken in turns, as in bench.run; medians. Writes
bench/results/scaling-DATE.json and .svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.comparison import Comparison, compare
from bench.contenders import Measured
from bench.entrants import LINK, LONGEST, MAX_CONTEXT, MAX_SEQS, OURS, Setting, chosen
from bench.home import RESULTS, BenchHome
from bench.machine import describe
from bench.plots import Curve, draw_growth
from bench.processes import end_in_order
from bench.report import aligned
from bench.shapes import DEMO, MODELS, directory_of
from bench.turns import Quiet
from bench.workloads import Workload, make_prompt
from hetero_api.model_config import ModelConfig

CONTEXT_NEW: Final = 32
BATCH_PROMPT: Final = 16
BATCH_NEW: Final = 64
BATCHES: Final = tuple(2**n for n in range(7))
CONTEXTS: Final = tuple(2**n for n in range(7, 14))
SEQUENCES: Final = "sequences at once"
PREFILL: Final = "context, tokens: prefill"
DECODE: Final = "context, tokens: decode"
THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class Point:
    """A workload, and where its figures belong: panels by name, each with how to read tokens/s from a run."""

    workload: Workload
    size: int
    panels: tuple[str, ...]


def points(prose: Sequence[int], batches: Sequence[int], contexts: Sequence[int]) -> dict[str, Point]:
    """By the workload's name. All prompts are pieces of `prose`, which has as many tokens as the longest context."""
    pieces = [tuple(prose[start : start + BATCH_PROMPT]) for start in range(0, len(prose), BATCH_PROMPT)]
    made = [Point(Workload(f"batch {n}", tuple(pieces[:n]), BATCH_NEW), n, (SEQUENCES,)) for n in batches]
    for n in contexts:
        workload = Workload(f"context {n}", (tuple(prose[: n - CONTEXT_NEW]),), CONTEXT_NEW)
        made.append(Point(workload, n, (PREFILL, DECODE)))
    return {point.workload.name: point for point in made}


def tokens_per_s(panel: str, workload: Workload, measured: Measured) -> float:
    """Of a panel's kind."""
    if panel == PREFILL:
        return workload.prompt_tokens / measured.first_token_s
    if panel == DECODE:
        return (workload.max_new - 1) / (measured.elapsed_s - measured.first_token_s)
    return measured.output_tokens / measured.elapsed_s


def curves(comparison: Comparison, where: Mapping[str, Point]) -> dict[str, list[Curve]]:
    """By panel, one a contender."""
    taken = {name: each for group in reversed(comparison.groups) for name, each in group.items()}
    panels: dict[str, list[Curve]] = {}
    for panel in (SEQUENCES, PREFILL, DECODE):
        here = [point for point in where.values() if panel in point.panels]
        if not here:
            continue
        panels[panel] = [
            Curve(
                name,
                [
                    (
                        point.size,
                        statistics.median(
                            tokens_per_s(panel, point.workload, run.measured) for run in each.runs[point.workload.name]
                        ),
                    )
                    for point in here
                ],
            )
            for name, each in taken.items()
        ]
    return panels


def table(panels: Mapping[str, Sequence[Curve]]) -> str:
    blocks = []
    for panel, lines in panels.items():
        cells = [[panel, *(f"{size:g}" for size, _ in lines[0].points)]]
        cells += [[curve.name, *(f"{speed:.1f}" for _, speed in curve.points)] for curve in lines]
        blocks.append(aligned(cells))
    return "\n\n".join(blocks)


def main() -> int:
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = [*(ours.name for ours in OURS), LINK]
    parser.add_argument("--only", nargs="*", default=defaults, help="whose name contains one of NAME")
    parser.add_argument("--model", choices=MODELS, default=DEMO)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--contexts", nargs="*", type=int, default=list(CONTEXTS))
    parser.add_argument("--attempts", type=int, default=2, help="of a run that others disturb; 0: never look")
    arguments = parser.parse_args()
    longest = max(arguments.contexts, default=0)
    if max(arguments.batches, default=0) > MAX_SEQS or longest > MAX_CONTEXT:
        parser.error(f"at most {MAX_SEQS} sequences and {MAX_CONTEXT} tokens of context")
    home = BenchHome.from_environment()
    directory = directory_of(arguments.model, home)
    config = ModelConfig.from_directory(directory)
    setting = Setting(home, arguments.model, directory, config, THREADS, max_model_len=max(longest, LONGEST))
    where = points(make_prompt(directory, max(longest, MAX_SEQS * BATCH_PROMPT)), arguments.batches, arguments.contexts)
    comparison = compare(
        chosen(arguments.only),
        setting,
        {name: point.workload for name, point in where.items()},
        rounds=arguments.rounds,
        quiet=Quiet(attempts=arguments.attempts),
    )
    for name, why in comparison.absent.items():
        print(f"not available: {name}: {why}")
    panels = curves(comparison, where)
    if not any(panels.values()):
        return 1
    print(table(panels))
    stem = RESULTS / f"scaling-{time.strftime('%Y-%m-%d-%H%M%S')}"
    about = describe()
    result = about | {"model": arguments.model, "rounds": arguments.rounds, "absent": comparison.absent}
    result["curves"] = {panel: {curve.name: curve.points for curve in lines} for panel, lines in panels.items()}
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    title = f"{arguments.model}, {about['machine']['cpu']}, {about['date']}"
    draw_growth(panels, title=title, path=stem.with_suffix(".svg"))
    print(f"\nwritten to {stem}.json and .svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())

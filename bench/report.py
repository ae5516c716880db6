"""From runs to figures, to a table and a JSON file.

Each figure is the median over rounds, with its share of the limit that bounds it:

    decode1     tokens/s after the first token; the limit reads every weight once a token
    prefill512  prompt tokens/s; the limit is two operations a weight and prompt token
    batch8/32   output tokens/s, prompts included; the limit is arithmetic on prompt and output tokens
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.contenders import Measured
from bench.limits import Limits
from bench.workloads import Workload
from hetero_api.model_config import ModelConfig

BYTES_FP32 = 4


@dataclass(frozen=True, slots=True)
class Figure:
    """Tokens a second: median, smallest, largest over rounds, and the median's share of the limit."""

    tokens_per_s: float
    low: float
    high: float
    share_of_limit: float
    rounds: int


def rate(workload: Workload, measured: Measured) -> float:
    """The workload's tokens/s in one run."""
    if workload.max_new == 1:
        return workload.prompt_tokens / (measured.first_token_s or measured.elapsed_s)
    if len(workload.prompts) == 1 and measured.first_token_s is not None:
        return (workload.max_new - 1) / (measured.elapsed_s - measured.first_token_s)
    return measured.output_tokens / measured.elapsed_s


def limit(workload: Workload, config: ModelConfig, limits: Limits) -> float:
    """The most tokens/s that this machine's memory or arithmetic allows in fp32."""
    if len(workload.prompts) == 1 and workload.max_new > 1:
        return limits.read_bytes_per_s / (BYTES_FP32 * _weights_read(config))
    body = config.num_parameters - config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    head = config.vocab_size * config.hidden_size
    operations = 2 * body * (workload.prompt_tokens + workload.output_tokens) + 2 * head * workload.output_tokens
    tokens = workload.prompt_tokens if workload.max_new == 1 else workload.output_tokens
    return tokens / (operations / limits.fp32_flops)


def figure(workload: Workload, runs: Sequence[Measured], config: ModelConfig, limits: Limits) -> Figure:
    rates = [rate(workload, run) for run in runs]
    median = statistics.median(rates)
    return Figure(median, min(rates), max(rates), median / limit(workload, config, limits), len(rates))


def table(
    figures: Mapping[str, Mapping[str, Figure]], starts: Mapping[str, float], peaks: Mapping[str, int], base: str
) -> str:
    """One row a contender: figure, share of the limit, ratio to `base`."""
    workloads = list(next(iter(figures.values())))
    head = ["contender", *(f"{name} tok/s" for name in workloads), "start to first token", "peak memory"]
    rows = [head]
    for name, by_workload in figures.items():
        cells = [
            f"{f.tokens_per_s:.1f} ({f.share_of_limit:.0%}, {f.tokens_per_s / figures[base][w].tokens_per_s:.2f}x)"
            for w, f in by_workload.items()
        ]
        rows.append([name, *cells, f"{starts[name]:.1f} s", f"{peaks[name] / 1e6:.0f} MB"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def as_json(figures: Mapping[str, Mapping[str, Figure]]) -> dict[str, dict[str, dict[str, float]]]:
    return {name: {w: asdict(f) for w, f in by_workload.items()} for name, by_workload in figures.items()}


def _weights_read(config: ModelConfig) -> int:
    """Weights that one decode step reads: all but the embedding's rows that are only looked up."""
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return config.num_parameters - looked_up

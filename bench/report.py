"""From runs to figures, and to a table.

Each figure is the median over rounds, with its share of the limit that bounds it:

    decode1     tokens/s after the first token; every step reads every weight once, in the contender's width
    prefill512  prompt tokens/s; two operations a weight and prompt token, in the contender's arithmetic
    batch8/32   output tokens/s, prompts included; operations on prompt and output tokens, or reading the weights once a
                step, whichever takes longer
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.contenders import Measured
from bench.limits import Limits
from bench.workloads import Workload
from hetero_api.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Width:
    """Bits of a stored weight, scales not counted, and the type that products are computed in."""

    bits: int
    arithmetic: str

    @property
    def name(self) -> str:
        return f"{self.bits} bit, {self.arithmetic}"


@dataclass(frozen=True, slots=True)
class Figure:
    """Tokens a second: median, smallest, largest over rounds, and the median's share of the limit."""

    tokens_per_s: float
    low: float
    high: float
    share_of_limit: float
    rounds: int
    disturbed: int = 0
    """Rounds in which other processes took part of the machine."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contender: figures by workload, seconds from process start to first token, peak memory."""

    width: Width
    figures: Mapping[str, Figure]
    first_start_s: float
    start_s: float
    """Of the second start: files are in memory, and what starts keep is kept."""
    peak_bytes: int
    ours: bool = False
    allowed_bytes: int = 0
    """Of ours: the peak that is aimed at."""


Rows = Mapping[str, Row]
"""By contender's name."""


def rate(workload: Workload, measured: Measured) -> float:
    """The workload's tokens/s in one run."""
    if workload.max_new == 1:
        return workload.prompt_tokens / measured.first_token_s
    if len(workload.prompts) == 1:
        return (workload.max_new - 1) / (measured.elapsed_s - measured.first_token_s)
    return measured.output_tokens / measured.elapsed_s


def limit(workload: Workload, config: ModelConfig, limits: Limits, width: Width) -> float:
    """The most tokens/s that this machine's memory and arithmetic allow."""
    read_s = width.bits / 8 * _weights_read(config) / limits.read_bytes_per_s
    if len(workload.prompts) == 1 and workload.max_new > 1:
        return 1 / read_s
    body = config.num_parameters - config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    head = config.vocab_size * config.hidden_size
    operations = 2 * body * (workload.prompt_tokens + workload.output_tokens) + 2 * head * workload.output_tokens
    tokens = workload.prompt_tokens if workload.max_new == 1 else workload.output_tokens
    return tokens / max(operations / limits.rate_of(width.arithmetic), workload.max_new * read_s)


def figure(rates: Sequence[float], most: float, *, disturbed: int = 0) -> Figure:
    """Of a workload's tokens/s in all rounds; `most` is the limit."""
    median = statistics.median(rates)
    return Figure(median, min(rates), max(rates), median / most, len(rates), disturbed)


def table(rows: Rows, base: str = "") -> str:
    """One row a contender: figures with their shares of the limit and, if `base` is one of them, the ratio to it."""
    workloads = list(next(iter(rows.values())).figures)
    head = ["contender", "width", *(f"{name} tok/s" for name in workloads), "start to first token", "peak memory"]
    cells = [head]
    for name, row in rows.items():
        figures = [_cell(row.figures[w], rows[base].figures[w] if base in rows else None) for w in workloads]
        starts = f"{row.first_start_s:.1f} s, again {row.start_s:.1f} s"
        cells.append([name, row.width.name, *figures, starts, f"{row.peak_bytes / 1e6:.0f} MB"])
    return aligned(cells)


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def _cell(shown: Figure, base: Figure | None) -> str:
    ratio = f", {shown.tokens_per_s / base.tokens_per_s:.2f}x" if base is not None else ""
    mark = "~" if shown.disturbed else ""
    return f"{shown.tokens_per_s:.1f}{mark} ({shown.share_of_limit:.0%}{ratio})"


def _weights_read(config: ModelConfig) -> int:
    """Weights that one decode step reads: all but the embedding's rows that are only looked up."""
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return config.num_parameters - looked_up

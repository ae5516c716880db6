"""What ours is meant to reach beside the best peers, row by row, and whether a run shows it.

A row without a ratio to reach is told for honesty: the best peer of whatever arithmetic, where the target is against
those that compute as exactly as ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.report import Row, Rows, aligned

MOST_START_S: Final = 4.0
ONE_RANK: Final = "hetero 16-bit 1x2"
TWO_RANKS: Final = "hetero 16-bit 2x1"
INT8: Final = "hetero int8"
INT4: Final = "hetero int4"
FOUR_BITS: Final = "llama.cpp Q4_1"
"""With minima, as ours: Q4_0 is faster, and loses two fifths of the demo model's perplexity (bench/NOTES.md)."""


@dataclass(frozen=True, slots=True)
class Target:
    """`ours` against the best of `rivals` at `workload`; `ratio` None: no target."""

    what: str
    ours: str
    workload: str
    rivals: Callable[[str, Row], bool]
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what became of it; `met` is None where there is no target or a side was not measured."""

    what: str
    target: str
    ours: str
    against: str
    ratio: float | None
    met: bool | None


def _wide(_: str, row: Row) -> bool:
    return not row.ours and row.width.bits >= 16


def _exact(name: str, row: Row) -> bool:
    return _wide(name, row) and row.width.arithmetic == "float32"


def _bits(*bits: int) -> Callable[[str, Row], bool]:
    return lambda _, row: not row.ours and row.width.bits in bits


def _is(name: str) -> Callable[[str, Row], bool]:
    return lambda rival, _: rival == name


TARGETS: Final = (
    Target("decode1, 16-bit weights", ONE_RANK, "decode1", _wide, 1.15),
    Target("decode1, int8", INT8, "decode1", _bits(8), 1.5),
    Target("decode1, int4", INT4, "decode1", _is(FOUR_BITS), 1.5),
    Target("decode1, int4, any 4 bits", INT4, "decode1", _bits(4), None),
    Target("prefill512, fp32-class", ONE_RANK, "prefill512", _exact, 1.5),
    Target("prefill512, 16 bit, any arithmetic", ONE_RANK, "prefill512", _wide, None),
    Target("prefill512, int8", INT8, "prefill512", _bits(8, 4), 1.3),
    Target("batch8, fp32-class", ONE_RANK, "batch8", _exact, 1.2),
    Target("batch32, fp32-class", ONE_RANK, "batch32", _exact, 1.2),
    Target("batch8, 16 bit, any arithmetic", ONE_RANK, "batch8", _wide, None),
    Target("batch32, 16 bit, any arithmetic", ONE_RANK, "batch32", _wide, None),
    Target("batch8, int8", INT8, "batch8", _bits(8), 1.2),
    Target("batch32, int8", INT8, "batch32", _bits(8), 1.2),
    Target("2 ranks x 1 core, decode1", TWO_RANKS, "decode1", _is(ONE_RANK), 0.95),
    Target("2 ranks x 1 core, batch32", TWO_RANKS, "batch32", _is(ONE_RANK), 1.0),
)


def verdicts(rows: Rows) -> list[Verdict]:
    """Of all targets; those of speed whose workload was measured, then starts and memory of ours."""
    found = [_verdict(target, rows) for target in TARGETS if _measured(rows, target.workload)]
    ours = [(name, row) for name, row in rows.items() if row.ours]
    found += [_start(f"first start to first token, {name}", row.first_start_s) for name, row in ours]
    found += [_start(f"second start to first token, {name}", row.start_s) for name, row in ours]
    return found + [_memory(name, row) for name, row in ours]


def ratios(found: Sequence[Verdict]) -> dict[str, float]:
    """What is kept as history."""
    return {verdict.what: round(verdict.ratio, 3) for verdict in found if verdict.ratio is not None}


def table(found: Sequence[Verdict]) -> str:
    cells = [["target", "wanted", "ours", "against", "ratio", "met"]]
    for verdict in found:
        ratio = "-" if verdict.ratio is None else f"{verdict.ratio:.2f}"
        met = {True: "yes", False: "NO", None: "-"}[verdict.met]
        cells.append([verdict.what, verdict.target, verdict.ours, verdict.against, ratio, met])
    return aligned(cells)


def _verdict(target: Target, rows: Rows) -> Verdict:
    wanted = "-" if target.ratio is None else f">= {target.ratio:.2f}x"
    rivals = [name for name, row in rows.items() if target.rivals(name, row)]
    if target.ours not in rows:
        return Verdict(target.what, wanted, "not measured", "", None, None)
    own = rows[target.ours].figures[target.workload].tokens_per_s
    if not rivals:
        return Verdict(target.what, wanted, f"{own:.1f}", "nobody was measured", None, None)
    best = max(rivals, key=lambda name: rows[name].figures[target.workload].tokens_per_s)
    theirs = rows[best].figures[target.workload].tokens_per_s
    ratio = own / theirs
    met = None if target.ratio is None else ratio >= target.ratio
    return Verdict(target.what, wanted, f"{own:.1f}", f"{best} {theirs:.1f}", ratio, met)


def _start(what: str, start_s: float) -> Verdict:
    return Verdict(what, f"<= {MOST_START_S:.0f} s", f"{start_s:.1f} s", "", None, start_s <= MOST_START_S)


def _memory(name: str, row: Row) -> Verdict:
    own, most = f"{row.peak_bytes / 1e6:.0f} MB", f"<= {row.allowed_bytes / 1e6:.0f} MB"
    return Verdict(f"peak memory, {name}", most, own, "", None, row.peak_bytes <= row.allowed_bytes)


def _measured(rows: Rows, workload: str) -> bool:
    return any(workload in row.figures for row in rows.values())

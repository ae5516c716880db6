"""Measures entrants side by side, in groups that fit the memory, and makes one set of figures of it.

All of a group are started, twice, and loaded before the first run. The link, one peer, is in every group: figures of
later groups are multiplied by what the link reached in the first over what it reached in theirs, so that a machine that
got slower meanwhile does not count. Whoever cannot be had, does not start or breaks is left out and named with the
reason.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import psutil

from bench.contenders import Contender
from bench.entrants import LINK, Entrant, Setting, groups
from bench.limits import Limits
from bench.peers.environments import PeerError
from bench.quiet import wait_quiet
from bench.report import Figure, Row, Width, figure, limit, rate
from bench.turns import BROKEN, Quiet, Run, print_run, take_turns
from bench.workloads import Workload

MEMORY_SHARE: Final = 0.9
"""Of what is available, for one group."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What was measured of one entrant, in one group."""

    width: Width
    facts: Mapping[str, str]
    first_start_s: float
    """Of one that was ended again before the other was started."""
    start_s: float
    peak_bytes: int
    allowed_bytes: int
    runs: Mapping[str, Sequence[Run]]
    """By workload."""


@dataclass(slots=True)
class Comparison:
    """Of all groups. `absent`: who is not in them, and why."""

    groups: list[dict[str, Taken]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


def compare(
    entrants: Sequence[Entrant], setting: Setting, workloads: Mapping[str, Workload], *, rounds: int, quiet: Quiet
) -> Comparison:
    """Measure all that can be had."""
    comparison = Comparison()
    ready: list[Entrant] = []
    for entrant in entrants:
        try:
            entrant.open(setting)
        except PeerError as error:
            comparison.absent[entrant.name] = str(error)
        else:
            ready.append(entrant)
    available_bytes = MEMORY_SHARE * psutil.virtual_memory().available
    for group in groups(ready, setting, available_bytes):
        print("together:", ", ".join(entrant.name for entrant in group), file=sys.stderr)
        comparison.groups.append(_measure(group, setting, workloads, comparison.absent, rounds=rounds, quiet=quiet))
    return comparison


def rows_of(
    comparison: Comparison,
    entrants: Sequence[Entrant],
    setting: Setting,
    workloads: Mapping[str, Workload],
    limits: Limits,
) -> dict[str, Row]:
    """One row an entrant that was measured, in the order of `entrants`; the link's is that of the first group."""
    rows: dict[str, Row] = {}
    for group in comparison.groups:
        scales = scales_to(comparison.groups[0], group, workloads)
        for entrant in entrants:
            if entrant.name in rows or entrant.name not in group:
                continue
            taken = group[entrant.name]
            figures = {
                name: _figure(taken, workload, scales[name], limit(workload, setting.config, limits, taken.width))
                for name, workload in workloads.items()
            }
            rows[entrant.name] = Row(
                taken.width, figures, taken.first_start_s, taken.start_s, taken.peak_bytes, entrant.ours,
                taken.allowed_bytes,
            )  # fmt: skip
    return {entrant.name: rows[entrant.name] for entrant in entrants if entrant.name in rows}


def scales_to(
    first: Mapping[str, Taken], group: Mapping[str, Taken], workloads: Mapping[str, Workload]
) -> dict[str, float]:
    """What a group's figures are multiplied by, for each workload; 1 where the link was not measured."""
    if LINK not in first or LINK not in group:
        return dict.fromkeys(workloads, 1.0)
    return {
        name: statistics.median(_rates(first[LINK], workload)) / statistics.median(_rates(group[LINK], workload))
        for name, workload in workloads.items()
    }


def unlike(comparison: Comparison, workload: str) -> list[str]:
    """Who began the workload's first completion with other tokens than most did."""
    heads = {
        name: taken.runs[workload][0].measured.heads[0] for group in comparison.groups for name, taken in group.items()
    }
    usual = statistics.mode(heads.values())
    return [name for name, head in heads.items() if head != usual]


def _measure(
    group: Sequence[Entrant],
    setting: Setting,
    workloads: Mapping[str, Workload],
    absent: dict[str, str],
    *,
    rounds: int,
    quiet: Quiet,
) -> dict[str, Taken]:
    taken: dict[str, Taken] = {}
    with ExitStack() as stack:
        started: dict[str, tuple[Entrant, Contender, float, float]] = {}
        for entrant in group:
            print(f"starting {entrant.name}", file=sys.stderr)
            if quiet.attempts:
                wait_quiet(quiet.most_cores, timeout_s=quiet.wait_s)
            contender = entrant.open(setting)
            stack.callback(contender.stop)
            try:
                first_start_s = _start_and_stop(entrant.open(setting))
                start_s = contender.start()
                contender.hold()
            except BROKEN as error:
                absent[entrant.name] = f"does not start: {error}"
                contender.stop()
            else:
                started[entrant.name] = entrant, contender, first_start_s, start_s
        contenders = [contender for _, contender, *_ in started.values()]
        runs, broken = take_turns(contenders, workloads, rounds=rounds, quiet=quiet, tell=print_run(rate))
        absent |= broken
        for name, (entrant, contender, first_start_s, start_s) in started.items():
            if name not in broken:
                facts = contender.facts()
                taken[name] = Taken(
                    Width(entrant.bits, facts["arithmetic"]), facts, first_start_s, start_s, contender.peak_bytes(),
                    contender.allowed_bytes(), runs[name],
                )  # fmt: skip
    return taken


def _start_and_stop(contender: Contender) -> float:
    """What the first start took: of whatever is not in memory yet, and of what is kept for the next."""
    try:
        return contender.start()
    finally:
        contender.stop()


def _figure(taken: Taken, workload: Workload, scale: float, most: float) -> Figure:
    disturbed = sum(run.disturbed for run in taken.runs[workload.name])
    return figure([scale * each for each in _rates(taken, workload)], most, disturbed=disturbed)


def _rates(taken: Taken, workload: Workload) -> list[float]:
    return [rate(workload, run.measured) for run in taken.runs[workload.name]]

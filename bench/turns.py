"""Runs in turns: in each round every contender runs every workload once (A B C A B C), so slow minutes hit all alike.

While one is measured the others are held still, and the machine must be quiet: a run that other processes disturbed is
repeated, and the least disturbed one counts, marked as disturbed if no attempt was quiet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.contenders import Contender, Measured
from bench.quiet import ForeignLoad, wait_quiet
from bench.workloads import Workload
from hetero_api.errors import HeteroError

BROKEN: Final = (RuntimeError, OSError, HeteroError)
"""What a contender raises that does not start or breaks."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run that counts. `foreign_cores`: what other processes used meanwhile."""

    measured: Measured
    foreign_cores: float
    attempts: int
    disturbed: bool


Runs = dict[str, dict[str, list[Run]]]
"""By contender and workload."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """When a machine is quiet enough, and how much is done about it. With `attempts` 0 nobody looks."""

    most_cores: float = 0.15
    attempts: int = 3
    wait_s: float = 20.0


def take_turns(
    contenders: Sequence[Contender],
    workloads: Mapping[str, Workload],
    *,
    rounds: int,
    quiet: Quiet,
    tell: Callable[[str, Workload, Run], None],
) -> tuple[Runs, dict[str, str]]:
    """All runs, and why each contender that broke did; those are asked no more.

    Each contender's first run, on the first workload, warms up and is not counted.
    """
    runs: Runs = {contender.name: {name: [] for name in workloads} for contender in contenders}
    broken: dict[str, str] = {}
    turns: list[tuple[str | None, Workload]] = [(None, next(iter(workloads.values())))]
    turns += [(name, workload) for _ in range(rounds) for name, workload in workloads.items()]
    for name, workload in turns:
        for contender in contenders:
            if contender.name in broken:
                continue
            try:
                contender.release()
                run = _run(contender, workload, quiet if name else Quiet(attempts=0))
                contender.hold()
            except BROKEN as error:
                broken[contender.name] = f"broke at {workload.name}: {error}"
                continue
            if name:
                runs[contender.name][name].append(run)
                tell(contender.name, workload, run)
    return runs, broken


def _run(contender: Contender, workload: Workload, quiet: Quiet) -> Run:
    best: Run | None = None
    for attempt in range(1, max(1, quiet.attempts) + 1):
        if quiet.attempts:
            wait_quiet(quiet.most_cores, timeout_s=quiet.wait_s)
        load = ForeignLoad(contender.pid)
        measured = contender.run(workload)
        cores = load.cores()
        made, wanted = measured.output_tokens, workload.output_tokens
        if made != wanted:
            raise RuntimeError(f"made {made} tokens, not {wanted}")
        disturbed = bool(quiet.attempts) and cores > quiet.most_cores
        if best is None or cores < best.foreign_cores:
            best = Run(measured, cores, attempt, disturbed)
        if not disturbed:
            break
    assert best is not None
    return best


def print_run(rate: Callable[[Workload, Measured], float]) -> Callable[[str, Workload, Run], None]:
    """Tells of a run on standard error."""

    def tell(name: str, workload: Workload, run: Run) -> None:
        noise = f", others used {run.foreign_cores:.2f} cores" if run.disturbed else ""
        again = f", attempt {run.attempts}" if run.attempts > 1 else ""
        print(f"{workload.name:10} {name}: {rate(workload, run.measured):.1f} tok/s{noise}{again}", file=sys.stderr)

    return tell

"""A B A B: this checkout against another one, both loaded and run in turns; ratios of the pairs with intervals.

    git worktree add ../before REVISION; make -C ../before install native
    python -m bench.against ../before [--rounds 5] [--workloads decode1 prefill512 batch32] [--only "hetero int8"]

In each round both checkouts' groups are started, one after the other, each by its own environment; then they run each
workload by turns (A B B A), seconds apart, so that a machine that gets slower meanwhile slows both. Which of them
starts first alternates, too. Workloads are run several times a round. Ratios are this checkout's figure over the
other's: above 1 is faster (tokens/s), or slower and larger (seconds, bytes). The interval is Student's, at 95 %, of
the pairs' logarithms. The first start of each measures the machine and packs weights, later ones find that done. An
entrant that does not start, such as one that the other checkout does not know, is left out and named. Writes
bench/results/against-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.entrants import Ours, Setting, chosen
from bench.home import RESULTS, BenchHome
from bench.machine import describe
from bench.ours import HeteroContender
from bench.processes import end_in_order
from bench.report import rate
from bench.run import WORKLOADS
from bench.shapes import DEMO, MODELS, directory_of
from bench.turns import BROKEN
from bench.workloads import Workload, make_workloads
from hetero_api.model_config import ModelConfig

STUDENT: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
"""Quantiles of Student's distribution at 97.5 %, by degrees of freedom from 1 on; beyond the last one, the last one."""

NAMES: Final = ("other", "this")

Pairs = dict[tuple[str, str], list[tuple[float, float]]]
"""(other, this) of each pair, by entrant and quantity."""
REPEATS: Final = {"decode1": 4, "prefill512": 4}
"""Runs of a workload in a round, of each checkout; of the others two."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of one entrant's quantity, this checkout over the other."""

    entrant: str
    quantity: str
    other: float
    this: float
    """Medians over the rounds, in the quantity's unit."""
    ratio: float
    low: float
    high: float
    pairs: int


def ratios_of(pairs: Pairs) -> list[Ratio]:
    """Return a ratio for each entrant and quantity."""
    return [ratio_of(*key, values) for key, values in sorted(pairs.items())]


def ratio_of(entrant: str, quantity: str, values: Sequence[tuple[float, float]]) -> Ratio:
    """Return the ratio of pairs (other, this), with Student's interval of their logarithms."""
    logs = [math.log(this / other) for other, this in values]
    middle, half = statistics.fmean(logs), math.inf
    if len(logs) > 1:
        quantile = STUDENT[min(len(logs) - 1, len(STUDENT)) - 1]
        half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    other, this = (statistics.median(column) for column in zip(*values, strict=True))
    return Ratio(
        entrant,
        quantity,
        other,
        this,
        ratio=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        pairs=len(logs),
    )


def measure_round(
    entrant: Ours, checkouts: Sequence[Path | None], setting: Setting, workloads: Mapping[str, Workload], *, turn: int
) -> Pairs:
    """Start an entrant of both checkouts, run the workloads by turns, and end them.

    `checkouts`: the other one and this one. `turn`: number of the round; 0 has the first start. Raises RuntimeError if
    one does not start or breaks.
    """
    pairs: Pairs = {}
    with ExitStack() as stack:
        both: dict[str, HeteroContender] = {}
        starts: dict[str, float] = {}
        names = _by_turns(turn)
        for name in names:
            both[name] = contender = entrant.open_from(checkouts[NAMES.index(name)], setting)
            contender.name = name
            stack.callback(contender.stop)
            starts[name] = contender.start()
        pairs[entrant.name, "start, s" if turn else "first start, s"] = [_pair(starts)]
        for name in names:
            both[name].run(next(iter(workloads.values())))  # warms up
        for title, workload in workloads.items():
            pairs[entrant.name, f"{title}, tok/s"] = [
                _pair({name: _rate(both[name], workload) for name in _by_turns(turn + repeat)})
                for repeat in range(REPEATS.get(title, 2))
            ]
        pairs[entrant.name, "peak memory, bytes"] = [_pair({name: each.peak_bytes() for name, each in both.items()})]
    return pairs


def _by_turns(turn: int) -> Sequence[str]:
    """Return the checkouts in the order in which they take this turn."""
    return NAMES[::-1] if turn % 2 else NAMES


def _pair(values: Mapping[str, float]) -> tuple[float, float]:
    other, this = (values[name] for name in NAMES)
    return other, this


def _rate(contender: HeteroContender, workload: Workload) -> float:
    measured = contender.run(workload)
    if measured.output_tokens != workload.output_tokens:
        raise RuntimeError(f"made {measured.output_tokens} tokens, not {workload.output_tokens}")
    return rate(workload, measured)


def table(ratios: Sequence[Ratio]) -> str:
    """Return the ratios as a table of Markdown."""
    lines = ["| entrant | quantity | other | this | ratio | 95 % interval |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {each.entrant} | {each.quantity} | {each.other:.4g} | {each.this:.4g} | {each.ratio:.3f} "
        f"| {each.low:.3f} to {each.high:.3f} |"
        for each in ratios
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="checkout with an installed .venv")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=["decode1", "prefill512", "batch32"])
    parser.add_argument("--only", nargs="*", default=["hetero"], help="entrants whose name contains one of these")
    parser.add_argument("--model", choices=MODELS, default=DEMO)
    arguments = parser.parse_args()
    end_in_order()
    other = arguments.other.resolve()
    entrants = [each for each in chosen(arguments.only) if isinstance(each, Ours)]
    pairs: Pairs = {}
    with tempfile.TemporaryDirectory(prefix="hetero-against-") as folder:
        home = BenchHome.from_environment()
        directory = directory_of(arguments.model, home)
        config = ModelConfig.from_directory(directory)
        setting = Setting(BenchHome(Path(folder)), arguments.model, directory, config, threads=2)
        workloads = {name: each for name, each in make_workloads(directory).items() if name in arguments.workloads}
        for turn in range(arguments.rounds):
            for entrant in list(entrants):
                try:
                    found = measure_round(entrant, (other, None), setting, workloads, turn=turn)
                except BROKEN as error:
                    print(f"left out from round {turn + 1} on: {entrant.name}: {error}", file=sys.stderr)
                    entrants.remove(entrant)
                    continue
                for key, values in found.items():
                    pairs.setdefault(key, []).extend(values)
            print(f"round {turn + 1} of {arguments.rounds}", file=sys.stderr)
    ratios = ratios_of(pairs)
    print(table(ratios))
    path = RESULTS / f"against-{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=other, capture_output=True, text=True, check=True
    )
    result = describe() | {"other": revision.stdout.strip(), "ratios": [asdict(each) for each in ratios]}
    result["pairs"] = {": ".join(key): values for key, values in sorted(pairs.items())}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

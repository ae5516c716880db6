"""A B A B: this checkout against another one, in alternating runs of `bench.run`; ratios of the pairs with intervals.

    git worktree add ../before REVISION; make -C ../before install native
    python -m bench.against ../before [--rounds 5] [--workloads decode1 prefill512 batch32] [--only hetero]

Each run is a process of its own in its own checkout and virtual environment, so that both use their own code from the
client to the kernels. Both checkouts need entrants of the same names; others are left out and named. Ratios are this
checkout's figure over the other's: above 1 is faster (tokens/s), or slower and larger (seconds, bytes). The interval is
Student's, at 95 %, of the pairs' logarithms. Writes bench/results/against-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.home import ENV_BENCH_HOME, RESULTS, ROOT
from bench.machine import describe
from bench.run import WORKLOADS

STUDENT: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
"""Quantiles of Student's distribution at 97.5 %, by degrees of freedom from 1 on; beyond the last one, the last one."""
START_AND_MEMORY: Final = {"first_start_s": "first start, s", "start_s": "start, s", "peak_bytes": "peak memory, bytes"}

Figures = dict[tuple[str, str], float]
"""Of one run, by entrant and quantity."""


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


def ratios_of(pairs: Sequence[tuple[Figures, Figures]]) -> list[Ratio]:
    """Return the ratios of figures that both runs of a pair have. `pairs`: (other, this), one a round."""
    found: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for other, this in pairs:
        for key in this.keys() & other.keys():
            found[key].append((other[key], this[key]))
    return [_ratio(*key, values) for key, values in sorted(found.items())]


def _ratio(entrant: str, quantity: str, values: Sequence[tuple[float, float]]) -> Ratio:
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


def figures_of(result: Mapping[str, Any]) -> Figures:
    """Return tokens/s by workload, seconds to start, and peak bytes, from a result file of bench.run."""
    figures: Figures = {}
    for name, row in result["rows"].items():
        figures |= {(name, f"{key}, tok/s"): figure["tokens_per_s"] for key, figure in row["figures"].items()}
        figures |= {(name, told): row[key] for key, told in START_AND_MEMORY.items()}
    return figures


def _measure(checkout: Path, arguments: argparse.Namespace, home: Path) -> Figures:
    """Run the benchmark once in a checkout. Raises RuntimeError with what it printed when it failed."""
    results = checkout / "bench" / "results"
    before, history = set(results.glob("peers-*")), (results / "history.jsonl").read_bytes()
    command = [str(checkout / ".venv/bin/python"), "-m", "bench.run", "--peers", "--rounds", "1", "--attempts", "0"]
    command += ["--workloads", *arguments.workloads, "--only", *arguments.only]
    # What groups keep from start to start is of one checkout's code.
    environment = os.environ | {ENV_BENCH_HOME: str(home)}
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False, env=environment)
    new = set(results.glob("peers-*")) - before
    made = [path for path in new if path.suffix == ".json"]
    if done.returncode or len(made) != 1:
        raise RuntimeError(f"bench.run in {checkout} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    figures = figures_of(json.loads(made[0].read_text(encoding="utf-8")))
    # These runs are half of a comparison: neither results nor a line of history of their own.
    for path in new:
        path.unlink()
    (results / "history.jsonl").write_bytes(history)
    return figures


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
    arguments = parser.parse_args()
    other = arguments.other.resolve()
    pairs: list[tuple[Figures, Figures]] = []
    with tempfile.TemporaryDirectory(prefix="hetero-against-") as folder:
        for turn in range(arguments.rounds):
            homes = Path(folder, "other"), Path(folder, "this")
            pairs.append((_measure(other, arguments, homes[0]), _measure(ROOT, arguments, homes[1])))
            print(f"round {turn + 1} of {arguments.rounds}", file=sys.stderr)
            if missing := {name for name, _ in pairs[-1][0].keys() ^ pairs[-1][1].keys()}:
                print(f"only in one checkout: {', '.join(sorted(missing))}", file=sys.stderr)
    ratios = ratios_of(pairs)
    print(table(ratios))
    path = RESULTS / f"against-{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=other, capture_output=True, text=True, check=True
    )
    result = describe() | {"other": revision.stdout.strip(), "ratios": [asdict(each) for each in ratios]}
    result["rounds"] = [[{": ".join(key): value for key, value in side.items()} for side in pair] for pair in pairs]
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make bench` and `make bench-peers`: ours beside other engines, on the same prompts, and this machine's limits.

    python -m bench.run            [--rounds 5] [--workloads decode1 batch32]    ours in 16 bit and transformers
    python -m bench.run --peers    [--only NAME ...] [--model qwen3-0.6b]        all that are installed

Peers are installed by bench.peers.install. In each round every contender runs every workload once, in turns (A B C A B
C); the median over rounds counts. A table tells tokens/s and the share of the limit of each one's width; with --peers
also what became of the targets. Writes bench/results/[peers-]DATE.json, and with --peers a plot and a line of history.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench import history, targets
from bench import limits as machine
from bench.comparison import Comparison, compare, rows_of, unlike
from bench.entrants import Setting, chosen
from bench.home import RESULTS, BenchHome
from bench.machine import describe
from bench.plots import draw_peers
from bench.processes import end_in_order
from bench.report import Row, table
from bench.shapes import DEMO, MODELS, directory_of
from bench.turns import Quiet
from bench.workloads import make_workloads
from hetero_api import __version__
from hetero_api.model_config import ModelConfig

WORKLOADS: Final = ("decode1", "prefill512", "batch8", "batch32")
THREADS: Final = 2
FEW: Final = ("hetero 16-bit", "transformers fp32")
BASE: Final = "transformers fp32"


def main() -> int:
    end_in_order()
    arguments = _parser().parse_args()
    with_peers = arguments.peers or bool(arguments.only)
    home = BenchHome.from_environment()
    directory = directory_of(arguments.model, home)
    setting = Setting(home, arguments.model, directory, ModelConfig.from_directory(directory), arguments.threads)
    entrants = chosen(arguments.only) if with_peers else chosen(FEW)
    workloads = {name: each for name, each in make_workloads(directory).items() if name in arguments.workloads}
    quiet = Quiet(most_cores=arguments.most_foreign_cores, attempts=arguments.attempts)
    limits = machine.measure(arguments.threads)
    comparison = compare(entrants, setting, workloads, rounds=arguments.rounds, quiet=quiet)
    limits = limits.or_better(machine.measure(arguments.threads))
    rows = rows_of(comparison, entrants, setting, workloads, limits)
    about = describe()
    print(f"\n{about['machine']['cpu']}, {arguments.threads} threads, {arguments.model}: {limits.told()}")
    print(f"tokens/s (share of the limit of that width), medians of {arguments.rounds} rounds; ~ disturbed\n")
    _print_absent(comparison.absent)
    if not rows:
        return 1
    print(table(rows, base="" if with_peers else BASE))
    _print_unlike(comparison, next(iter(workloads)))
    result = about | {"model": arguments.model, "versions": {"hetero": __version__}, "limits": asdict(limits)}
    result |= {"absent": comparison.absent, "rows": {name: asdict(row) for name, row in rows.items()}}
    result |= {"groups": [{name: asdict(taken) for name, taken in group.items()} for group in comparison.groups]}
    stem = RESULTS / f"{'peers-' if with_peers else ''}{time.strftime('%Y-%m-%d-%H%M%S')}"
    if with_peers:
        _with_targets(rows, result, stem, arguments.model)
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {stem}.json")
    return 0


def _with_targets(rows: Mapping[str, Row], result: dict[str, Any], stem: Path, model: str) -> None:
    """Tell of the targets, draw, and keep a line of history."""
    found = targets.verdicts(rows)
    print(f"\nTargets, ours against the best peer of the kind in this run\n\n{targets.table(found)}")
    result["targets"] = [asdict(verdict) for verdict in found]
    draw_peers(rows, title=f"{model}, {result['machine']['cpu']}, {result['date']}", path=stem.with_suffix(".svg"))
    history.append(history.line(result, model, rows, found))


def _print_absent(absent: Mapping[str, str]) -> None:
    for name, why in absent.items():
        print(f"not available: {name}: {why}")
    if absent:
        print()


def _print_unlike(comparison: Comparison, workload: str) -> None:
    if others := unlike(comparison, workload):
        print(f"\n{workload} begins with other tokens than most made: {', '.join(others)}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="measure all peers and all widths of ours")
    parser.add_argument("--only", nargs="*", default=[], help="of these, those whose name contains one of NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=WORKLOADS, help="default: all")
    parser.add_argument("--model", choices=MODELS, default=DEMO)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--attempts", type=int, default=3, help="of a run that others disturb; 0: never look")
    parser.add_argument("--most-foreign-cores", type=float, default=0.15, help="of others, in a quiet run")
    return parser


if __name__ == "__main__":
    sys.exit(main())

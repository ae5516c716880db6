"""`make bench`: ours beside transformers, in turns, on the same prompts, with the limits of this machine.

    python -m bench.run [--rounds 5] [--workloads decode1 batch32]

In each round every contender runs every workload once, in turns (A B C A B C); the median over rounds counts. Writes
bench/results/DATE-HOST.json and prints a table: tokens/s, the share of the limit, the ratio to transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from bench import limits as machine
from bench import report
from bench.contenders import Contender, HeteroContender, Measured, transformers_peer
from bench.workloads import Workload, make_workloads
from hetero_api import __version__
from hetero_api.model_config import ModelConfig
from hetero_client.home import HeteroHome

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
THREADS = 2
RESULTS = Path(__file__).parent / "results"
Runs = dict[str, dict[str, list[Measured]]]


def measure(contenders: list[Contender], workloads: dict[str, Workload], rounds: int) -> Runs:
    """All runs, in turns; the first, a warm-up of each, is not counted."""
    runs: Runs = {c.name: {name: [] for name in workloads} for c in contenders}
    for contender in contenders:
        contender.run(next(iter(workloads.values())))
    for number in range(rounds):
        for name, workload in workloads.items():
            for contender in contenders:
                measured = contender.run(workload)
                if measured.output_tokens != workload.output_tokens:
                    raise RuntimeError(f"{contender.name} made {measured.output_tokens} tokens of {name}")
                runs[contender.name][name].append(measured)
                print(
                    f"round {number + 1} {name} {contender.name}: {report.rate(workload, measured):.1f} tok/s",
                    file=sys.stderr,
                )
    return runs


def environment(limits: machine.Limits) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
        "versions": {"hetero": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "limits": asdict(limits),
        "model": MODEL,
        "dtype": "float32",
        "command": "python -m bench.run " + " ".join(sys.argv[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", nargs="*", help="default: all")
    arguments = parser.parse_args()
    model = HeteroHome.from_environment().models / "hf" / MODEL
    config = ModelConfig.from_directory(model)
    workloads = {k: w for k, w in make_workloads(model).items() if not arguments.workloads or k in arguments.workloads}
    limits = machine.measure(THREADS)
    contenders: list[Contender] = [
        HeteroContender(model=model, ranks=1, cores=2),
        HeteroContender(model=model, ranks=2, cores=1),
        transformers_peer(model, THREADS),
    ]
    starts: dict[str, float] = {}
    try:
        for contender in contenders:
            starts[contender.name] = contender.start()
        runs = measure(contenders, workloads, arguments.rounds)
        peaks = {contender.name: contender.peak_bytes() for contender in contenders}
    finally:
        for contender in contenders:
            contender.stop()
    figures = {
        name: {w: report.figure(workloads[w], taken, config, limits) for w, taken in by_workload.items()}
        for name, by_workload in runs.items()
    }
    result = environment(limits) | {
        "figures": report.as_json(figures), "start_to_first_token_s": starts, "peak_bytes": peaks,
        "runs": {n: {w: [asdict(m) for m in ms] for w, ms in by.items()} for n, by in runs.items()},
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    reads, computes = limits.read_bytes_per_s / 1e9, limits.fp32_flops / 1e9
    print(f"\n{_cpu_name()}, {THREADS} threads: reads {reads:.1f} GB/s, fp32 {computes:.0f} GFLOP/s")
    print("tokens/s (share of this machine's limit, ratio to transformers), medians of", arguments.rounds, "rounds\n")
    print(report.table(figures, starts, peaks, base="transformers"))
    print(f"\nwritten to {path}")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()

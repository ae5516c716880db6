"""Layers of the largest models' real shapes: ours and llama.cpp on the same GGUF file, in turns.

    python -m bench.cuts [MODEL ...] [--rounds 3] [--gigabytes 6] [--layers N] [--threads 2] [--keep]

Of each model a cut is made (bench/cut_files.py): as many layers as `--gigabytes` hold, of DeepSeek-V3 two dense ones
and one of experts. Both are loaded side by side if the memory holds them, and run each workload by turns; otherwise
each is started, measured and ended, round by round.

    decode1     tokens/s of one sequence after its first token
    decode8     tokens/s of eight sequences together, after their first tokens
    prefill512  tokens/s of one prompt

A decoded step reads the weights that its tokens use, so bandwidth bounds decode1 and decode8. Experts are taken to be
chosen evenly. prefill512 has the share of the same limit, and of what products of whole numbers allow. Writes
bench/results/cuts-DATE.json. Needs the environment of llama.cpp: python -m bench.peers.install --only llama.cpp
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from bench.contenders import Contender, Measured
from bench.cut_files import ALL_LEAST, CUTS, Work, cut, layers_within, least_layers, published, write
from bench.entrants import GB
from bench.home import RESULTS, BenchHome
from bench.limits import Limits, measure
from bench.machine import describe
from bench.ours import HeteroContender
from bench.peers.environments import PeerError, interpreter, missing
from bench.peers.process import PeerProgram, ProcessPeer
from bench.processes import end_in_order
from bench.report import aligned
from bench.shapes import DEMO, directory_of
from bench.turns import BROKEN, Quiet, Run, Runs, print_run, take_turns
from bench.workloads import Workload
from hetero_api.model_config import ModelConfig

OURS: Final = "hetero"
PEER: Final = "llama.cpp"
SEED: Final = 1
PROMPT: Final = 32
NEW: Final = 64
CONTEXT: Final = 4096
"""Tokens of all sequences together."""
LOAD_TIMEOUT_S: Final = 900.0
_SIDE_BY_SIDE: Final = 2.4
"""Memory that both take together, over the file's bytes."""
_MEMORY_SHARE: Final = 0.9
_FILE: Final = "model.gguf"


@dataclass(frozen=True, slots=True)
class Figure:
    """Tokens a second of one contender and workload, and their shares of the limits."""

    model: str
    layers: int
    contender: str
    workload: str
    tokens_per_s: float
    low: float
    high: float
    share_of_bandwidth: float
    share_of_products: float | None
    """Of prefill alone."""
    disturbed: int
    """Rounds in which other processes took part of the machine."""


def workloads(vocabulary: int) -> dict[str, Workload]:
    """Return prompts of random tokens."""
    source = random.Random(SEED)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(source.randrange(3, vocabulary) for _ in range(length))

    made = (
        Workload("decode1", (prompt(PROMPT),), NEW),
        Workload("decode8", tuple(prompt(PROMPT) for _ in range(8)), NEW),
        Workload("prefill512", (prompt(512),), 1),
    )
    return {workload.name: workload for workload in made}


def rate(workload: Workload, measured: Measured) -> float:
    """Return a run's tokens/s: of the prompt, or of what follows the first tokens."""
    if workload.max_new == 1:
        return workload.prompt_tokens / measured.first_token_s
    return len(workload.prompts) * (workload.max_new - 1) / (measured.elapsed_s - measured.first_token_s)


def limits_of(workload: Workload, work: Work, limits: Limits) -> tuple[float, float | None]:
    """Return the most tokens/s that bandwidth allows, and for a prefill what products allow."""
    rows = workload.prompt_tokens if workload.max_new == 1 else len(workload.prompts)
    by_bandwidth = rows * limits.read_bytes_per_s / work.bytes_a_step(rows)
    if workload.max_new > 1:
        return by_bandwidth, None
    return by_bandwidth, limits.rate_of("int8") / (2 * work.weights)


def contenders(folder: Path, home: BenchHome, threads: int) -> list[Contender]:
    """Return both, not started. Raises PeerError where llama.cpp is not installed."""
    if why := missing(home, PEER):
        raise PeerError(why)
    file = folder / _FILE
    config, size = ModelConfig.from_directory(folder), file.stat().st_size
    kv_bytes = int(1.25 * CONTEXT * 4 * config.num_layers * config.cached_elements(config.num_kv_heads)) + (64 << 20)
    ours = HeteroContender(
        name=OURS,
        model=folder,
        ranks=1,
        cores=threads,
        max_model_len=CONTEXT // 4,
        memory_bytes=int(1.5 * size) + kv_bytes + 3 * GB,
        home=folder / "home",
        engine={"kvCacheMemoryBytes": str(kv_bytes)},
        ready_timeout_s=LOAD_TIMEOUT_S,
    )
    program = PeerProgram(
        python=interpreter(home, PEER),
        module="bench.peers.llama_cpp_peer",
        model=file,
        dtype="q4_0",
        threads=threads,
        log=home.log(f"cuts-{folder.name}"),
        max_seqs=8,
        max_context=CONTEXT,
    )
    return [ours, ProcessPeer(PEER, program)]


def run_in_turns(
    both: Sequence[Contender], work: Mapping[str, Workload], *, rounds: int, quiet: Quiet, together: bool
) -> tuple[Runs, dict[str, str]]:
    """Return all runs, and why a contender broke. `together`: both stay loaded from the first round to the last."""
    runs: Runs = {contender.name: {name: [] for name in work} for contender in both}
    broken: dict[str, str] = {}
    turns = [both] if together else [[contender] for _ in range(rounds) for contender in both]
    for turn in turns:
        with ExitStack() as stack:
            started = [contender for contender in turn if contender.name not in broken]
            for contender in tuple(started):
                stack.callback(contender.stop)
                try:
                    print(f"{contender.name}: started in {contender.start():.0f} s", file=sys.stderr)
                    contender.hold()
                except BROKEN as error:
                    broken[contender.name] = f"does not start: {error}"
                    started.remove(contender)
            found, why = take_turns(started, work, rounds=rounds if together else 1, quiet=quiet, tell=print_run(rate))
        broken |= why
        for name, by_workload in found.items():
            for workload, each in by_workload.items():
                runs[name][workload].extend(each)
    return runs, broken


def figures_of(
    model: str, layers: int, runs: Runs, work: Work, named: Mapping[str, Workload], limits: Limits
) -> list[Figure]:
    """Return a figure for each contender and workload that was run."""
    found = []
    for contender, by_workload in runs.items():
        for name, each in by_workload.items():
            if each:
                found.append(_figure(model, layers, contender, named[name], each, limits_of(named[name], work, limits)))
    return found


def _figure(
    model: str, layers: int, contender: str, workload: Workload, runs: Sequence[Run], most: tuple[float, float | None]
) -> Figure:
    rates = [rate(workload, run.measured) for run in runs]
    median, (by_bandwidth, by_products) = statistics.median(rates), most
    return Figure(
        model,
        layers,
        contender,
        workload.name,
        median,
        min(rates),
        max(rates),
        median / by_bandwidth,
        None if by_products is None else median / by_products,
        sum(run.disturbed for run in runs),
    )


def table(figures: Sequence[Figure]) -> str:
    """Return the figures in columns."""
    cells = [["model", "layers", "contender", "workload", "tokens/s", "range", "of bandwidth", "of products"]]
    for each in figures:
        products = "" if each.share_of_products is None else f"{each.share_of_products:.0%}"
        cells.append([
            each.model, str(each.layers), each.contender, each.workload,
            f"{each.tokens_per_s:.1f}{'~' if each.disturbed else ''}", f"{each.low:.1f} to {each.high:.1f}",
            f"{each.share_of_bandwidth:.0%}", products,
        ])  # fmt: skip
    return aligned(cells)


def make(name: str, home: BenchHome, options: argparse.Namespace) -> tuple[Path, int]:
    """Write a model's cut and a tokenizer, unless they are there; return their folder and the cut's layers."""
    config, architecture = published(name), CUTS[name]
    least = least_layers(config)
    fitting = layers_within(architecture, config, options.gigabytes * GB)
    layers = max(options.layers or (fitting if name not in ALL_LEAST else least), least)
    folder: Path = options.folder / f"{name}-{layers}"
    if not (folder / _FILE).is_file():
        write(architecture, cut(config, layers), folder / _FILE)
    shutil.copy(directory_of(DEMO, home) / "tokenizer.json", folder / "tokenizer.json")
    return folder, layers


def measure_model(name: str, home: BenchHome, limits: Limits, options: argparse.Namespace) -> list[Figure]:
    """Make a model's cut, measure both with it, and remove it again."""
    began_s = time.monotonic()
    folder, layers = make(name, home, options)
    size = (folder / _FILE).stat().st_size
    print(f"{name}: {layers} layers, {size / GB:.1f} GB, made in {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    try:
        named, work = workloads(ModelConfig.from_directory(folder).vocab_size), Work.of(folder / _FILE)
        together = _SIDE_BY_SIDE * size < _MEMORY_SHARE * psutil.virtual_memory().available
        both, quiet = contenders(folder, home, options.threads), Quiet(attempts=0 if options.noisy else 3)
        runs, broken = run_in_turns(both, named, rounds=options.rounds, quiet=quiet, together=together)
    finally:
        if not options.keep:
            shutil.rmtree(folder)
    for contender, why in broken.items():
        print(f"{name}: {contender} {why}", file=sys.stderr)
    return figures_of(name, layers, runs, work, named, limits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {' '.join(CUTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=6.0, help="most of a file")
    parser.add_argument("--layers", type=int, help="in place of as many as fit")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where files are made; default: models of the bench's home")
    parser.add_argument("--keep", action="store_true", help="leave the files there")
    parser.add_argument("--noisy", action="store_true", help="do not wait for a quiet machine")
    options = parser.parse_args()
    unknown = sorted(set(options.models) - CUTS.keys())
    if unknown:
        parser.error(f"no cut of {', '.join(unknown)}: one of {', '.join(CUTS)}")
    end_in_order()
    home = BenchHome.from_environment()
    options.folder = options.folder or home.root / "cuts"
    options.folder.mkdir(parents=True, exist_ok=True)
    limits = measure(options.threads).or_better(measure(options.threads))
    print(limits.told(), file=sys.stderr)
    figures = [each for name in options.models or CUTS for each in measure_model(name, home, limits, options)]
    print(table(figures))
    path = RESULTS / f"cuts-{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    result: dict[str, Any] = describe() | {"limits": asdict(limits), "figures": [asdict(each) for each in figures]}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

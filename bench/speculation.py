"""What proposed tokens give: tokens/s of one group without them, with NGram, Auto, and Auto by a draft model, in turns.

    python -m bench.speculation [--rounds 5] [--model NAME] [--width 16 8] [--only WORKLOAD ...] [--without-oracle]

    quote N    a passage of bench/texts, and its first words again: 128 tokens go on quoting it
    edit N     a function of bench/texts/edits.toml, and the beginning of the same with a name changed
    random     a prompt of random tokens: nothing that was there before tells what comes
    prose      running prose, as bench.run's decode1
    batch32    bench.run's: Auto has to leave it alone

Medians of the rounds, as tokens/s and as a multiple of those without; and how many proposed tokens were accepted. All
draw greedily, and it fails where first tokens differ from those without. The draft model is the first layers of the
model, which are seldom right, as no smaller model of its tokenizer is there: Auto has to leave it alone. What a good
one is worth is measured with an oracle (bench/oracle.py). Writes bench/results/speculation-DATE.json, and its exit
status is 1 if a figure is below its target.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from bench.contenders import Measured
from bench.home import RESULTS, ROOT, BenchHome
from bench.machine import describe
from bench.oracle import measure_oracle
from bench.ours import HeteroContender
from bench.report import aligned
from bench.shapes import DEMO, directory_of
from bench.turns import Quiet, Runs, print_run, take_turns
from bench.workloads import SEED, Workload, make_workloads
from hetero_api.model_config import ModelConfig
from tests.support.draft_models import without_layers

KINDS: Final = ("None", "NGram", "Auto", "Auto, draft")
DRAFT_LAYERS: Final = 6
LEAST_OF_QUOTES: Final = 1.8
"""Times without, by NGram, of the best quoting or editing workload's median; in 16 and 8 bits."""
LEAST_OF_AUTO: Final = 0.97
"""Times without, on workloads in which nothing repeats."""
PLAIN: Final = ("random", "batch32")
WIDTHS: Final = {16: ("bfloat16", "none"), 8: ("float32", "int8"), 4: ("float32", "int4")}
NEW_TOKENS: Final = 128
PASSAGES: Final = 3
PASSAGE_TOKENS: Final = 160
CUE_TOKENS: Final = 12
"""Leading tokens that a prompt has again, so that what follows quotes them."""
TEXTS: Final = ROOT / "bench" / "texts"


def workloads(model: Path) -> dict[str, Workload]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    made = [Workload(f"quote {n}", (prompt,), NEW_TOKENS) for n, prompt in enumerate(_quotes(tokenizer), 1)]
    made += [Workload(f"edit {n}", (prompt,), NEW_TOKENS) for n, prompt in enumerate(_edits(tokenizer), 1)]
    source, usual = random.Random(SEED), make_workloads(model)
    nonsense = tuple(source.randrange(1000, tokenizer.get_vocab_size()) for _ in range(64))
    made.append(Workload("random", (nonsense,), NEW_TOKENS))
    made.append(Workload("prose", usual["decode1"].prompts, NEW_TOKENS))
    made.append(usual["batch32"])
    return {workload.name: workload for workload in made}


def _quotes(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    text = (TEXTS / "declaration-and-constitution.txt").read_text(encoding="utf-8")
    ids, source = _ids(tokenizer, text), random.Random(SEED)
    between = _ids(tokenizer, "\n\nThe same text, word for word:\n\n")
    begins = [source.randrange(len(ids) - PASSAGE_TOKENS) for _ in range(PASSAGES)]
    passages = [ids[begin : begin + PASSAGE_TOKENS] for begin in begins]
    return [(*passage, *between, *passage[:CUE_TOKENS]) for passage in passages]


def _edits(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    edits = tomllib.loads((TEXTS / "edits.toml").read_text(encoding="utf-8"))["edit"]
    return [tuple(_ids(tokenizer, _edit(**edit))) for edit in edits]


def _edit(*, old: str, new: str, code: str) -> str:
    changed = code.replace(old, new)
    cue = changed[: changed.index(new) + len(new)]
    return f"```python{code}```\n\nThe same function with `{old}` renamed to `{new}`:\n\n```python{cue}"


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def contenders(model: Path, draft: Path, width: int) -> list[HeteroContender]:
    dtype, quantization = WIDTHS[width]
    drafting = {"kind": "Auto", "draft": {"uri": f"file://{draft}"}}
    return [
        HeteroContender(
            name=kind,
            model=model,
            ranks=1,
            cores=2,
            dtype=dtype,
            quantization=quantization,
            engine={"speculative": drafting if kind == "Auto, draft" else {"kind": kind}},
        )
        for kind in KINDS
    ]


def rate(_: Workload, measured: Measured) -> float:
    """Output tokens/s."""
    return measured.output_tokens / measured.elapsed_s


def measure(width: int, model: Path, draft: Path, chosen: Sequence[str], *, rounds: int) -> dict[str, dict[str, float]]:
    """Print a table of one width; return tokens/s by workload and kind."""
    loads = {name: load for name, load in workloads(model).items() if not chosen or name in chosen}
    groups = contenders(model, draft, width)
    try:
        for group in groups:
            group.start()
        runs, broken = take_turns(groups, loads, rounds=rounds, quiet=Quiet(), tell=print_run(rate))
        if broken:
            raise RuntimeError(f"{broken}")
        found = _medians(loads, runs)
        _print(width, found)
        for group in groups:
            print(f"{group.name}: {group.topology().speculation or 'nothing is proposed'}")
        return found
    finally:
        for group in groups:
            group.stop()


def _medians(loads: dict[str, Workload], runs: Runs) -> dict[str, dict[str, float]]:
    for name in loads:
        heads = {run.measured.heads for kind in KINDS for run in runs[kind][name]}
        if len(heads) > 1:
            raise RuntimeError(f"{name}: tokens differ: {heads}")
    return {
        name: {kind: statistics.median(rate(load, run.measured) for run in runs[kind][name]) for kind in KINDS}
        for name, load in loads.items()
    }


def _print(width: int, found: dict[str, dict[str, float]]) -> None:
    rows = []
    for name, medians in found.items():
        times = [medians[kind] / medians["None"] for kind in KINDS[1:]]
        rows.append([name, *(f"{medians[kind]:.1f}" for kind in KINDS), *(f"{each:.2f}x" for each in times)])
    print(f"\n{width}-bit weights, tokens/s")
    print(aligned([["", *KINDS, *(f"{kind}/None" for kind in KINDS[1:])], *rows]))


def missed(width: int, found: dict[str, dict[str, float]]) -> list[str]:
    """Return the figures that are below their targets."""
    problems = []
    quoting = {name: each["NGram"] / each["None"] for name, each in found.items() if name.startswith(("quote", "edit"))}
    if quoting and width in (16, 8) and statistics.median(quoting.values()) < LEAST_OF_QUOTES:
        problems.append(f"{width} bits: NGram is {statistics.median(quoting.values()):.2f}x off on quotes and edits")
    for name in PLAIN:
        for kind in ("Auto", "Auto, draft"):
            if name in found and (times := found[name][kind] / found[name]["None"]) < LEAST_OF_AUTO:
                problems.append(f"{width} bits, {name}: {kind} is {times:.2f}x off")
    return problems


def measure_oracles(width: int, model: Path, draft: Path) -> dict[str, list[Mapping[str, float]]]:
    """Print a table of proposals that are right at given rates, and return its figures by source."""
    dtype, quantization = WIDTHS[width]
    found = {}
    for source, directory in (("free", None), ("draft", draft)):
        # A process of its own: its threads are bound to the cores.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found[source] = pool.submit(
                measure_oracle, model, directory, dtype=dtype, quantization=quantization, threads=2
            ).result()
    rows = [[source, *(f"{each[name]:.2f}" for name in found[source][0])] for source in found for each in found[source]]
    print(f"\n{width}-bit weights, an oracle's proposals")
    print(aligned([["", *found["free"][0]], *rows]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--width", type=int, nargs="+", default=[16, 8], choices=list(WIDTHS))
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--without-oracle", action="store_true")
    parser.add_argument("--oracle-alone", action="store_true")
    arguments = parser.parse_args()
    model, said = directory_of(arguments.model, BenchHome.from_environment()), describe()
    print(json.dumps(said))
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        layers = ModelConfig.from_directory(model).num_layers
        draft = without_layers(model, Path(folder) / "draft", number=layers - DRAFT_LAYERS)
        for width in arguments.width:
            figures = said.setdefault(f"{width} bits", {})
            if not arguments.without_oracle:
                figures["oracle"] = measure_oracles(width, model, draft)
            if not arguments.oracle_alone:
                figures["tokens_per_s"] = measure(width, model, draft, arguments.only, rounds=arguments.rounds)
                problems += missed(width, figures["tokens_per_s"])
    said["missed"] = problems
    path = RESULTS / f"speculation-{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    print(f"wrote bench/results/{path.name}", *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""What proposed tokens give: tokens/s of one group without them, with NGram and with Auto, in turns.

    python -m bench.speculation [--rounds 5] [--model NAME] [--width 16 8] [--only WORKLOAD ...]

    quote N    a passage of bench/texts, and its first words again: 128 tokens go on quoting it
    edit N     a function of bench/texts/edits.toml, and the beginning of the same with a name changed
    random     a prompt of random tokens: nothing that was there before tells what comes
    prose      running prose, as bench.run's decode1
    batch32    bench.run's: Auto has to leave it alone

Medians of the rounds, as tokens/s and as a multiple of those without; and how many proposed tokens were accepted. All
draw greedily, and it fails where first tokens differ from those without.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from bench.contenders import Measured
from bench.home import ROOT, BenchHome
from bench.machine import describe
from bench.ours import HeteroContender
from bench.report import aligned
from bench.shapes import DEMO, directory_of
from bench.turns import Quiet, Runs, print_run, take_turns
from bench.workloads import SEED, Workload, make_workloads

KINDS: Final = ("None", "NGram", "Auto")
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


def contenders(model: Path, width: int) -> list[HeteroContender]:
    dtype, quantization = WIDTHS[width]
    return [
        HeteroContender(
            name=kind,
            model=model,
            ranks=1,
            cores=2,
            dtype=dtype,
            quantization=quantization,
            engine={"speculative": {"kind": kind}},
        )
        for kind in KINDS
    ]


def rate(_: Workload, measured: Measured) -> float:
    """Output tokens/s."""
    return measured.output_tokens / measured.elapsed_s


def measure(width: int, model: Path, chosen: Sequence[str], *, rounds: int) -> None:
    """Print a table of one width."""
    loads = {name: load for name, load in workloads(model).items() if not chosen or name in chosen}
    groups = contenders(model, width)
    try:
        for group in groups:
            group.start()
        runs, broken = take_turns(groups, loads, rounds=rounds, quiet=Quiet(), tell=print_run(rate))
        if broken:
            raise RuntimeError(f"{broken}")
        _print(width, loads, runs)
        for group in groups:
            print(f"{group.name}: {group.topology().speculation or 'nothing is proposed'}")
    finally:
        for group in groups:
            group.stop()


def _print(width: int, loads: dict[str, Workload], runs: Runs) -> None:
    rows = []
    for name, load in loads.items():
        heads = {run.measured.heads for kind in KINDS for run in runs[kind][name]}
        if len(heads) > 1:
            raise RuntimeError(f"{name}: tokens differ: {heads}")
        medians = [statistics.median(rate(load, run.measured) for run in runs[kind][name]) for kind in KINDS]
        off = medians[0]
        rows.append([name, *(f"{each:.1f}" for each in medians), *(f"{each / off:.2f}x" for each in medians[1:])])
    print(f"\n{width}-bit weights, tokens/s")
    print(aligned([["", *KINDS, *(f"{kind}/None" for kind in KINDS[1:])], *rows]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--width", type=int, nargs="+", default=[16, 8], choices=list(WIDTHS))
    parser.add_argument("--only", nargs="+", default=[])
    arguments = parser.parse_args()
    model = directory_of(arguments.model, BenchHome.from_environment())
    print(json.dumps(describe()))
    for width in arguments.width:
        measure(width, model, arguments.only, rounds=arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())

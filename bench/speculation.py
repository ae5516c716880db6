"""What proposed tokens give: tokens/s of one group without them, with NGram, Auto, and Auto by a draft model, in turns.

    python -m bench.speculation [--rounds 5] [--model NAME ...] [--width 16 8] [--only WORKLOAD ...] [--without-oracle]
    python -m bench.speculation --places-alone

    quote N    a passage of bench/texts, and its first words again: 128 tokens go on quoting it
    edit N     a function of bench/texts/edits.toml, and the beginning of the same with a name changed
    random     a prompt of random tokens, and draws at temperature 1: nothing that was there tells what comes
    prose      running prose, as bench.run's decode1
    batch32    bench.run's: Auto has to leave it alone

Beside them llama.cpp with the same prompts, one by one and but random's: plain, and with prompt lookup decoding.
Without its environment (python -m bench.peers.install --only llama.cpp) it is left out, and that is said. Models are
the demo's, and a small one of experts with random weights, where a row more reads more experts: it has the last three
workloads alone, ours alone, and Auto has to leave each of them alone, or be faster.

Medians of the rounds as tokens/s, of one prompt behind its first token, and ratios of each round's pair with 95 %
intervals; and how many proposed tokens were accepted. Other draws are greedy, and it fails where first tokens of ours
differ from those without. The draft model is the first layers of the model, which are seldom right, as no smaller model
of its tokenizer is there: Auto has to leave it alone. What a good one is worth is measured with an oracle
(bench/oracle.py). `--places-alone`: a model that drafts for itself, and is always right, on one of two ranks or split
over both, beside two that draft nothing. Writes bench/results/speculation-DATE.json, and its exit status is 1 if a
figure is below its target.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
import tomllib
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from bench.against import Pairs, Ratio, ratios_of
from bench.contenders import Contender
from bench.entrants import PEERS, Setting
from bench.home import RESULTS, ROOT, BenchHome
from bench.machine import describe
from bench.oracle import measure_oracle
from bench.ours import HeteroContender
from bench.peers.environments import PeerError
from bench.report import aligned, rate
from bench.shapes import DEMO, EXPERTS, MODELS, directory_of
from bench.turns import BROKEN, Quiet, Runs, print_run, take_turns
from bench.workloads import SEED, Workload, make_workloads
from hetero_api.model_config import ModelConfig
from tests.support.draft_models import without_layers

KINDS: Final = ("None", "NGram", "Auto", "Auto, draft")
PEER: Final = {16: "llama.cpp F16", 8: "llama.cpp Q8_0", 4: "llama.cpp Q4_0"}
LOOKUP: Final = ", lookup "
LOOKUP_TOKENS: Final = (10, 2)
"""Most tokens that the peer's lookup proposes: its default, and what it recommends for CPUs."""
DRAFT_LAYERS: Final = 6
LEAST_OF_QUOTES: Final = 1.8
"""Times without, by NGram, of the best quoting or editing workload's median; in 16 and 8 bits."""
LEAST_OF_AUTO: Final = 0.97
"""Times without, on workloads in which nothing repeats."""
PLAIN: Final = ("random", "batch32")
PLACES: Final = ("None", "CPU", "All")
"""Of a draft model on two CPU ranks: nowhere, on the first, split over both."""
OF_EXPERTS: Final = ("random", "prose", "batch32")
"""Workloads of models of experts; all of them are plain."""
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
    made.append(Workload("random", (nonsense,), NEW_TOKENS, temperature=1.0))
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


def peers(name: str, model: Path, width: int, home: BenchHome) -> list[Contender]:
    """Return llama.cpp, plain and with prompt lookup. Raises PeerError where it cannot be had."""
    setting = Setting(home, name, model, ModelConfig.from_directory(model), threads=2)
    plain = next(entrant for entrant in PEERS if entrant.name == PEER[width])
    lookups = [replace(plain, name=f"{plain.name}{LOOKUP}{most}", lookup_tokens=most) for most in LOOKUP_TOKENS]
    return [entrant.open(setting) for entrant in (plain, *lookups)]


@dataclass(frozen=True, slots=True)
class Figure:
    """Tokens/s of one contender and workload: median, smallest and largest over rounds."""

    workload: str
    contender: str
    tokens_per_s: float
    low: float
    high: float
    disturbed: int
    """Rounds in which other processes took part of the machine."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured of one model and width."""

    figures: list[Figure]
    ratios: list[Ratio]
    """`entrant` is two contenders, `quantity` a workload."""
    speculation: dict[str, str]
    """What became of the proposals of each of ours."""
    left_out: dict[str, str]
    """Why peers took no part."""

    def ratio(self, workload: str, kind: str) -> float | None:
        """Tokens/s of one of ours over those without proposals; None if it was not measured."""
        wanted = (f"{kind} / None", workload)
        return next((each.ratio for each in self.ratios if (each.entrant, each.quantity) == wanted), None)


def measure(
    loads: Mapping[str, Workload], ours: Sequence[HeteroContender], others: Sequence[Contender], options: Namespace
) -> Found:
    """Start all, and run the workloads by turns; `others` have those of one prompt without draws."""
    shared = {name: load for name, load in loads.items() if len(load.prompts) == 1 and not load.temperature}
    own = {name: load for name, load in loads.items() if name not in shared}
    quiet, tell = Quiet(attempts=0 if options.noisy else 3), print_run(rate)
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        for group in ours:
            stack.callback(group.stop)
            group.start()
        started = []
        for other in others:
            stack.callback(other.stop)
            try:
                other.start()
                other.hold()
            except BROKEN as error:
                left_out[other.name] = f"{error}"
                continue
            started.append(other)
        runs: Runs = {}
        for named, taking in ((shared, [*ours, *started]), (own, ours)):
            if not named:
                continue
            made, broken = take_turns(taking, named, rounds=options.rounds, quiet=quiet, tell=tell)
            if broken.keys() & set(KINDS):
                raise RuntimeError(f"{broken}")
            left_out |= broken
            for contender, by_workload in made.items():
                if contender not in broken:
                    runs.setdefault(contender, {}).update(by_workload)
        _refuse_other_tokens(runs)
        said = {group.name: group.topology().speculation or "nothing is proposed" for group in ours}
    return Found(_figures(loads, runs), ratios_of(_pairs(loads, runs)), said, left_out)


def _refuse_other_tokens(runs: Runs) -> None:
    for name in runs[KINDS[0]]:
        heads = {run.measured.heads for kind in KINDS for run in runs[kind][name]}
        if len(heads) > 1:
            raise RuntimeError(f"{name}: tokens differ: {heads}")


def _figures(loads: Mapping[str, Workload], runs: Runs) -> list[Figure]:
    found = []
    for contender, by_workload in runs.items():
        for name, each in by_workload.items():
            rates = [rate(loads[name], run.measured) for run in each]
            disturbed = sum(run.disturbed for run in each)
            found.append(Figure(name, contender, statistics.median(rates), min(rates), max(rates), disturbed))
    return found


def _pairs(loads: Mapping[str, Workload], runs: Runs) -> Pairs:
    """Return each round's pairs: ours over ours without proposals, the peer alike, and NGram over the peer's lookup."""
    lookups = [name for name in runs if LOOKUP in name]
    compared = [(kind, KINDS[0]) for kind in KINDS[1:]]
    compared += [(lookup, lookup.partition(LOOKUP)[0]) for lookup in lookups]
    compared += [("NGram", lookup) for lookup in lookups]
    return _paired(loads, runs, compared)


def _paired(loads: Mapping[str, Workload], runs: Runs, compared: Sequence[tuple[str, str]]) -> Pairs:
    return {
        (f"{this} / {other}", name): [
            (rate(load, before.measured), rate(load, run.measured))
            for before, run in zip(runs[other][name], runs[this][name], strict=True)
        ]
        for this, other in compared
        for name, load in loads.items()
        if name in runs[this] and name in runs.get(other, {})
    }


def _print(title: str, found: Found) -> None:
    names = list(dict.fromkeys(figure.contender for figure in found.figures))
    loads = list(dict.fromkeys(figure.workload for figure in found.figures))
    cells = {(figure.workload, figure.contender): _cell(figure) for figure in found.figures}
    print(f"\n{title}, tokens/s")
    print(aligned([["", *names], *([load, *(cells.get((load, name), "") for name in names)] for load in loads)]))
    entrants = list(dict.fromkeys(each.entrant for each in found.ratios))
    intervals = {
        (each.quantity, each.entrant): f"{each.ratio:.2f} ({each.low:.2f} to {each.high:.2f})" for each in found.ratios
    }
    rows = [[load, *(intervals.get((load, each), "") for each in entrants)] for load in loads]
    print(f"\n{title}, ratios")
    print(aligned([["", *entrants], *rows]))
    print(*(f"{name}: {said}" for name, said in found.speculation.items()), sep="\n")
    print(*(f"left out: {name}: {why}" for name, why in found.left_out.items()), sep="\n")


def _cell(figure: Figure) -> str:
    return f"{figure.tokens_per_s:.1f}{'~' if figure.disturbed else ''}"


def missed(title: str, width: int, plain: Sequence[str], found: Found) -> list[str]:
    """Return the figures that are below their targets; Auto has to leave `plain` workloads alone."""
    problems = []
    quoting = [
        each.ratio
        for each in found.ratios
        if each.entrant == "NGram / None" and each.quantity.startswith(("quote", "edit"))
    ]
    if quoting and width in (16, 8) and statistics.median(quoting) < LEAST_OF_QUOTES:
        problems.append(f"{title}: NGram is {statistics.median(quoting):.2f}x off on quotes and edits")
    for name in plain:
        for kind in ("Auto", "Auto, draft"):
            times = found.ratio(name, kind)
            if times is not None and times < LEAST_OF_AUTO:
                problems.append(f"{title}, {name}: {kind} is {times:.2f}x off")
    return problems


def measure_oracles(title: str, width: int, model: Path, draft: Path) -> dict[str, list[Mapping[str, float]]]:
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
    print(f"\n{title}, an oracle's proposals")
    print(aligned([["", *found["free"][0]], *rows]))
    return found


def measure_places(model: Path, width: int, options: Namespace) -> tuple[list[Figure], list[Ratio]]:
    """Print and return tokens/s of prose by where the draft model lies, and its ratios to none."""
    dtype, quantization = WIDTHS[width]
    prose = {"prose": workloads(model)["prose"]}

    def group(place: str) -> HeteroContender:
        draft = {"uri": f"file://{model}", "ranks": place}
        speculative = {"kind": "None"} if place == "None" else {"kind": "Draft", "draft": draft, "maxTokens": 4}
        return HeteroContender(
            name=place,
            model=model,
            ranks=2,
            cores=1,
            dtype=dtype,
            quantization=quantization,
            engine={"speculative": speculative},
            placement={"shares": {"attention": [2, 1], "mlp": [1, 1], "vocabulary": [1, 1]}},
        )

    groups = [group(place) for place in PLACES]
    with ExitStack() as stack:
        for each in groups:
            stack.callback(each.stop)
            each.start()
        quiet = Quiet(attempts=0 if options.noisy else 3)
        runs, broken = take_turns(groups, prose, rounds=options.rounds, quiet=quiet, tell=print_run(rate))
        said = {each.name: each.topology().speculation for each in groups}
    if broken or len({run.measured.heads for by_load in runs.values() for run in by_load["prose"]}) > 1:
        raise RuntimeError(f"groups broke, or their tokens differ: {broken}")
    pairs = _paired(prose, runs, (("CPU", "None"), ("All", "None"), ("All", "CPU")))
    found = Found(_figures(prose, runs), ratios_of(pairs), said, {})
    _print(f"{width}-bit weights, the draft model on one of two ranks and on both", found)
    return found.figures, found.ratios


def measure_model(name: str, width: int, home: BenchHome, options: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Print tables of a model in one width; return the figures, and those below their targets."""
    model, title, figures = directory_of(name, home), f"{name}, {width}-bit weights", dict[str, Any]()
    config = ModelConfig.from_directory(model)
    dense = config.experts is None
    loads = {load: each for load, each in workloads(model).items() if dense or load in OF_EXPERTS}
    loads = {load: each for load, each in loads.items() if not options.only or load.startswith(tuple(options.only))}
    if not loads:
        raise SystemExit(f"--only {' '.join(options.only)}: no workload of {name} begins so")
    with tempfile.TemporaryDirectory() as folder:
        draft = without_layers(model, Path(folder) / "draft", number=config.num_layers - DRAFT_LAYERS)
        if dense and not (options.without_oracle or options.places_alone):
            figures["oracle"] = measure_oracles(title, width, model, draft)
        if options.oracle_alone:
            return figures, []
        if options.places_alone:
            places, ratios = measure_places(model, width, options)
            figures["places"] = [*map(asdict, places), *map(asdict, ratios)]
            return figures, []
        others: Sequence[Contender] = ()
        if dense:
            try:
                others = peers(name, model, width, home)
            except PeerError as error:
                print(f"left out: {error}")
                figures["left_out"] = {PEER[width]: f"{error}"}
        found = measure(loads, contenders(model, draft, width), others, options)
    _print(title, found)
    return asdict(found) | figures, missed(title, width, PLAIN if dense else OF_EXPERTS, found)


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[DEMO, EXPERTS])
    parser.add_argument("--width", type=int, nargs="+", default=[16, 8], choices=list(WIDTHS))
    parser.add_argument("--only", nargs="+", default=[], help="workloads whose name begins with one of these")
    parser.add_argument("--without-oracle", action="store_true")
    parser.add_argument("--oracle-alone", action="store_true")
    parser.add_argument("--places-alone", action="store_true")
    parser.add_argument("--noisy", action="store_true", help="do not wait for a quiet machine")
    options = parser.parse_args()
    home, said = BenchHome.from_environment(), describe()
    print(json.dumps(said))
    problems: list[str] = []
    path = RESULTS / f"speculation-{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    for name in options.model:
        for width in options.width:
            said[f"{name}, {width} bits"], below = measure_model(name, width, home, options)
            problems += below
            said["missed"] = problems
            path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
            print(f"wrote bench/results/{path.name}", *below, sep="\n", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Does the placement's prediction come true? CPU-only layouts of three models, predicted at start and then measured.

    python -m bench.prediction [--starts N] [--rounds N] [--layouts NAME ...] [--models NAME ...]

Each layout is a real local group. The prediction is the gateway's own, made from what its ranks measured when they
started, in that very run: nothing here is fitted to the machine. Then one stream is served, greedily: the time to the
first token of a cold prompt is the prefill, the time between later tokens the decode; medians over the rounds. Both
are as a client sees them, so the gateway's and the wire's part is in them. A machine that others use too is now faster
and now slower, for seconds or minutes: every layout is started anew `--starts` times, all layouts in turn, and what
counts is the median over the starts of each one's error, since what was predicted and measured in one start belongs
together. Speeds in the table are medians, too.

Prints a table and writes bench/results/prediction.json; exit status 1 when an error exceeds the limit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.home import BenchHome
from bench.ours import HeteroContender
from bench.shapes import MANY_EXPERTS, directory_of
from hetero_client import Delta, SamplingParams
from hetero_client.home import HeteroHome
from hetero_client.model_store.demo_model import demo_directory

PROMPT_TOKENS: Final = 512
OUTPUT_TOKENS: Final = 256
LIMIT: Final = 0.15
"""Largest error that passes, of the measured value."""
RESULTS: Final = Path(__file__).parent / "results" / "prediction.json"
_WORKLOAD: Final = {"promptTokens": PROMPT_TOKENS, "outputTokens": OUTPUT_TOKENS, "concurrency": 1}
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Layout:
    """CPU ranks, and what the resource says of them. Shares are for models of any shape."""

    name: str
    ranks: int = 2
    cores: int = 1
    mode: str = "Tensor"
    shares: Mapping[str, Sequence[float]] = field(default_factory=dict)
    experts: str = "Auto"
    exchange: Mapping[str, str] = field(default_factory=dict)


EVEN: Final = {"attention": [1, 1], "mlp": [1, 1], "vocabulary": [1, 1]}
LAYOUTS: Final = (
    Layout("1 rank of 1 core", ranks=1),
    Layout("1 rank of 2 cores", ranks=1, cores=2),
    Layout("2 ranks, solved"),
    Layout("2 ranks, even", shares=EVEN),
    Layout("MLP 3:1", shares={**EVEN, "mlp": [3, 1]}),
    Layout("MLP 1:2", shares={**EVEN, "mlp": [1, 2]}),
    Layout("MLP 1:5", shares={**EVEN, "mlp": [1, 5]}),
    Layout("heads 1:2", shares={**EVEN, "attention": [1, 2]}),
    Layout("heads and vocabulary 2:1", shares={**EVEN, "attention": [2, 1], "vocabulary": [2, 1]}),
    Layout("second rank on MLP only", shares={"attention": [1, 0], "mlp": [2, 1], "vocabulary": [1, 0]}),
    Layout("layers, even", mode="Layer", shares={"mlp": [1, 1]}),
    Layout("layers 2:1", mode="Layer", shares={"mlp": [2, 1]}),
    Layout("2 ranks, even, Gloo", shares=EVEN, exchange={"kind": "Gloo"}),
)
EXPERT_LAYOUTS: Final = (
    Layout("1 rank of 1 core", ranks=1),
    Layout("1 rank of 2 cores", ranks=1, cores=2),
    Layout("2 ranks, solved"),
    Layout("2 ranks, experts whole", shares=EVEN, experts="Whole"),
    Layout("2 ranks, experts in slices", shares=EVEN, experts="Slices"),
    Layout("second rank on experts only", shares={"attention": [1, 0], "mlp": [1, 1], "vocabulary": [1, 0]}),
)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of one stream."""

    decode: float
    prefill: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One layout of one model."""

    model: str
    layout: str
    predicted: Speed
    measured: Speed
    starts: tuple[tuple[Speed, Speed], ...]
    """What was predicted and measured at each."""

    @property
    def decode_error(self) -> float:
        """Of the measured value, the median start's; positive: predicted too fast."""
        return statistics.median(predicted.decode / measured.decode - 1 for predicted, measured in self.starts)

    @property
    def prefill_error(self) -> float:
        return statistics.median(predicted.prefill / measured.prefill - 1 for predicted, measured in self.starts)

    @property
    def worst(self) -> float:
        return max(abs(self.decode_error), abs(self.prefill_error))


def try_layout(model: Path, layout: Layout, *, rounds: int) -> tuple[Speed, Speed]:
    """Start the group, take its prediction, and measure."""
    contender = HeteroContender(
        model=model,
        ranks=layout.ranks,
        cores=layout.cores,
        mode=layout.mode,
        placement={"shares": layout.shares, "experts": layout.experts, "workload": _WORKLOAD},
        exchange=layout.exchange,
    )
    try:
        contender.start()
        placement = contender.topology().placement
        assert placement is not None, "a group that serves has decided its placement"
        chosen = next(option for option in placement.options if option.chosen)
        speeds = [_serve(contender, seed) for seed in range(rounds + 1)][1:]
    finally:
        contender.stop()
    return Speed(chosen.decode_tokens_per_second, chosen.prefill_tokens_per_second), middle(speeds)


def middle(speeds: Sequence[Speed]) -> Speed:
    """The median of each."""
    return Speed(
        statistics.median(speed.decode for speed in speeds), statistics.median(speed.prefill for speed in speeds)
    )


def _serve(contender: HeteroContender, seed: int) -> Speed:
    """One cold prompt and its output."""
    prompt = [(7 * seed + 11 * i) % 40_000 + 10 for i in range(PROMPT_TOKENS)]
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    arrivals: list[tuple[float, int]] = []
    began_s = time.perf_counter()
    with contender.client.generate(prompt, sampling=sampling, cache_salt=f"{seed}-{began_s}") as stream:
        for event in stream:
            if isinstance(event, Delta):
                arrivals.append((time.perf_counter(), len(event.token_ids)))
    (first_s, first_tokens), (last_s, _) = arrivals[0], arrivals[-1]
    later_tokens = sum(tokens for _, tokens in arrivals) - first_tokens
    return Speed(decode=later_tokens / (last_s - first_s), prefill=PROMPT_TOKENS / (first_s - began_s))


def wide_model(folder: Path, tokenizer: Path) -> Path:
    """Random weights of another shape: wider, fewer layers, norms of heads, more query heads. Needs transformers."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config: Any = Qwen3Config(
        vocab_size=49152, hidden_size=1024, intermediate_size=3072, num_hidden_layers=10, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder / name)
    return folder


def outcomes(arguments: argparse.Namespace, folder: Path, tell: Callable[[str], None]) -> list[Outcome]:
    """All layouts of all models asked for; `tell` is told of each start."""
    smollm2 = demo_directory(HeteroHome.from_environment())
    models: dict[str, tuple[Callable[[], Path], Sequence[Layout]]] = {
        "SmolLM2-135M": (lambda: smollm2, LAYOUTS),
        "Qwen3-like, 1024 wide": (lambda: wide_model(folder, smollm2), LAYOUTS),
        MANY_EXPERTS: (lambda: directory_of(MANY_EXPERTS, BenchHome.from_environment()), EXPERT_LAYOUTS),
    }
    asked = {name: models[name] for name in arguments.models or models}
    directories = {name: get() for name, (get, _) in asked.items()}
    wanted = [
        (name, layout)
        for name, (_, layouts) in asked.items()
        for layout in layouts
        if not arguments.layouts or layout.name in arguments.layouts
    ]
    found: dict[tuple[str, str], list[tuple[Speed, Speed]]] = {}
    for _ in range(arguments.starts):
        for name, layout in wanted:
            predicted, measured = try_layout(directories[name], layout, rounds=arguments.rounds)
            found.setdefault((name, layout.name), []).append((predicted, measured))
            decode, prefill = predicted.decode / measured.decode - 1, predicted.prefill / measured.prefill - 1
            tell(f"{name}, {layout.name}: decode {decode:+.1%}, prefill {prefill:+.1%}")
    return [
        Outcome(name, layout, middle([p for p, _ in starts]), middle([m for _, m in starts]), tuple(starts))
        for (name, layout), starts in found.items()
    ]


def table_of(found: Sequence[Outcome]) -> Table:
    table = Table("model", "layout")
    for column in ("decode predicted", "measured", "error", "prefill predicted", "measured", "error"):
        table.add_column(column, justify="right")
    for outcome in found:
        table.add_row(
            outcome.model, outcome.layout,
            f"{outcome.predicted.decode:.1f}", f"{outcome.measured.decode:.1f}", f"{outcome.decode_error:+.1%}",
            f"{outcome.predicted.prefill:.0f}", f"{outcome.measured.prefill:.0f}", f"{outcome.prefill_error:+.1%}",
        )  # fmt: skip
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.prediction", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--starts", type=int, default=3, help="how often each layout is started anew")
    parser.add_argument("--rounds", type=int, default=2, help="streams that are measured, after one that warms up")
    parser.add_argument("--layouts", nargs="*", default=[], help="names of layouts; all by default")
    parser.add_argument("--models", nargs="*", default=[], help="names of models; all by default")
    arguments = parser.parse_args()
    console = Console(width=140)
    with tempfile.TemporaryDirectory(prefix="hetero-prediction-") as folder:
        found = outcomes(arguments, Path(folder), console.print)
    console.print(table_of(found))
    worst = max((outcome.worst for outcome in found), default=0.0)
    passed = bool(found) and worst <= LIMIT
    console.print(f"largest error {worst:.1%}, limit {LIMIT:.0%}: {'pass' if passed else 'FAIL'}")
    if not arguments.layouts and not arguments.models:
        _write(found, worst)
    return 0 if passed else 1


def _write(found: Sequence[Outcome], worst: float) -> None:
    results: dict[str, Any] = {
        "limit": LIMIT, "worst": worst, "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS,
        "layouts": [
            {**asdict(outcome), "decode_error": outcome.decode_error, "prefill_error": outcome.prefill_error}
            for outcome in found
        ],
    }  # fmt: skip
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

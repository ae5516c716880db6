"""What LoRA adapters cost: decode steps whose rows have adapters beside steps of the model alone, in turns.

    python -m bench.adapters [--rows 8 32] [--dtype float32 bfloat16] [--stored bfloat16] [--rounds 5] [--least 0.85]
        [--least-none 0.97]

CPU ranks' runners in this process, with all threads; plans come AHEAD together, as a gateway sends them. Eight adapters
of rank 16 are dealt to the rows in turn. Of the demo model they change all seven projections of a layer. Of a small
model of experts (random weights, 16 experts a layer, 4 a token) they change attention, or all experts, too. Three are
measured in turns, A B C A B C: a rank that has no room for adapters, rows of no adapter in a rank that has loaded them,
and rows with adapters. Printed are medians of the rounds as tokens/s, and ratios of each round's pair with 95 %
intervals; the program fails where rows with adapters have less than --least of rows of none, or these less than
--least-none of a rank without adapters. Writes bench/results/adapters-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self

import torch
from safetensors.torch import save_file

from bench.against import Ratio, ratio_of
from bench.decoding import DecodingRank
from bench.home import RESULTS, BenchHome
from bench.machine import describe
from bench.report import aligned
from bench.shapes import DEMO, EXPERTS, SHAPES, directory_of
from hetero_api.model_config import ModelConfig
from hetero_api.model_directory import ADAPTER_CONFIG, ADAPTER_TENSORS
from hetero_api.v1 import ranks_pb2
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.models.decoder_layer import adapter_targets
from hetero_worker.probe.synthetic import SyntheticWeights

ADAPTERS: Final = 8
RANK: Final = 16
CONTEXT: Final = 16
STEPS: Final = 32
WARM_STEPS: Final = 8
AHEAD: Final = 4
WITHOUT: Final = "rank without adapters"
NONE: Final = "rows of none"
ADAPTED: Final = "rows with adapters"


class RandomWeights(SyntheticWeights):
    """Weights of any model, from no file."""

    def __enter__(self) -> Self:
        return self

    def release_pages(self) -> None:
        """There are none."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and whether its adapters change experts."""

    name: str
    directory: Path | None
    """None: random weights of the small model of experts."""
    experts: bool = False

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return (
            ModelConfig.from_hf(SHAPES[EXPERTS])
            if self.directory is None
            else ModelConfig.from_directory(self.directory)
        )


def save_adapters(config: ModelConfig, folder: Path, stored: torch.dtype, *, experts: bool) -> list[Path]:
    """Write adapters of random factors, of a type, of all that takes some; return their directories."""
    made = []
    for number in range(ADAPTERS):
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for name, (height, width) in adapter_targets(config, experts=experts).items():
            at = f"base_model.model.{name}"
            tensors[f"{at}.lora_A.weight"] = (torch.randn(RANK, width, generator=generator) / 100).to(stored)
            tensors[f"{at}.lora_B.weight"] = (torch.randn(height, RANK, generator=generator) / 100).to(stored)
        directory = folder / str(number)
        directory.mkdir()
        save_file(tensors, directory / ADAPTER_TENSORS)
        about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
        (directory / ADAPTER_CONFIG).write_text(json.dumps(about), encoding="utf-8")
        made.append(directory)
    return made


def rank_of(case: Case, dtype: str, most_rows: int, *, adapts: bool) -> DecodingRank:
    """Load the model, with room for the adapters or without."""
    made = case.directory is None
    room = {"max_adapters": ADAPTERS, "max_adapter_rank": RANK, "adapts_experts": case.experts} if adapts else {}
    return DecodingRank(
        case.directory or Path("random weights"),
        case.config,
        dtype=dtype,
        most_rows=most_rows,
        context=CONTEXT,
        steps=WARM_STEPS + STEPS,
        open_weights=(lambda _: RandomWeights(floats="bfloat16")) if made else Checkpoint,
        **room,
    )


def load(rank: DecodingRank, directory: Path, number: int) -> None:
    """Load an adapter. Raises RuntimeError."""
    order = ranks_pb2.LoadAdapter(number=number, directory=str(directory), root=str(directory.parent))
    output = rank.execute(ranks_pb2.StepPlan(command=ranks_pb2.GroupCommand(load_adapter=order)))
    if output.report is None or not output.report.done:
        raise RuntimeError(f"adapter {number} was not loaded: {output.report}")


def tokens_per_s(rank: DecodingRank, rows: int, *, adapted: bool) -> float:
    """Fill so many slots, decode, and release them; the median."""
    rank.fill(rows, lambda slot: 1 + slot % ADAPTERS if adapted else 0)
    taken = [rank.decode(rows, AHEAD) for _ in range((WARM_STEPS + STEPS) // AHEAD)]
    rank.release(rows)
    return rows / statistics.median(taken[WARM_STEPS // AHEAD :])


Speeds = Mapping[str, Sequence[float]]
"""Tokens/s of each round: WITHOUT, NONE and ADAPTED."""


def measure(
    case: Case, dtype: str, most_rows: list[int], rounds: int, stored: torch.dtype
) -> Iterator[tuple[int, Speeds]]:
    """Yield the speeds of each number of rows."""
    without, rank = (rank_of(case, dtype, max(most_rows), adapts=adapts) for adapts in (False, True))
    with tempfile.TemporaryDirectory() as folder:
        saved = save_adapters(case.config, Path(folder), stored, experts=case.experts)
        for number, directory in enumerate(saved, 1):
            load(rank, directory, number)
    turns: dict[str, Callable[[int], float]] = {
        WITHOUT: partial(tokens_per_s, without, adapted=False),
        NONE: partial(tokens_per_s, rank, adapted=False),
        ADAPTED: partial(tokens_per_s, rank, adapted=True),
    }
    for rows in most_rows:
        for run in turns.values():
            run(rows)  # prepares and records
        speeds: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(rounds):
            for name, run in turns.items():
                speeds[name].append(run(rows))
        yield rows, speeds


def ratios(about: str, speeds: Speeds) -> tuple[Ratio, Ratio]:
    """Return the ratios of rows of none to a rank without adapters, and of rows with adapters to rows of none."""
    compared = ((NONE, WITHOUT), (ADAPTED, NONE))
    none, adapted = (
        ratio_of(about, f"{this} / {other}", list(zip(speeds[other], speeds[this], strict=True)))
        for this, other in compared
    )
    return none, adapted


def told(ratio: Ratio) -> str:
    """Return a ratio with its interval."""
    return f"{ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--stored", choices=("float32", "bfloat16"), default="bfloat16", help="type in adapters' files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--least", type=float, default=0.85, help="ratio of rows with adapters to rows of none")
    parser.add_argument("--least-none", type=float, default=0.97, help="ratio of rows of none to a rank without")
    arguments = parser.parse_args()
    demo = directory_of(DEMO, BenchHome.from_environment())
    cases = Case(DEMO, demo), Case("experts", None), Case("experts, which adapters change", None, experts=True)
    said = describe()
    print(f"{said['machine']['cpu']}, {len(os.sched_getaffinity(0))} threads", flush=True)
    table = [["model", "dtype", "rows", *(f"{name}, tok/s" for name in (WITHOUT, NONE, ADAPTED)), "none", "adapters"]]
    slow, figures = [], []
    for case in cases:
        for dtype in arguments.dtype:
            stored = getattr(torch, arguments.stored)
            for rows, speeds in measure(case, dtype, arguments.rows, arguments.rounds, stored):
                about = f"{case.name} ({dtype}, {rows} rows)"
                none, adapted = ratios(about, speeds)
                medians = [f"{statistics.median(speeds[name]):.1f}" for name in (WITHOUT, NONE, ADAPTED)]
                table.append([case.name, dtype, str(rows), *medians, told(none), told(adapted)])
                print(*table[-1], sep="  ", file=sys.stderr, flush=True)
                figures.append({"about": about, "tokens_per_s": speeds, "ratios": [asdict(none), asdict(adapted)]})
                for ratio, least in ((none, arguments.least_none), (adapted, arguments.least)):
                    if ratio.ratio < least:
                        slow.append(f"{about}: {ratio.quantity} is {ratio.ratio:.3f}, less than {least:g}")
    print(aligned(table))
    path = RESULTS / f"adapters-{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    path.write_text(json.dumps(said | {"figures": figures, "missed": slow}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote bench/results/{path.name}", *slow, sep="\n")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())

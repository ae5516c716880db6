"""What LoRA adapters cost: decode steps whose rows have adapters beside steps of the model alone, in turns.

    python -m bench.adapters [--rows 8 32] [--dtype float32 bfloat16] [--stored bfloat16] [--rounds 5] [--least 0.85]

A CPU rank's runner in this process, with all threads; plans come AHEAD together, as a gateway sends them. Eight
adapters of rank 16 are dealt to the rows in turn. Of the demo model they change all seven projections of a layer. Of a
small model of experts (random weights, 16 experts a layer, 4 a token) they change attention, or all experts, too. Rows
of no adapter and rows with adapters are measured in turns, A B A B, behind the same rank before any was loaded. Printed
are tokens/s, medians of rounds, and ratios to rows of none; the program fails where rows with adapters have less than
--least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors.torch import save_file

from bench.decoding import DecodingRank
from bench.home import BenchHome
from bench.report import aligned
from bench.shapes import DEMO, directory_of
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
MOE: Final[dict[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 512,
    "intermediate_size": 2048, "moe_intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "attention_bias": False, "tie_word_embeddings": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


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
    """None: random weights of MOE's shape."""
    experts: bool = False

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return ModelConfig.from_hf(MOE) if self.directory is None else ModelConfig.from_directory(self.directory)


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


def rank_of(case: Case, dtype: str, most_rows: int) -> DecodingRank:
    """Load the model, with room for the adapters."""
    made = case.directory is None
    return DecodingRank(
        case.directory or Path("random weights"),
        case.config,
        dtype=dtype,
        most_rows=most_rows,
        context=CONTEXT,
        steps=WARM_STEPS + STEPS,
        max_adapters=ADAPTERS,
        max_adapter_rank=RANK,
        adapts_experts=case.experts,
        open_weights=(lambda _: RandomWeights(floats="bfloat16")) if made else Checkpoint,
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


def measure(
    case: Case, dtype: str, most_rows: list[int], rounds: int, stored: torch.dtype
) -> Iterator[tuple[int, list[float]]]:
    """Yield, for each number of rows, medians of tokens/s: before adapters were loaded, of rows of none, and with."""
    rank = rank_of(case, dtype, max(most_rows))
    before = {}
    for rows in most_rows:
        tokens_per_s(rank, rows, adapted=False)  # prepares and records
        before[rows] = statistics.median(tokens_per_s(rank, rows, adapted=False) for _ in range(rounds))
    with tempfile.TemporaryDirectory() as folder:
        saved = save_adapters(case.config, Path(folder), stored, experts=case.experts)
        for number, directory in enumerate(saved, 1):
            load(rank, directory, number)
    for rows in most_rows:
        tokens_per_s(rank, rows, adapted=True)
        turns = [[tokens_per_s(rank, rows, adapted=adapted) for adapted in (False, True)] for _ in range(rounds)]
        yield rows, [before[rows], *map(statistics.median, zip(*turns, strict=True))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--stored", choices=("float32", "bfloat16"), default="bfloat16", help="type in adapters' files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--least", type=float, default=0.85, help="ratio of rows with adapters to rows of none")
    arguments = parser.parse_args()
    demo = directory_of(DEMO, BenchHome.from_environment())
    cases = Case(DEMO, demo), Case("experts", None), Case("experts, which adapters change", None, experts=True)
    print(f"{len(os.sched_getaffinity(0))} threads", flush=True)
    table = [["model", "dtype", "rows", "before loading, tokens/s", "rows of none", "rows with adapters"]]
    slow = []
    for case in cases:
        for dtype in arguments.dtype:
            for rows, speeds in measure(
                case, dtype, arguments.rows, arguments.rounds, getattr(torch, arguments.stored)
            ):
                _, none, adapted = speeds
                line = [f"{speed:.1f} ({speed / none:.3f})" for speed in speeds]
                table.append([case.name, dtype, str(rows), *line])
                print(*table[-1], sep="  ", file=sys.stderr, flush=True)
                if adapted < arguments.least * none:
                    slow.append(f"{case.name} ({dtype}, {rows} rows)")
    print(aligned(table))
    if slow:
        print(f"less than {arguments.least:g} of rows of none: {'; '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())

"""What the experts of a layer cost a rank on host cores: all in one native operation, and one by one.

    python -m bench.experts [--threads N] [--rows N ...] [--layers N] [--quantization int4 int8 none] [--seconds S]

Layers of Qwen3-30B-A3B's shape with random weights, more of them than caches hold, and rows that a real router spreads:
norm, choice and experts, as in a step. Ways take turns, and the median counts. A row of the table: milliseconds a
layer, the layers that a second has time for, and the share of the limit: the time that the weights of the chosen
experts take to be read, or their operations to be made, whichever is more (bench/limits.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from bench.limits import Limits, measure
from hetero_api.model_config import ModelConfig
from hetero_worker.layers.blocks import mlp_norm
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.layers.moe import ExpertMlp
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.layers.native_ops import NativeOps
from hetero_worker.native.compute_library import load_compute
from hetero_worker.native.op_queue import Arena, OpQueue
from hetero_worker.native.team import NativeTeam
from hetero_worker.probe.synthetic import SyntheticWeights

ROWS: Final = (1, 8, 64, 512)
_TURNS: Final = range(3, 100)
"""At least and at most so many."""
SHAPE: Final[Mapping[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "max_position_embeddings": 40960, "norm_topk_prob": True,
}  # fmt: skip


class OneByOne(NativeLinear):
    """The native kernel, without an operation for all experts."""

    def join_experts(self, *_given: object, **_named: object) -> None:
        """Return None: experts are computed one by one."""


class Layers:
    """Experts on a kernel, and steps that go through all of them."""

    def __init__(self, config: ModelConfig, kernel: LinearKernel, op_queue: OpQueue, *, layers: int) -> None:
        ops, weights = NativeOps(op_queue), SyntheticWeights()
        self.mlps = [ExpertMlp(config, i, range(config.num_experts), norm=mlp_norm(config, i, ops), ops=ops)
                     for i in range(layers)]  # fmt: skip
        self._op_queue = op_queue
        for mlp in self.mlps:
            mlp.load(weights, dtype=torch.float32, kernel=kernel)

    def seconds(self, hidden: torch.Tensor) -> float:
        """Return the seconds that a layer takes, on average."""
        begin_s = time.perf_counter()
        with self._op_queue.computing_in(Arena()):
            for mlp in self.mlps:
                mlp(hidden)
        return (time.perf_counter() - begin_s) / len(self.mlps)

    def active(self, hidden: torch.Tensor) -> float:
        """Return how many experts of a layer the rows choose, on average."""
        for mlp in self.mlps:
            mlp.take_counts()
            mlp(hidden)
        return statistics.mean(sum(map(bool, mlp.take_counts())) for mlp in self.mlps)


def least_seconds(
    config: ModelConfig, limits: Limits, *, expert_bytes: float, active: float, rows: int, arithmetic: str
) -> float:
    """Return the seconds that the active experts of a layer take at the machine's limits."""
    if config.experts is None:
        raise ValueError("the model has no experts")
    operations = 2 * rows * config.experts.per_token * 3 * config.hidden_size * config.experts.intermediate_size
    return max(active * expert_bytes / limits.read_bytes_per_s, operations / limits.rate_of(arithmetic))


def medians(ways: Mapping[str, Layers], hidden: torch.Tensor, seconds: float) -> dict[str, float]:
    """Return the median seconds of a layer, by way; they take turns."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    begin_s = time.perf_counter()
    for turn in range(_TURNS.stop):
        if turn >= _TURNS.start and time.perf_counter() - begin_s > seconds * len(ways):
            break
        for name, layers in ways.items():
            samples[name].append(layers.seconds(hidden))
    return {name: statistics.median(taken) for name, taken in samples.items()}


def line(name: str, rows: int, taken_s: float, least_s: float) -> str:
    """Return a row of the table."""
    return f"{name:16}{rows:>6}{taken_s * 1e3:>12.3f}{1 / taken_s:>12.0f}{least_s / taken_s:>10.0%}"


def compare(quantization: str, op_queue: OpQueue, limits: Limits, options: argparse.Namespace) -> None:
    """Print the rows of one width."""
    config = ModelConfig.from_hf(dict(SHAPE)).quantized(quantization)
    kernels: Sequence[LinearKernel] = (NativeLinear(op_queue), OneByOne(op_queue))
    ways = {
        f"{quantization}, {name}": Layers(config, kernel, op_queue, layers=options.layers)
        for name, kernel in zip(("together", "one by one"), kernels, strict=True)
    }
    first = next(iter(ways.values()))
    expert_bytes = first.mlps[0].expert_bytes(torch.float32, kernels[0])
    for rows in options.rows:
        hidden = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(rows))
        least_s = least_seconds(
            config, limits, expert_bytes=expert_bytes, active=first.active(hidden), rows=rows,
            arithmetic="float32" if quantization == "none" else "int8",
        )  # fmt: skip
        for name, taken_s in medians(ways, hidden, options.seconds).items():
            print(line(name, rows, taken_s, least_s), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--quantization", nargs="+", choices=("none", "int8", "int4"), default=["int4"])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each way and number of rows, about")
    options = parser.parse_args()
    limits, loaded = measure(options.threads), load_compute()
    if loaded.library is None:
        parser.error(loaded.reason)
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads: {limits.told()}\n")
    print(f"{'':16}{'rows':>6}{'ms a layer':>12}{'layers/s':>12}{'of limit':>10}")
    with torch.inference_mode():
        for quantization in options.quantization:
            compare(quantization, OpQueue(NativeTeam(loaded.library, options.threads)), limits, options)


if __name__ == "__main__":
    main()

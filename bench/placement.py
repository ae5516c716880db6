"""How long the solver takes.

    python -m bench.placement [--rounds N]

Seconds of one decision for groups of 1 to 64 ranks and three models, the least of the rounds: a gateway decides once,
while all ranks wait.
"""

from __future__ import annotations

import argparse
import time
from typing import Final

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.spec import PlacementSpec
from hetero_api.spec_pools import PoolType
from hetero_placement.decision import Bounds, Decision
from hetero_placement.hardware import ExchangeSpeeds, Hardware, RankHardware, Speeds
from hetero_placement.solver import solve

GB: Final = 10**9
MODELS: Final = {
    "SmolLM2 135M": (30, 576, 1536, 9, 3, 49_152),
    "Llama 3 8B": (32, 4096, 14_336, 32, 8, 128_256),
    "Llama 3 70B": (80, 8192, 28_672, 64, 8, 128_256),
}
"""Layers, hidden size, MLP columns, heads, KV heads, vocabulary."""
GROUPS: Final = ((0, 1), (0, 2), (1, 1), (2, 2), (4, 4), (8, 8), (8, 56))
"""GPU ranks, CPU ranks."""


def model(name: str) -> ModelConfig:
    layers, hidden, columns, heads, kv_heads, vocabulary = MODELS[name]
    return ModelConfig.from_hf({
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": columns, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary, "max_position_embeddings": 8192,
    })  # fmt: skip


def rank(kind: PoolType, *, bandwidth: float, flops: float, memory: float, pool: str) -> RankHardware:
    bus = 25e9 if kind == PoolType.GPU else 0.0
    speeds = Speeds(bandwidth, {"bfloat16": flops}, to_device_bandwidth=bus, from_device_bandwidth=bus)
    return RankHardware(kind, "host", int(memory), speeds, pool)


def group(gpus: int, cpus: int) -> Hardware:
    gpu = rank(PoolType.GPU, bandwidth=2.9e12, flops=6e14, memory=72 * GB, pool="gpu")
    cpu = rank(PoolType.CPU, bandwidth=3e11, flops=1e13, memory=512 * GB, pool="cpu")
    exchange, device = ExchangeSpeeds.of_rates(1e-5, 1e10), ExchangeSpeeds.of_rates(1.2e-5, 2e11)
    return Hardware((gpu,) * gpus + (cpu,) * cpus, exchange, device)


def decide(config: ModelConfig, hardware: Hardware) -> Decision:
    bounds = Bounds(max_model_len=4096)
    return solve(config, hardware, dtype="bfloat16", placement=PlacementSpec(), bounds=bounds)


def times(rounds: int) -> None:
    print(f"{'ranks':>12} " + " ".join(f"{name:>14}" for name in MODELS))
    for gpus, cpus in GROUPS:
        cells = [f"{_least_s(model(name), group(gpus, cpus), rounds):12.3f} s" for name in MODELS]
        print(f"{gpus:>3} GPU {cpus:>3} CPU {' '.join(cells)}")


def _least_s(config: ModelConfig, hardware: Hardware, rounds: int) -> float:
    took = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        try:
            decide(config, hardware)
        except PlanError:
            return float("nan")
        took.append(time.perf_counter() - begin_s)
    return min(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    times(parser.parse_args().rounds)


if __name__ == "__main__":
    main()

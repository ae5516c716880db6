"""Models and hardware to place in tests."""

from __future__ import annotations

from typing import Any

from hetero_api.model_config import ModelConfig
from hetero_api.spec_pools import PoolType
from hetero_placement.cost_model import CostModel
from hetero_placement.decision import Bounds
from hetero_placement.hardware import CostPoint, ExchangeSpeeds, Hardware, RankHardware, Speeds

GB = 10**9
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
SMOLLM2 = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(LLAMA | changes)


def speeds(bandwidth: float, **rest: Any) -> Speeds:
    return Speeds(memory_bandwidth=bandwidth, **rest)


def cpu(
    bandwidth: float,
    *,
    memory: float = 512 * GB,
    flops: float = 0.0,
    pool: str = "cpu",
    costs: tuple[CostPoint, ...] = (),
) -> RankHardware:
    """A rank of host cores; without `flops` computing takes no time."""
    rates = {"float32": flops, "bfloat16": flops} if flops else {}
    measured_in = "float32" if costs else ""
    made = Speeds(memory_bandwidth=bandwidth, flops=rates, costs=costs, costs_dtype=measured_in)
    return RankHardware(PoolType.CPU, "host", int(memory), made, pool)


def gpu(
    bandwidth: float, *, memory: float = 512 * GB, flops: float = 0.0, bus: float = 0.0, latency: float = 0.0,
    pool: str = "gpu",
) -> RankHardware:  # fmt: skip
    """A GPU rank; without `bus` copies take no time."""
    rates = {"float32": flops, "bfloat16": flops} if flops else {}
    made = Speeds(
        memory_bandwidth=bandwidth, flops=rates, to_device_bandwidth=bus, from_device_bandwidth=bus,
        device_latency_s=latency,
    )  # fmt: skip
    return RankHardware(PoolType.GPU, "host", int(memory), made, pool)


def group(*ranks: RankHardware, host_s: float = 0.0, device_s: float = 0.0) -> Hardware:
    """A group whose exchanges take as long whatever their size."""
    return Hardware(ranks, ExchangeSpeeds.of_rates(host_s), ExchangeSpeeds.of_rates(device_s))


def model_of(config: ModelConfig, *ranks: RankHardware, host_s: float = 0.0, device_s: float = 0.0) -> CostModel:
    return CostModel(config, group(*ranks, host_s=host_s, device_s=device_s), dtype="float32")


def bounds_of(config: ModelConfig, **rest: Any) -> Bounds:
    return Bounds(**{"max_model_len": min(config.max_position, 1024), **rest})

"""What a resource's spec says to the solver."""

from __future__ import annotations

from hetero_api.model_config import ModelConfig
from hetero_api.spec import HeteroInferenceSpec, PoolSpec, PoolType
from hetero_placement.decision import Bounds, PlacementRequest
from hetero_placement.hardware import DeviceKind


def request_of(spec: HeteroInferenceSpec) -> PlacementRequest:
    """Mode and shares."""
    return PlacementRequest(spec.placement.mode, spec.placement.shares)


def bounds_of(spec: HeteroInferenceSpec, config: ModelConfig) -> Bounds:
    """The engine's."""
    return Bounds(
        max_model_len=spec.model.max_model_len or config.max_position,
        max_num_batched_tokens=spec.engine.max_num_batched_tokens,
        max_num_seqs=spec.engine.max_num_seqs,
        block_size=spec.engine.block_size,
        kv_cache_bytes=spec.engine.kv_cache_memory_bytes,
        enforce_eager=spec.engine.enforce_eager,
    )


def quantized_config(spec: HeteroInferenceSpec, config: ModelConfig) -> ModelConfig:
    """With weights as ranks will have them. Raises ModelError where the checkpoint is quantised already."""
    return config.quantized(spec.model.quantization, spec.model.quantization_group_size)


def kind_of(pool: PoolSpec) -> DeviceKind:
    """What a pool's ranks compute on."""
    return DeviceKind.GPU if pool.type == PoolType.GPU else DeviceKind.CPU


def cores_of(pool: PoolSpec) -> int:
    """Cores a rank."""
    return pool.gpu_or_default.cores_per_rank if pool.type == PoolType.GPU else pool.cpu_or_default.cores_per_rank

"""What formation needs to know, resolved from the resource and the model once at start."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_api.contract import VERSION
from hetero_api.model_config import ModelConfig
from hetero_api.spec import CacheLayout, HeteroInference, HeteroInferenceSpec, Quantization
from hetero_api.v1 import ranks_pb2
from hetero_gateway.group.placement import ExpectedPlace, check_shares, expected_places, make_plan_key
from hetero_gateway.group.support import resolve_max_model_len
from hetero_placement.decision import quantized_config


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """One group, as it is to be. `kv_cache_bytes` is a rank's, None to take what each rank reports.

    `block_size` is that of the resource's own cache: with a contiguous layout as long as the longest sequence.

    `config` says of weights what ranks will have, quantised as the resource asks.
    `plan_key` names what shard plans of the group are made from.
    """

    name: str
    spec: HeteroInferenceSpec
    config: ModelConfig
    places: tuple[ExpectedPlace, ...]
    plan_key: str
    model_fingerprint: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_bytes: int | None
    rendezvous_timeout_s: float
    step_timeout_s: float
    max_restarts: int
    restart_window_s: float
    version: str = VERSION
    model_source: str = ""
    """Origin of weights that were changed on their way; "" for others."""

    @property
    def quantization(self) -> ranks_pb2.Quantization | None:
        """What ranks quantise weights to as they load them; None: nothing."""
        model = self.spec.model
        if model.quantization == Quantization.NONE:
            return None
        return ranks_pb2.Quantization(method=model.quantization, group_size=model.quantization_group_size or 0)

    @classmethod
    def from_resource(
        cls, resource: HeteroInference, config: ModelConfig, *, model_fingerprint: str, model_source: str = ""
    ) -> GroupSettings:
        """Raises PlanError when the spec's shares do not fit. The spec must have passed `check_supported`."""
        spec, dtype = resource.spec, resource.spec.dtype_in_force
        max_model_len = resolve_max_model_len(spec, config)
        is_contiguous = spec.engine.cache_layout == CacheLayout.CONTIGUOUS
        check_shares(spec, config)
        return cls(
            name=resource.metadata.name,
            spec=spec,
            config=quantized_config(spec, config),
            places=expected_places(spec),
            plan_key=make_plan_key(spec, dtype=dtype, model_fingerprint=model_fingerprint, version=VERSION),
            model_fingerprint=model_fingerprint,
            model_source=model_source,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=spec.engine.max_num_seqs,
            max_num_batched_tokens=spec.engine.max_num_batched_tokens,
            block_size=max_model_len if is_contiguous else spec.engine.block_size,
            kv_cache_bytes=spec.engine.kv_cache_memory_bytes,
            rendezvous_timeout_s=spec.recovery.rendezvous_timeout_seconds,
            step_timeout_s=spec.recovery.step_timeout_seconds,
            max_restarts=spec.recovery.max_restarts,
            restart_window_s=spec.recovery.window_seconds,
        )

"""What the gateway reads before it listens: the resource, the model's shape, its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetero_api.manifest import load_manifest
from hetero_api.model_config import ModelConfig, model_fingerprint
from hetero_api.model_source import read_source
from hetero_api.spec import HeteroInference
from hetero_api.v1 import inference_pb2
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.step_pace import LOOKAHEAD_S
from hetero_gateway.engine.tokenizer import TextTokenizer
from hetero_gateway.group.settings import GroupSettings, check_supported


@dataclass(frozen=True, slots=True)
class ServedModel:
    """All that a gateway is made of."""

    resource: HeteroInference
    tokenizer: TextTokenizer
    engine_config: EngineConfig
    group_settings: GroupSettings
    info: inference_pb2.GetModelInfoResponse


def read_model(manifest: Path, model_dir: Path) -> ServedModel:
    """Raises ManifestError, UnsupportedSpecError or PlanError (the resource), or ModelError (the model's files)."""
    resource = load_manifest(manifest)
    config = ModelConfig.from_directory(model_dir)
    check_supported(resource.spec, config)
    source = read_source(model_dir)
    settings = GroupSettings.from_resource(
        resource,
        config,
        model_fingerprint=model_fingerprint(model_dir),
        model_source=source.describe() if source else "",
    )
    tokenizer = TextTokenizer.from_directory(model_dir)
    return ServedModel(
        resource=resource,
        tokenizer=tokenizer,
        engine_config=_engine_config(resource, config, settings),
        group_settings=settings,
        info=inference_pb2.GetModelInfoResponse(
            model_uri=source.uri if source else resource.spec.model.uri,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            max_model_len=settings.max_model_len,
            dtype=settings.dtype,
            eos_token_ids=config.eos_token_ids,
            has_chat_template=tokenizer.has_chat_template,
            num_parameters=config.num_parameters,
            source=settings.model_source,
        ),
    )


def _engine_config(resource: HeteroInference, config: ModelConfig, settings: GroupSettings) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        max_queued_requests=resource.spec.gateway.max_queued_requests,
        enable_prefix_caching=resource.spec.engine.enable_prefix_caching,
        max_steps_in_flight=2 if resource.spec.engine.overlap_scheduling else 1,
        lookahead_s=LOOKAHEAD_S,
        eos_token_ids=frozenset(config.eos_token_ids),
        vocab_size=config.vocab_size,
    )

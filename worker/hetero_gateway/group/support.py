"""What this version of the gateway can serve. What it cannot is refused at start, with the field's path."""

from __future__ import annotations

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.validation import find_unserved
from hetero_gateway.group.errors import UnsupportedSpecError
from hetero_placement.decision import quantized_config


def check_supported(spec: HeteroInferenceSpec, config: ModelConfig) -> None:
    """Raise UnsupportedSpecError with every field that asks for what this version cannot do."""
    problems = [*_model(spec, config), *find_unserved(spec), *_nothing_to_run(spec)]
    if problems:
        raise UnsupportedSpecError(problems)


def resolve_max_model_len(spec: HeteroInferenceSpec, config: ModelConfig) -> int:
    """Longest prompt plus completion, in tokens."""
    return spec.model.max_model_len or config.max_position


def _model(spec: HeteroInferenceSpec, config: ModelConfig) -> list[str]:
    problems = []
    try:
        quantized_config(spec, config)
    except ModelError as error:
        problems.append(f"spec.model.quantization: {error}")
    asked = spec.model.max_model_len
    if asked is not None and asked > config.max_position:
        problems.append(
            f"spec.model.maxModelLen: {asked} is more than the {config.max_position} positions of the model"
        )
    return problems


def _nothing_to_run(spec: HeteroInferenceSpec) -> list[str]:
    problems = []
    if spec.suspend:
        problems.append("spec.suspend: true asks for nothing to run; set it to false to start a group")
    if not spec.replicas:
        problems.append("spec.replicas: 0 asks for nothing to run; set it to 1 to start a group")
    return problems

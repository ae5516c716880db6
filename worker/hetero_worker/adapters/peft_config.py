"""adapter_config.json of PEFT: its fields, checked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetero_api.errors import ModelError
from hetero_api.model_directory import parse_json, read_model_file

_MAX_BYTES: Final = 1 << 20
_HARMLESS: Final = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
        "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version",
        "qalora_group_size", "revision", "runtime_config", "target_modules", "target_parameters", "task_type",
    }
)  # fmt: skip
"""Fields that change nothing of what the tensors mean. Any other field that is set is refused."""


class AdapterConfig(BaseModel):
    """The fields of adapter_config.json that say what the tensors mean."""

    model_config = ConfigDict(extra="allow", strict=True)

    peft_type: Literal["LORA"]
    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0, allow_inf_nan=False)
    use_rslora: bool = False
    bias: Literal["none"] = "none"
    init_lora_weights: Literal[True, False, "gaussian", "eva", "orthogonal"] = True
    """Other initial values change the model's own weights, too."""

    @property
    def scaling(self) -> float:
        """Factor of the adapter's product: alpha / r, or alpha / sqrt(r) if rank-stabilised (arXiv:2312.03732)."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def read(path: Path) -> AdapterConfig:
    """Read and check a config. Raises ModelError with the file and the field."""
    try:
        data = read_model_file(path, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}; is this a directory of a PEFT adapter?") from error
    try:
        config = AdapterConfig.model_validate(parse_json(data, path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"][:1])) or "the file"
        value = f" (it is {first['input']!r:.80})" if first["type"] != "missing" else ""
        raise ModelError(f"{path}: {field}: {first['msg']}{value}") from error
    for field, value in (config.model_extra or {}).items():
        if value and field not in _HARMLESS:
            raise ModelError(f"{path}: {field}: {value!r:.80} is not served; train or save the adapter without it")
    return config

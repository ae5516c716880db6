"""LoRA adapters made, saved and computed by PEFT, as the reference."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hetero_api.model_directory import ADAPTER_CONFIG, ADAPTER_TENSORS


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """An adapter's directory, and PEFT's own model with it."""

    directory: Path
    model: Any

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits at every position, float32 [len(token_ids), vocabulary]."""
        with torch.inference_mode():
            output: torch.Tensor = self.model(torch.tensor([list(token_ids)])).logits[0].float()
        return output


def save_adapter(
    model_directory: Path, directory: Path, *, modules: Sequence[str], rank: int = 4, seed: int = 0, **fields: Any
) -> SavedAdapter:
    """Save an adapter of random factors, both of them not zero, of the modules with these names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for what that calls otherwise now
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(
            str(model_directory), dtype=torch.float32, experts_implementation="eager"
        )
        config = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=list(modules), init_lora_weights=False, **fields
        )
        model = get_peft_model(base, config).eval()
        model.save_pretrained(str(directory))
    return SavedAdapter(directory, model)


def split_experts(directory: Path, into: Path, *, num_experts: int) -> Path:
    """Save an adapter of stacks of experts again as one of the experts' own modules, with the same products."""
    tensors = load_file(directory / ADAPTER_TENSORS)
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stack, _, factor = name.rpartition(".lora_")
        if not stack.endswith(("experts", "experts.base_layer")):
            split[name] = tensor
            continue
        experts, is_down = stack.removesuffix(".base_layer"), stack.endswith("experts")
        for number in range(num_experts):
            if factor.startswith("A"):
                own = tensor.reshape(num_experts, -1, tensor.shape[1])[number]
                halves = [own, own]
            else:
                own = tensor.reshape(len(tensor), -1, num_experts)[:, :, number]
                halves = [*own.chunk(2)]
            parts = {"down_proj": own} if is_down else dict(zip(("gate_proj", "up_proj"), halves, strict=True))
            for part, half in parts.items():
                split[f"{experts}.{number}.{part}.lora_{factor}"] = half.clone()
    into.mkdir()
    save_file(split, into / ADAPTER_TENSORS)
    config = json.loads((directory / ADAPTER_CONFIG).read_text())
    (into / ADAPTER_CONFIG).write_text(json.dumps({**config, "target_parameters": None}))
    return into

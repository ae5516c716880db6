"""LoRA adapters made, saved and computed by PEFT, as the reference."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


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

"""Hugging Face transformers as the reference, tie-aware.

Greedy decoding is checked by teacher forcing: one forward pass of the reference over prompt and completion gives the
reference's logits at every position that chose a token. A completion equals `generate`'s if each chosen token's
logit is within `tie` of the reference's largest one: where the gap is wider than rounding, that is the very same
token; where two tokens tie within rounding, either is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TIE_FP32 = 1e-3
"""Largest difference of fp32 logits that counts as rounding (the numerical contract)."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A position where the completion chose what the reference would not."""

    position: int
    chosen: int
    preferred: int
    gap: float


class Reference:
    """A transformers model in fp32."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._found: dict[tuple[object, ...], list[Disagreement]] = {}

    @classmethod
    def from_directory(cls, directory: Path) -> Reference:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=torch.float32, experts_implementation="eager"
        )
        return cls(model.eval())

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits at every position: [len(token_ids), vocabulary]."""
        with torch.inference_mode():
            output: torch.Tensor = self._model(torch.tensor([list(token_ids)])).logits[0].float()
        return output

    def disagreements(
        self, prompt: Sequence[int], completion: Sequence[int], *, tie: float = TIE_FP32
    ) -> list[Disagreement]:
        """Positions of the completion that greedy decoding of the reference would not have chosen.

        Other groups mostly give the very same completion, which is judged once.
        """
        asked = (*prompt, -1, *completion, tie)
        if asked not in self._found:
            self._found[asked] = self._disagreements(prompt, completion, tie)
        return self._found[asked]

    def _disagreements(self, prompt: Sequence[int], completion: Sequence[int], tie: float) -> list[Disagreement]:
        logits = self.logits([*prompt, *completion[:-1]])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(list(completion))[:, None])[:, 0]
        best, preferred = logits.max(dim=1)
        gaps = best - chosen
        return [
            Disagreement(position, completion[position], int(preferred[position]), float(gaps[position]))
            for position in torch.nonzero(gaps > tie)[:, 0].tolist()
        ]

"""Peer: Hugging Face transformers' `generate`, a left-padded batch."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

from bench.peers.driver import Generated, Options, serve

PAD = 2


class _FirstToken(transformers.StoppingCriteria):
    """Stops nothing; notes when it is first asked, which is after the first token of every row."""

    def __init__(self) -> None:
        self.at_s: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002
        if self.at_s is None:
            self.at_s = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class TransformersPeer:
    """Loads a Hugging Face directory; `dtype` is torch's name of weights and arithmetic."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.threads)
        self._dtype = options.dtype
        dtype = getattr(torch, options.dtype)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()

    def facts(self) -> dict[str, str]:
        return {"arithmetic": self._dtype, "transformers": transformers.__version__, "torch": torch.__version__}

    def generate(self, prompts: list[list[int]], max_new: int) -> Generated:
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        config = transformers.GenerationConfig(
            max_new_tokens=max_new, min_new_tokens=max_new, do_sample=False, pad_token_id=PAD, eos_token_id=PAD
        )
        first = _FirstToken()
        began_s = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(ids, attention_mask=mask, generation_config=config, stopping_criteria=[first])
        assert first.at_s is not None
        return Generated(output[:, width:].tolist(), first.at_s - began_s)

    def score(self, windows: list[list[int]]) -> list[float]:
        """Sum of -ln p of each window."""
        return [self._score(torch.tensor([window])) for window in windows]

    def _score(self, ids: torch.Tensor) -> float:
        with torch.inference_mode():
            logits = self._model(ids).logits[0, :-1].float()
        return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))


if __name__ == "__main__":
    serve(TransformersPeer)

"""Peer: CTranslate2 on a converted directory. `dtype` is its compute type. It is made for prompts of equal lengths."""

from __future__ import annotations

import json
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.peers.driver import Generated, Options, serve


class CTranslate2Peer:
    """Loads a directory of its converter."""

    def __init__(self, options: Options) -> None:
        self._ctranslate2: Any = import_module("ctranslate2")
        self._generator = self._ctranslate2.Generator(
            options.model, device="cpu", compute_type=options.dtype, inter_threads=1, intra_threads=options.threads
        )
        self._tokens: list[str] = json.loads((Path(options.model) / "vocabulary.json").read_text(encoding="utf-8"))

    def facts(self) -> dict[str, str]:
        # "int8" may be carried out as int8_float32 and the like.
        computed = str(self._generator.compute_type)
        arithmetic = "int8" if computed.startswith("int8") else computed
        return {"arithmetic": arithmetic, "compute_type": computed, "ctranslate2": self._ctranslate2.__version__}

    def generate(self, prompts: list[list[int]], max_new: int) -> Generated:
        waiting, first_token_s = set(range(len(prompts))), 0.0
        began_s = time.perf_counter()

        def note(step: Any) -> bool:
            nonlocal first_token_s
            if waiting and step.batch_id in waiting:
                waiting.discard(step.batch_id)
                first_token_s = time.perf_counter() - began_s
            return False

        results = self._generator.generate_batch(
            [[self._tokens[token] for token in prompt] for prompt in prompts],
            max_length=max_new,
            min_length=max_new,
            sampling_topk=1,
            beam_size=1,
            include_prompt_in_result=False,
            max_batch_size=0,
            end_token=[],
            callback=note,
        )
        return Generated([list(result.sequences_ids[0]) for result in results], first_token_s)

    def score(self, windows: list[list[int]]) -> list[float]:
        """Sum of -ln p of each window."""
        scored = self._generator.score_batch([[self._tokens[token] for token in window] for window in windows])
        return [-sum(result.log_probs) for result in scored]


if __name__ == "__main__":
    serve(CTranslate2Peer)

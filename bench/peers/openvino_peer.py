"""Peer: OpenVINO GenAI's continuous batching on an exported directory. `dtype` is the weights' and only told.

Arithmetic is what OpenVINO chooses for the CPU: int8 for quantised weights; else bfloat16 where the CPU has
instructions for it, and float32 where not. A `dtype` that ends in "-f32" holds it to float32. Keys and values are kept
in 8 bits, its default.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bench.peers.driver import Generated, Options, serve

EXACT_SUFFIX = "-f32"
GIB = 1 << 30
STEP_TOKENS = 2048


class OpenVinoPeer:
    """Loads a directory of `optimum-cli export openvino`."""

    def __init__(self, options: Options) -> None:
        self._openvino: Any = import_module("openvino")
        self._genai: Any = import_module("openvino_genai")
        self._numpy: Any = import_module("numpy")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = -(-options.cache_bytes // GIB)
        scheduler.max_num_seqs = options.max_seqs
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads}
        if options.dtype.endswith(EXACT_SUFFIX):
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        self._dtype = options.dtype
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            options.model, scheduler_config=scheduler, device="CPU", properties=properties
        )

    def facts(self) -> dict[str, str]:
        return {
            "arithmetic": self._arithmetic(),
            "openvino": self._openvino.__version__,
            "openvino-genai": self._genai.__version__,
        }

    def generate(self, prompts: list[list[int]], max_new: int) -> Generated:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_new
        config.ignore_eos = True
        config.do_sample = False
        ids = [self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64)) for prompt in prompts]
        results = self._pipeline.generate(ids, [config] * len(ids))
        first_token_s = max(result.perf_metrics.get_ttft().mean for result in results) / 1e3
        return Generated([list(result.m_generation_ids[0]) for result in results], first_token_s)

    def _arithmetic(self) -> str:
        if self._dtype.endswith(EXACT_SUFFIX):
            return "float32"
        core = self._openvino.Core()
        if self._dtype.startswith("int") and core.get_property("CPU", "DYNAMIC_QUANTIZATION_GROUP_SIZE"):
            return "int8"  # activations are quantised in groups, products are of whole numbers
        default = str(core.get_property("CPU", "INFERENCE_PRECISION_HINT"))
        return "bfloat16" if "bf16" in default or "bfloat16" in default else "float32"


if __name__ == "__main__":
    serve(OpenVinoPeer)

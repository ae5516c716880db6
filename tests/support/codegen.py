"""Machine code of the kernels that a model's steps launch, for GPUs that are not there: a line of JSON for each.

    python -m tests.support.codegen 80,90 qwen3-8b [gpt-oss-20b ...]

In a process of its own, which interprets nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

from hetero_api.model_config import ModelConfig
from hetero_worker.backends.cuda.ahead import launches_of
from hetero_worker.backends.cuda.launches import Launch

EXAMPLES = Path(__file__).parents[2] / "examples/models"
LAYERS = 4
"""Few, of all kinds that the models have."""
DENSE: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "attention_bias": False, "tie_word_embeddings": False,
    },
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "attention_bias": False, "tie_word_embeddings": True,
    },
}  # fmt: skip
_USED = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_WAITS = re.compile(r"async_wait .*?num = (\d+)")


@dataclass(frozen=True, slots=True)
class MachineCode:
    """Of one kernel."""

    model: str
    name: str
    capability: int
    warps: int
    registers: int
    """Of a thread."""
    local_bytes: int
    """Of a thread: what did not fit its registers, and its stack."""
    shared_bytes: int
    """Of a program."""
    loads_in_flight: int
    """Copies into shared memory that a loop lets go on while it computes, at most."""
    tensor_cores: str
    """Instructions that multiply matrices: "wgmma", "tcgen05", "mma" or none."""


def config_of(model: str) -> ModelConfig:
    """Configuration of a model with few layers."""
    fields = DENSE.get(model) or json.loads((EXAMPLES / f"{model}.json").read_text(encoding="utf-8"))
    kinds = {"layer_types": fields["layer_types"][:LAYERS]} if "layer_types" in fields else {}
    return ModelConfig.from_hf({**fields, "num_hidden_layers": LAYERS, **kinds})


def read_code(model: str, launch: Launch) -> MachineCode:
    compiled = launch.compile()
    registers, stack, local = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    found = [word for word in ("wgmma.mma_async", "tcgen05.mma", "mma.sync") if word in ptx]
    return MachineCode(
        model=model,
        name=launch.name,
        capability=launch.capability,
        warps=compiled.metadata.num_warps,
        registers=registers,
        local_bytes=stack + local,
        shared_bytes=compiled.metadata.shared,
        loads_in_flight=max((int(number) for number in _WAITS.findall(compiled.asm["ttgir"])), default=0),
        tensor_cores=found[0].split(".")[0] if found else "",
    )


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers, stack and local memory of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = _USED.search(told)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {told}")
    registers, stack, local = map(int, found.groups())
    return registers, stack, local


def main(arguments: list[str]) -> None:
    capabilities, *models = arguments
    for model in models:
        for capability in map(int, capabilities.split(",")):
            launches: dict[Any, Launch] = {
                (each.name, each.specialization): each for each in launches_of(config_of(model), capability)
            }
            for launch in launches.values():
                print(json.dumps(asdict(read_code(model, launch))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

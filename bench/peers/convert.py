"""A Hugging Face directory in a peer's format.

    python -m bench.peers.convert KIND SOURCE TARGET TYPE

Run by the interpreter that has the format's library:

    gguf         SOURCE a directory    TYPE bf16                 (bench.peers.gguf_file, this project's environment)
    requantize   SOURCE a GGUF file    TYPE f16 q8_0 q4_0 q4_1   (llama.cpp's own quantiser)
    openvino     SOURCE a directory    TYPE fp16 int8 int4       (optimum-intel; int4 in groups of 64)
    ctranslate2  SOURCE a directory    TYPE float32 int8
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

GROUP = 64
"""Inputs that share an int4 scale: divides the widths of all models here, which 128 does not."""
USAGE = 2


def gguf(source: Path, target: Path, dtype: str) -> None:
    if dtype != "bf16":
        raise SystemExit(f"a GGUF is written in bf16 and requantised from there, not {dtype}")
    import_module("bench.peers.gguf_file").write(source, target)


def requantize(source: Path, target: Path, dtype: str) -> None:
    llama: Any = import_module("llama_cpp")
    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{dtype.upper()}")
    status = llama.llama_model_quantize(str(source).encode(), str(target).encode(), parameters)
    if status:
        raise SystemExit(f"llama_model_quantize to {dtype}: status {status}")


def openvino(source: Path, target: Path, dtype: str) -> None:
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(source)]
    command += ["--task", "text-generation-with-past", "--weight-format", dtype]
    if dtype == "int4":
        command += ["--group-size", str(GROUP)]
    subprocess.run([*command, str(target)], check=True)


def ctranslate2(source: Path, target: Path, dtype: str) -> None:
    _old_rope_fields()
    converters: Any = import_module("ctranslate2.converters")
    converters.TransformersConverter(str(source)).convert(str(target), quantization=dtype)


def _old_rope_fields() -> None:
    """transformers 5 keeps rope's fields in `rope_parameters`; the converter asks for them where they were before."""
    transformers: Any = import_module("transformers")
    for family in (transformers.LlamaConfig, transformers.Qwen3Config):
        if not hasattr(family, "rope_theta"):
            family.rope_theta = property(lambda config: (config.rope_parameters or {}).get("rope_theta", 10000.0))
        if not hasattr(family, "rope_scaling"):
            family.rope_scaling = None


KINDS = {"gguf": gguf, "requantize": requantize, "openvino": openvino, "ctranslate2": ctranslate2}


def main(arguments: list[str]) -> int:
    if len(arguments) != 4 or arguments[0] not in KINDS:
        print(__doc__, file=sys.stderr)
        return USAGE
    kind, source, target, dtype = arguments
    KINDS[kind](Path(source), Path(target), dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

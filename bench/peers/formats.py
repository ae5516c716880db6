"""The formats that peers read, made once from a Hugging Face directory: the same weights, rounded to each width."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.home import BenchHome
from bench.peers.environments import OWN, PeerError, interpreter, missing, run

HUGGING_FACE: Final = "huggingface"
"""The directory itself."""


@dataclass(frozen=True, slots=True)
class Format:
    """Made by `kind` of bench.peers.convert in `environment`, from another format."""

    kind: str
    environment: str
    dtype: str
    source: str = HUGGING_FACE


FORMATS: Final[Mapping[str, Format]] = {
    "gguf-bf16": Format("gguf", OWN, "bf16"),
    "gguf-f16": Format("requantize", "llama.cpp", "f16", source="gguf-bf16"),
    "gguf-q8_0": Format("requantize", "llama.cpp", "q8_0", source="gguf-bf16"),
    "gguf-q4_0": Format("requantize", "llama.cpp", "q4_0", source="gguf-bf16"),
    "gguf-q4_1": Format("requantize", "llama.cpp", "q4_1", source="gguf-bf16"),
    "openvino-fp16": Format("openvino", "openvino", "fp16"),
    "openvino-int8": Format("openvino", "openvino", "int8"),
    "openvino-int4": Format("openvino", "openvino", "int4"),
    "ctranslate2-float32": Format("ctranslate2", "ctranslate2", "float32"),
    "ctranslate2-int8": Format("ctranslate2", "ctranslate2", "int8"),
}


def path_of(home: BenchHome, model: str, directory: Path, name: str) -> Path:
    """Where the model is in this format; it may not be there."""
    return directory if name == HUGGING_FACE else home.format(model, name)


def ensure(home: BenchHome, model: str, directory: Path, name: str) -> Path:
    """The same, made if it is not there; it appears when it is whole. Raises PeerError."""
    path = path_of(home, model, directory, name)
    if path.exists():
        return path
    format_ = FORMATS[name]
    if why := missing(home, format_.environment):
        raise PeerError(why)
    source = ensure(home, model, directory, format_.source)
    unfinished = path.with_name(f"{path.name}.unfinished")
    _remove(unfinished)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = home.log(f"convert-{model}-{name}")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(interpreter(home, format_.environment)), "-m", "bench.peers.convert", format_.kind]
    run([*command, str(source), str(unfinished), format_.dtype], log=log, variables={"HF_HUB_OFFLINE": "1"})
    os.replace(unfinished, path)
    return path


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

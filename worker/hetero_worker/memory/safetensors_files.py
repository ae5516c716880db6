"""The safetensors files of a model directory: which holds what, and slices of their tensors as they are stored.

Files are mapped and sliced. Files that hold pickled tensors are refused, because unpickling runs what the file says.
Everything that can be wrong becomes a ModelError that names the file, the tensor and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from hetero_api.errors import ModelError
from hetero_api.sharding import UnitRange

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_PICKLED_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt")
_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip


class SafetensorsFiles:
    """Of one directory. Files stay mapped until `close`."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelError."""
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()
        try:
            self._file_of = self._locate()
        except BaseException:
            self._stack.close()
            raise

    @property
    def directory(self) -> Path:
        return self._directory

    def close(self) -> None:
        self._files.clear()
        self._stack.close()

    def has(self, tensor: str) -> bool:
        return tensor in self._file_of

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Raises ModelError when there is no such tensor."""
        return self._view(tensor)[1]

    def dtype(self, tensor: str) -> torch.dtype:
        path, _ = self._view(tensor)
        name = str(self._open(path.name).get_slice(tensor).get_dtype())
        if name not in _DTYPES:
            raise ModelError(f"{path}: tensor {tensor} is stored as {name}; supported: {', '.join(_DTYPES)}")
        return _DTYPES[name]

    def slice(self, tensor: str, *ranges: UnitRange | None) -> torch.Tensor:
        """A range of each of the first dimensions; None: all of it."""
        path, shape = self._view(tensor)
        index = tuple(slice(*part) if part else slice(None) for part in ranges)
        try:
            found: torch.Tensor = self._open(path.name).get_slice(tensor)[index[: len(shape)]]
        except SafetensorError as error:
            raise _damaged(path, error, tensor=tensor) from error
        return found

    def check_shape(self, tensor: str, expected: tuple[int, ...]) -> None:
        """Raise ModelError unless the tensor is of this shape."""
        path, found = self._view(tensor)
        if found != expected:
            raise ModelError(
                f"{path}: tensor {tensor} has shape {list(found)}, config.json says {list(expected)}; "
                "the two are not of the same model"
            )

    def _view(self, tensor: str) -> tuple[Path, tuple[int, ...]]:
        path = self._path_of(tensor)
        try:
            return path, tuple(self._open(path.name).get_slice(tensor).get_shape())
        except SafetensorError as error:
            raise _damaged(path, error, tensor=tensor) from error

    def _locate(self) -> dict[str, str]:
        """File of each tensor."""
        if (self._directory / INDEX_FILE).is_file():
            return self._read_index(self._directory / INDEX_FILE)
        if (self._directory / SINGLE_FILE).is_file():
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        raise self._no_weights()

    def _read_index(self, path: Path) -> dict[str, str]:
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ModelError(f"{path}: cannot be read as a safetensors index: {error!r}; fetch it again") from error
        if not isinstance(weight_map, Mapping):
            raise ModelError(f"{path}: weight_map must map tensors to files; fetch it again")
        for file in sorted({str(file) for file in weight_map.values()}):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ModelError(f"{path}: names {file!r}, which is no .safetensors file of the same directory")
            if not (self._directory / file).is_file():
                raise ModelError(f"{path}: names {file}, which is not in the directory; fetch the missing file")
        return {str(tensor): str(file) for tensor, file in weight_map.items()}

    def _no_weights(self) -> ModelError:
        looked_for = f"no weights: looked for {SINGLE_FILE}, {INDEX_FILE} and a .gguf file"
        if not self._directory.is_dir():
            return ModelError(f"{self._directory}: no such directory; {looked_for}")
        pickled = sorted(f.name for f in self._directory.iterdir() if f.suffix in _PICKLED_SUFFIXES)
        if pickled:
            return ModelError(
                f"{self._directory}: {looked_for}; {', '.join(pickled[:3])} holds pickled tensors, which are "
                "refused because unpickling runs code: convert the checkpoint to safetensors"
            )
        return ModelError(f"{self._directory}: {looked_for}; put the model's safetensors there")

    def _path_of(self, tensor: str) -> Path:
        file = self._file_of.get(tensor)
        if file is None:
            raise ModelError(
                f"{self._directory}: no tensor {tensor} in its safetensors; is config.json of the same model?"
            )
        return self._directory / file

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._directory / file
            try:
                self._files[file] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error
        return self._files[file]


def _damaged(path: Path, error: Exception, *, tensor: str = "") -> ModelError:
    where = f" (tensor {tensor})" if tensor else ""
    return ModelError(f"{path}{where}: damaged or truncated safetensors: {error}; fetch the file again")

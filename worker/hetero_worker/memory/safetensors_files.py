"""The safetensors files of a model directory: which holds what, and slices of their tensors as they are stored.

Files are mapped and sliced, once the format's own library has found nothing wrong with them. Files that hold pickled
tensors are refused, because unpickling runs what the file says. Everything that can be wrong becomes a ModelError that
names the file, the tensor and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from hetero_api.errors import ModelError
from hetero_api.sharding import UnitRange
from hetero_worker.memory.mapped_file import MappedFile

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_PICKLED_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt")
_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip


_LENGTH_BYTES: Final = 8
"""Of the header's length, which a file begins with."""
_METADATA: Final = "__metadata__"


class _Stored(NamedTuple):
    """A tensor, as its file's header tells."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    """Of its bytes, in the file."""


class _OpenFile(NamedTuple):
    mapped: MappedFile
    tensors: Mapping[str, _Stored]


class SafetensorsFiles:
    """Of one directory. Files stay mapped until `close`, or until the last tensor that lies in them is gone."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelError."""
        self._directory = directory
        self._files: dict[str, _OpenFile] = {}
        self._file_of = self._locate()

    @property
    def directory(self) -> Path:
        return self._directory

    def close(self) -> None:
        self._files.clear()

    def let_go(self) -> None:
        """Give back the memory that what was read so far takes; tensors of `slice` stay what they are."""
        for file in self._files.values():
            file.mapped.let_go()

    def has(self, tensor: str) -> bool:
        return tensor in self._file_of

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Raises ModelError when there is no such tensor."""
        return self._stored(tensor).shape

    def dtype(self, tensor: str) -> torch.dtype:
        name = self._stored(tensor).dtype
        if name not in _DTYPES:
            path = self._path_of(tensor)
            raise ModelError(f"{path}: tensor {tensor} is stored as {name}; supported: {', '.join(_DTYPES)}")
        return _DTYPES[name]

    def slice(self, tensor: str, *ranges: UnitRange | None) -> torch.Tensor:
        """A range of each of the first dimensions; None: all of it. It lies in the file: not to be written to."""
        stored, dtype = self._stored(tensor), self.dtype(tensor)
        found = self._open(self._file_of[tensor]).mapped.bytes[stored.begin : stored.end]
        if stored.begin % dtype.itemsize:  # headers are filled up to a multiple of 8, but need not be
            found = found.clone()
        index = tuple(slice(*part) if part else slice(None) for part in ranges)
        return found.view(dtype).view(stored.shape)[index[: len(stored.shape)]]

    def check_shape(self, tensor: str, expected: tuple[int, ...]) -> None:
        """Raise ModelError unless the tensor is of this shape."""
        found = self.shape(tensor)
        if found != expected:
            raise ModelError(
                f"{self._path_of(tensor)}: tensor {tensor} has shape {list(found)}, config.json says {list(expected)}; "
                "the two are not of the same model"
            )

    def _stored(self, tensor: str) -> _Stored:
        path = self._path_of(tensor)
        stored = self._open(path.name).tensors.get(tensor)
        if stored is None:
            raise _damaged(path, "it is not in the file", tensor=tensor)
        return stored

    def _locate(self) -> dict[str, str]:
        """File of each tensor."""
        if (self._directory / INDEX_FILE).is_file():
            return self._read_index(self._directory / INDEX_FILE)
        if (self._directory / SINGLE_FILE).is_file():
            return dict.fromkeys(self._open(SINGLE_FILE).tensors, SINGLE_FILE)
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

    def _open(self, file: str) -> _OpenFile:
        if file not in self._files:
            path = self._directory / file
            try:
                with safe_open(path, framework="pt"):  # reads the header, and what is wrong with it is told here
                    mapped = MappedFile(path)
                self._files[file] = _OpenFile(mapped, _header_of(mapped))
            except (SafetensorError, OSError, ValueError) as error:
                raise _damaged(path, error) from error
        return self._files[file]


def _header_of(file: MappedFile) -> dict[str, _Stored]:
    """By tensor, of a file that was found to be right."""
    length = int.from_bytes(file.bytes[:_LENGTH_BYTES].numpy().tobytes(), "little")
    begin = _LENGTH_BYTES + length
    header = json.loads(file.bytes[_LENGTH_BYTES:begin].numpy().tobytes())
    header.pop(_METADATA, None)
    return {
        name: _Stored(told["dtype"], tuple(told["shape"]), *(begin + offset for offset in told["data_offsets"]))
        for name, told in header.items()
    }


def _damaged(path: Path, error: Exception | str, *, tensor: str = "") -> ModelError:
    where = f" (tensor {tensor})" if tensor else ""
    return ModelError(f"{path}{where}: damaged or truncated safetensors: {error}; fetch the file again")

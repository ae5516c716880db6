"""Reads slices of a checkpoint in Hugging Face format, straight into the tensors that will hold them.

A rank never reads more than its own rows or columns: safetensors files are mapped and sliced. Files that hold
pickled tensors are refused, because unpickling runs what the file says. Everything that can be wrong with a
directory becomes a ModelError that names the file, the tensor and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open

from hetero_api.errors import ModelError
from hetero_api.sharding import UnitRange

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_PICKLED_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rectangle of one tensor of the checkpoint."""

    name: str
    full_shape: tuple[int, ...]
    """What the model's config says the whole tensor's shape is."""
    rows: UnitRange | None = None
    """Of the first dimension; None means all."""
    columns: UnitRange | None = None
    """Of the second dimension; None means all."""

    @property
    def shape(self) -> tuple[int, ...]:
        picked = (self.rows, self.columns)[: len(self.full_shape)]
        return tuple(size if part is None else part.size for part, size in zip(picked, self.full_shape, strict=False))


class Checkpoint:
    """An open model directory. Use it as a context manager: the files stay mapped until it is left."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._file_of = self._locate()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, part: TensorSlice, into: torch.Tensor) -> None:
        """Copy the slice into `into` (of the slice's shape), converting to its dtype."""
        path = self._path_of(part.name)
        try:
            view = self._open(path.name).get_slice(part.name)
            self._check_shape(path, part, tuple(view.get_shape()))
            index = tuple(slice(*r) if r else slice(None) for r in (part.rows, part.columns))
            into.copy_(view[index[: len(part.full_shape)]])
        except SafetensorError as error:
            raise _damaged(path, error, tensor=part.name) from error

    def read_all(self, parts: Sequence[TensorSlice], into: torch.Tensor) -> None:
        """Copy slices into consecutive rows of `into`."""
        begin = 0
        for part in parts:
            end = begin + part.shape[0]
            self.read(part, into[begin:end])
            begin = end

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
        looked_for = f"no weights: looked for {SINGLE_FILE} and {INDEX_FILE}"
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

    def _check_shape(self, path: Path, part: TensorSlice, found: tuple[int, ...]) -> None:
        if found != part.full_shape:
            raise ModelError(
                f"{path}: tensor {part.name} has shape {list(found)}, config.json says {list(part.full_shape)}; "
                "the two are not of the same model"
            )


def _damaged(path: Path, error: Exception, *, tensor: str = "") -> ModelError:
    where = f" (tensor {tensor})" if tensor else ""
    return ModelError(f"{path}{where}: damaged or truncated safetensors: {error}; fetch the file again")

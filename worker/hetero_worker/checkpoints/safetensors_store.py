"""Safetensors files of a model directory, as models are published: which file holds which tensor, and slices of them.

Files are mapped and sliced after the format's own library has checked them. Files with pickled tensors are refused,
because unpickling runs code. Every problem becomes a ModelError that names the file, the tensor and the fix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from hetero_api.errors import ModelError, unreadable_model
from hetero_api.model_directory import (
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    WEIGHTS_FILE,
    WEIGHTS_INDEX,
    model_file,
    parse_json,
    read_model_file,
)
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_api.wrappers import text_tensors
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.checkpoints.store import MappedFile, TensorSlice, WeightStore

_PICKLED_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt")
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
LENGTH_BYTES: Final = 8
"""Size of the header's length, with which a file begins."""
_METADATA: Final = "__metadata__"
_MAX_NAME: Final = 255
"""Characters of a file's name."""


class StoredTensor(NamedTuple):
    """A tensor according to its file's header; its bytes are [begin, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A file that is mapped, after the format's own library has checked its header.

    The library does not read tensors here: it keeps 64 bytes for good of each tensor that it reads, which adds up where
    adapters come and go.
    """

    def __init__(self, path: Path) -> None:
        """Map the file. Raises SafetensorError, OSError and ValueError for one that is none."""
        check_header_length(path)
        with safe_open(path, framework="pt"):
            self.mapped = MappedFile(path)
        self.tensors = _header_of(self.mapped)

    def slice_as(self, tensor: str, dtype: torch.dtype, *ranges: UnitRange | None) -> torch.Tensor:
        """Return a range of each of the first dimensions; None: all of it. Elements' bits are those of `dtype`.

        The slice lies in the file, so it must not be written to.
        """
        stored = self.tensors[tensor]
        found = self.mapped.bytes[stored.begin : stored.end]
        if stored.begin % dtype.itemsize:  # headers are filled up to a multiple of 8, but need not be
            found = found.clone()
        index = tuple(slice(*part) if part else slice(None) for part in ranges)
        return found.view(dtype).view(stored.shape)[index[: len(stored.shape)]]


class SafetensorsStore(WeightStore):
    """Files of one directory, with floats."""

    def __init__(self, directory: Path) -> None:
        """Find out which file holds which tensor. Raises ModelError."""
        self.directory = directory
        self._files: dict[str, SafetensorsFile] = {}
        self._file_of = self._locate()
        self._stored_names = text_tensors(self._file_of)

    def release_pages(self) -> None:
        """See `WeightStore.release_pages`."""
        for file in self._files.values():
            file.mapped.release_pages()

    def has(self, tensor: str) -> bool:
        """See `WeightStore.has`."""
        return tensor in self._stored_names

    def left_out(self) -> tuple[str, ...]:
        """See `WeightStore.left_out`."""
        parts: dict[str, list[int]] = {}
        for name in self._file_of.keys() - set(self._stored_names.values()):
            stored = self._entry(name)
            parts.setdefault(name.removeprefix("model.").split(".")[0], []).append(stored.end - stored.begin)
        return tuple(
            f"{part} left out ({len(sizes)} tensors, {sum(sizes) / 1e6:.1f} MB)"
            for part, sizes in sorted(parts.items())
        )

    def format_of(self, name: str) -> WeightFormat | None:  # noqa: ARG002 - all tensors are floats
        """See `WeightStore.format_of`."""
        return None

    def dtype_of(self, name: str) -> torch.dtype:
        """See `WeightStore.dtype_of`. Raises ModelError for an unknown type, too."""
        dtype = self._stored(name).dtype
        if dtype not in DTYPES:
            raise self._unknown(name)
        return DTYPES[dtype]

    def floats(self, part: TensorSlice) -> torch.Tensor:
        """See `WeightStore.floats`. Raises ModelError for whole numbers, too."""
        if not self.dtype_of(part.name).is_floating_point:
            raise self._unknown(part.name)
        if part.entry is None:
            self.check_shape(part.name, part.full_shape)
            return self.slice(part.name, part.rows, part.columns)
        self.check_shape(part.name, part.entry.stored_shape(part.full_shape))
        whole = part.entry.of(self.slice(part.name), part.full_shape[0])
        ranges = (part.rows, part.columns)[: whole.dim()]
        return whole[tuple(slice(*each) if each else slice(None) for each in ranges)]

    def quantized(self, part: TensorSlice) -> QuantizedMatrix:
        """See `WeightStore.quantized`."""
        raise RuntimeError(f"{part.name} is stored as floats")

    def slice(self, tensor: str, *ranges: UnitRange | None) -> torch.Tensor:
        """Return a range of each of the first dimensions; None: all of it.

        The slice lies in the file, so it must not be written to. Raises ModelError.
        """
        return self.slice_as(tensor, self.dtype_of(tensor), *ranges)

    def kind_of(self, tensor: str) -> str:
        """Return the type of the elements, as safetensors calls it. Raises ModelError if there is no such tensor."""
        return self._stored(tensor).dtype

    def slice_as(self, tensor: str, dtype: torch.dtype, *ranges: UnitRange | None) -> torch.Tensor:
        """Return a slice, as `slice` does, with its elements' bits as another type of their size."""
        self._stored(tensor)  # raises unless the file has it
        return self._open(self._path_of(tensor).name).slice_as(self._stored_names[tensor], dtype, *ranges)

    def check_shape(self, tensor: str, expected: tuple[int, ...]) -> None:
        """Raise ModelError unless the tensor has this shape."""
        found = self._stored(tensor).shape
        if found != expected:
            raise ModelError(
                f"{self._path_of(tensor)}: tensor {tensor} has shape {list(found)}, config.json says {list(expected)}; "
                "the two are not of the same model"
            )

    def _unknown(self, tensor: str) -> ModelError:
        floats = ", ".join(name for name, dtype in DTYPES.items() if dtype.is_floating_point)
        return ModelError(
            f"{self._path_of(tensor)}: tensor {tensor} is stored as {self.kind_of(tensor)}, and quantization_config in "
            f"config.json does not say what that means; supported: {floats}"
        )

    def _stored(self, tensor: str) -> StoredTensor:
        self._path_of(tensor)
        return self._entry(self._stored_names[tensor])

    def _entry(self, stored_name: str) -> StoredTensor:
        file = self._file_of[stored_name]
        entry = self._open(file).tensors.get(stored_name)
        if entry is None:
            raise _damaged(self.directory / file, "it is not in the file", tensor=stored_name)
        return entry

    def _locate(self) -> dict[str, str]:
        """Return the file of each tensor."""
        if (self.directory / WEIGHTS_INDEX).is_file():
            return _read_index(self.directory / WEIGHTS_INDEX)
        if (self.directory / WEIGHTS_FILE).is_file():
            return dict.fromkeys(self._open(WEIGHTS_FILE).tensors, WEIGHTS_FILE)
        raise self._no_weights()

    def _no_weights(self) -> ModelError:
        looked_for = f"no weights: looked for {WEIGHTS_FILE}, {WEIGHTS_INDEX} and a .gguf file"
        if not self.directory.is_dir():
            return ModelError(f"{self.directory}: no such directory; {looked_for}")
        pickled = sorted(f.name for f in self.directory.iterdir() if f.suffix in _PICKLED_SUFFIXES)
        if pickled:
            return ModelError(
                f"{self.directory}: {looked_for}; {', '.join(pickled[:3])} holds pickled tensors, which are "
                "refused because unpickling runs code: convert the checkpoint to safetensors"
            )
        return ModelError(f"{self.directory}: {looked_for}; put the model's safetensors there")

    def _path_of(self, tensor: str) -> Path:
        stored_name = self._stored_names.get(tensor)
        if stored_name is None:
            raise ModelError(
                f"{self.directory}: no tensor {tensor} in its safetensors; is config.json of the same model?"
            )
        return self.directory / self._file_of[stored_name]

    def _open(self, file: str) -> SafetensorsFile:
        if file not in self._files:
            path = self.directory / file
            real = model_file(path)
            try:
                self._files[file] = SafetensorsFile(real)
            except (SafetensorError, OSError, ValueError) as error:
                raise _damaged(path, error) from error
        return self._files[file]


def safetensors_files(directory: Path) -> list[Path]:
    """Return the files that hold a directory's tensors, by name; none where there are no such files.

    Raises ModelError for an index that cannot be read, or that names a file which is not there.
    """
    index, single = directory / WEIGHTS_INDEX, directory / WEIGHTS_FILE
    if index.is_file():
        return [directory / name for name in sorted(set(_read_index(index).values()))]
    return [single] if single.is_file() else []


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor, all of which are there. Raises ModelError."""
    try:
        weight_map = parse_json(read_model_file(path, max_bytes=MAX_INDEX_BYTES), path)["weight_map"]
    except (FileNotFoundError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: cannot be read as a safetensors index: {error!r}; fetch it again") from error
    if not isinstance(weight_map, Mapping):
        raise ModelError(f"{path}: weight_map must map tensors to files; fetch it again")
    for file in sorted({str(file) for file in weight_map.values()}):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(f"{path}: names {file!r}, which is no .safetensors file of the same directory")
        if len(file) > _MAX_NAME or not (path.parent / file).is_file():
            raise ModelError(f"{path}: names {file[:_MAX_NAME]}, which is not in the directory; fetch the missing file")
    return {str(tensor): str(file) for tensor, file in weight_map.items()}


def check_header_length(path: Path) -> None:
    """Raise ValueError if the header is too long to be parsed, OSError if it cannot be read."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes, more than {MAX_HEADER_BYTES}")


def _header_of(file: MappedFile) -> dict[str, StoredTensor]:
    """Read the tensors of a file that was checked."""
    length = int.from_bytes(file.bytes[:LENGTH_BYTES].numpy().tobytes(), "little")
    begin = LENGTH_BYTES + length
    header = json.loads(file.bytes[LENGTH_BYTES:begin].numpy().tobytes())
    header.pop(_METADATA, None)
    return {
        name: StoredTensor(entry["dtype"], tuple(entry["shape"]), *(begin + offset for offset in entry["data_offsets"]))
        for name, entry in header.items()
    }


def _damaged(path: Path, error: Exception | str, *, tensor: str = "") -> ModelError:
    if isinstance(error, OSError):
        return unreadable_model(path, error)
    where = f" (tensor {tensor})" if tensor else ""
    return ModelError(f"{path}{where}: damaged or truncated safetensors: {error}; fetch the file again")

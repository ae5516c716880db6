"""Reads slices of a checkpoint, straight into the tensors that will hold them.

A rank never reads more than its own rows or columns, except of rows that have one scale, whose greatest weight counts.
How weights are stored is found out when the directory is opened: safetensors files in Hugging Face format, with floats
or quantised (packed_tensors.py), or a GGUF file beside config.json (gguf_store.py). Quantised weights can be had as
such, or as floats; floats can be quantised on the way (quantizing.py). Everything that can be wrong with a directory
becomes a ModelError that names the file, the tensor and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch

from hetero_api.errors import ModelError
from hetero_api.gguf_weights import gguf_of
from hetero_api.hf_config import read_json
from hetero_api.model_config import CONFIG_FILE
from hetero_api.packed_weights import PackedWeights
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_worker.memory.gguf_store import GgufStore
from hetero_worker.memory.packed_cache import KeptMatrices, PackedCache
from hetero_worker.memory.packed_tensors import PackedStore
from hetero_worker.memory.quantized_matrix import QuantizedMatrix, stacked
from hetero_worker.memory.quantizing import quantize
from hetero_worker.memory.safetensors_files import INDEX_FILE, SINGLE_FILE, SafetensorsFiles
from hetero_worker.memory.weight_store import SafetensorsStore, TensorSlice, WeightStore
from hetero_worker.platforms.file_pages import let_go_of_code

__all__ = ["INDEX_FILE", "SINGLE_FILE", "Checkpoint", "TensorSlice"]

_QUANTIZED_AT_ONCE: Final = 1 << 20
"""Weights that are floats in memory while they are quantised."""


class _Buffer:
    """Memory that is used again and again: freed and asked for anew, malloc would keep a multiple of it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Whatever is in it; the caller's until the next call."""
        size = math.prod(shape) * dtype.itemsize
        if size > self._memory.nbytes:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size].view(dtype).view(shape)


class Checkpoint:
    """An open model directory. Use it as a context manager: the files stay mapped until it is left."""

    def __init__(self, directory: Path, packed: PackedCache | None = None) -> None:
        """`packed`: where kernels' packed weights are kept from load to load; None: nowhere."""
        self._directory = directory
        self._packed = packed
        self._store: WeightStore | None = None
        self._kept: KeptMatrices | None = None
        self._widened, self._unpacked = _Buffer(), _Buffer()

    def __enter__(self) -> Self:
        self._kept = None if self._packed is None else self._packed.of(self._directory)
        try:
            self._store = open_store(self._directory)
        except BaseException:
            self._close_kept()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None
        self._widened, self._unpacked = _Buffer(), _Buffer()
        self._close_kept()
        let_go_of_code()  # what it took to get here; steps need less

    @property
    def kept_matrices(self) -> KeptMatrices | None:
        """Its weights as kernels packed them in earlier loads; None where none are kept."""
        return self._kept

    def read(self, part: TensorSlice, into: torch.Tensor) -> None:
        """Copy the slice into `into` (of the slice's shape), converting to its dtype; what is quantised is widened."""
        if self._opened.format_of(part.name) is None:
            into.copy_(self._opened.floats(part))
        else:
            self._opened.quantized(part).dequantized(into)
        self._opened.let_go()

    def in_place(self, part: TensorSlice) -> torch.Tensor | None:
        """The slice as it lies in its file, floats in rows one after another; None where it does not lie so.

        Not to be written to, nor to be kept: what is read of it counts as this process's memory until `let_go`.
        """
        if self._store is None or self.format_of(part) is not None:
            return None
        found = self._store.floats(part)
        return found if found.is_contiguous() else None

    def unpacked(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the host to read a weight into that is then packed; the caller's until the next call."""
        return self._unpacked.of(shape, dtype)

    def let_go(self) -> None:
        """Give back the memory that pages of files take which were read so far."""
        self._opened.let_go()

    def read_all(self, parts: Sequence[TensorSlice], into: torch.Tensor) -> None:
        """Copy slices into consecutive rows of `into`."""
        begin = 0
        for part in parts:
            end = begin + part.shape[0]
            self.read(part, into[begin:end])
            begin = end

    def dtype_of(self, part: TensorSlice) -> torch.dtype | None:
        """What floats are stored in; None for a matrix that is quantised, or is to be, or where nothing says."""
        if self._store is None or self.format_of(part) is not None:
            return None
        return self._store.dtype_of(part.name)

    def format_of(self, part: TensorSlice) -> WeightFormat | None:
        """What `read_quantized` makes of the slice; None: it is floats. Raises ModelError where it makes no sense."""
        stored = self._store.format_of(part.name) if self._store is not None else None
        if stored is not None and part.quantize_to is not None:
            raise ModelError(
                f"{self._directory}: {part.name} is to be quantised to {part.quantize_to}, and is quantised already "
                f"({stored}); set spec.model.quantization to none"
            )
        weights = stored or part.quantize_to
        return weights and weights.cut(*part.column_range, part.full_shape[1])

    def read_quantized(self, part: TensorSlice) -> QuantizedMatrix:
        """The slice as it is quantised, or, of floats, as it comes out in `part.quantize_to`. Raises ModelError."""
        if self.format_of(part) is None:
            raise RuntimeError(f"{part.name} is floats and is to stay so")
        wanted = part.quantize_to
        if wanted is None:
            matrix = self._opened.quantized(part)
            self._opened.let_go()
            return matrix
        try:
            return stacked([self._quantized(rows, wanted) for rows in _pieces(part)])
        except ModelError as error:
            raise ModelError(f"{self._directory}: tensor {part.name}: {error}") from error

    def _quantized(self, part: TensorSlice, wanted: WeightFormat) -> QuantizedMatrix:
        """Of whole groups, so that numbers do not depend on where columns begin and end."""
        columns, inputs = part.column_range, part.full_shape[1]
        group = wanted.group or inputs
        begin, end = columns.begin // group * group, min(-(-columns.end // group) * group, inputs)
        whole = quantize(self._floats(replace(part, columns=UnitRange(begin, end))), wanted)
        return whole.columns(UnitRange(columns.begin - begin, columns.end - begin))

    def _floats(self, part: TensorSlice) -> torch.Tensor:
        numbers = self._widened.of(part.shape, torch.float32)
        self.read(part, numbers)
        return numbers

    def _close_kept(self) -> None:
        if self._kept is not None:
            self._kept.close()
        self._kept = None

    @property
    def _opened(self) -> WeightStore:
        if self._store is None:
            raise RuntimeError("a checkpoint was read before it was opened")
        return self._store


def open_store(directory: Path) -> WeightStore:
    """What the weights of a directory are read from. Raises ModelError."""
    gguf = gguf_of(directory)
    if gguf is not None:
        return GgufStore(gguf)
    files = SafetensorsFiles(directory)
    try:
        path = directory / CONFIG_FILE
        packed = PackedWeights.of_config(read_json(path), source=str(path)) if path.exists() else None
    except BaseException:
        files.close()
        raise
    return SafetensorsStore(files) if packed is None else PackedStore(files, packed)


def _pieces(part: TensorSlice) -> Iterator[TensorSlice]:
    """The slice in pieces of some rows."""
    step = max(1, _QUANTIZED_AT_ONCE // max(1, part.full_shape[1]))
    begin, end = part.row_range
    for first in range(begin, max(end, begin + 1), step):
        yield replace(part, rows=UnitRange(first, min(first + step, end)))

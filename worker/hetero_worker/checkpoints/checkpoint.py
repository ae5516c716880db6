"""Reads slices of a checkpoint, straight into the tensors that will hold them.

A rank reads only its own rows or columns, except for rows with one common scale, where the largest weight of the whole
row counts. Weights are safetensors in Hugging Face's layout, with floats or quantised, or a GGUF file beside
config.json. Quantised weights can be read as they are, or as floats; floats can be quantised while they
are read. Every problem of a directory becomes a ModelError that names the file, the tensor and the fix.

To add a format, write a module with a `WeightStore` and a function that returns it for a model directory, or None if
the directory is of another format, and list the function in `_SPECIAL`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch

from hetero_api.errors import ModelError
from hetero_api.model_parts import RowOrder
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.conversion import SAMPLED_ROWS, Conversions, quantize_slice
from hetero_worker.checkpoints.gguf_store import open_gguf
from hetero_worker.checkpoints.packed_cache import KeptMatrices, PackedCache
from hetero_worker.checkpoints.packed_safetensors import open_packed_safetensors
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.checkpoints.safetensors_store import SafetensorsStore
from hetero_worker.checkpoints.store import RenamedStore, TensorSlice, WeightStore

_SPECIAL: Final[tuple[Callable[[Path], WeightStore | None], ...]] = (open_gguf, open_packed_safetensors)
"""Formats other than plain safetensors, in the order in which they are tried."""


class _Buffer:
    """Memory that is reused. If it were allocated for each tensor, malloc would keep a multiple of it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory, valid until the next call."""
        size = math.prod(shape) * dtype.itemsize
        if size > self._memory.nbytes:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size].view(dtype).view(shape)


class Checkpoint:
    """An open model directory. Use it as a context manager: the files stay mapped until it exits."""

    def __init__(self, directory: Path, packed: PackedCache | None = None) -> None:
        """`packed` keeps the kernels' packed weights from load to load; None: they are not kept."""
        self._directory = directory
        self._packed = packed
        self._store: WeightStore | None = None
        self.kept_matrices: KeptMatrices | None = None
        """This checkpoint's weights as kernels packed them in earlier loads; None if none are kept."""
        self._widened, self._unpacked = _Buffer(), _Buffer()
        self.conversions = Conversions()
        """Formats of the weights that were read, and what they lose."""

    def __enter__(self) -> Self:
        self.kept_matrices = None if self._packed is None else self._packed.open(self._directory)
        try:
            self._store = _open_store(self._directory)
        except BaseException:
            self._close_kept()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store = None
        self._widened, self._unpacked = _Buffer(), _Buffer()
        self._close_kept()

    def located(self, part: TensorSlice) -> TensorSlice:
        """Return the slice as one of the stack that it may lie in, if the files have that; else as it is."""
        if part.stack is None or not self.has(part.stack.name):
            return part
        return replace(part, name=part.stack.name, entry=part.stack.entry, stack=None)

    def read(self, part: TensorSlice, into: torch.Tensor) -> None:
        """Copy the slice into `into`, which has the slice's shape, and convert it to that dtype.

        Quantised weights are widened. Raises ModelError.
        """
        if self._opened.format_of(part.name) is None:
            into.copy_(rows_in_order(self._opened.floats(part), part.order))
        else:
            _matrix_in_order(self._opened.quantized(part), part.order).dequantized(into)
        self._opened.release_pages()

    def in_place(self, part: TensorSlice) -> torch.Tensor | None:
        """Return the slice as it lies in its file, as contiguous floats; None if it does not lie so.

        Callers must neither write to it nor keep it: its pages count as this process's memory until `release_pages`.
        """
        if self._store is None or part.is_reordered or self.format_of(part) is not None:
            return None
        found = self._store.floats(part)
        return found if found.is_contiguous() else None

    def unpacked(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory to read a weight into before it is packed, valid until the next call."""
        return self._unpacked.view(shape, dtype)

    def release_pages(self) -> None:
        """Give back the memory of file pages that were read so far."""
        self._opened.release_pages()

    def has(self, tensor: str) -> bool:
        """Return whether there is a tensor that the config does not ask for."""
        return self._opened.has(tensor)

    def left_out(self) -> tuple[str, ...]:
        """Return the parts of the files that are not served, with their number of tensors and bytes, for a person.

        Raises ModelError.
        """
        return self._opened.left_out()

    def read_all(self, parts: Sequence[TensorSlice], into: torch.Tensor) -> None:
        """Copy slices into consecutive rows of `into`. Raises ModelError."""
        begin = 0
        for part in parts:
            end = begin + part.shape[0]
            self.read(part, into[begin:end])
            begin = end

    def dtype_of(self, part: TensorSlice) -> torch.dtype | None:
        """Return the type of stored floats; None if the matrix is quantised or will be, or no file is open."""
        if self._store is None or self.format_of(part) is not None:
            return None
        return self._store.dtype_of(part.name)

    def format_of(self, part: TensorSlice) -> WeightFormat | None:
        """Return the format that `read_quantized` returns the slice in; None: it is floats.

        Raises ModelError if `quantize_to` is set for a weight that is quantised already.
        """
        stored = self._store.format_of(part.name) if self._store is not None else None
        if stored is not None and part.quantize_to is not None and not stored.is_wide:
            raise ModelError(
                f"{self._directory}: {part.name} is to be quantised to {part.quantize_to}, and is quantised already "
                f"({stored}); set spec.model.quantization to none"
            )
        weights = part.quantize_to or stored
        return weights and weights.cut(*part.column_range, part.full_shape[1])

    def read_quantized(self, part: TensorSlice) -> QuantizedMatrix:
        """Return a quantised slice, or floats quantised to `part.quantize_to`. Raises ModelError."""
        if self.format_of(part) is None:
            raise RuntimeError(f"{part.name} is floats and is to stay so")
        wanted = part.quantize_to
        if wanted is None:
            matrix = self._opened.quantized(part)
            self._opened.release_pages()
            return _matrix_in_order(matrix, part.order)
        try:
            as_stored = replace(part, order=None)
            return _matrix_in_order(quantize_slice(self._floats, as_stored, wanted), part.order)
        except ModelError as error:
            raise ModelError(f"{self._directory}: tensor {part.name}: {error}") from error

    def measure_loss(self, part: TensorSlice, kept: WeightFormat | torch.dtype) -> None:
        """Measure what a matrix loses that is kept so, on some of its rows. Raises ModelError.

        Floats that stay as they are, or become wider ones, lose nothing and are left out.
        """
        if self._store is None or not part.shape[0] or self._widens(part, kept):
            return
        stored, name = self._store.stored_as(part.name), str(kept).removeprefix("torch.")
        if not self.conversions.wants(stored, name):
            return
        begin, end = part.row_range
        sample = replace(part, rows=UnitRange(begin, min(begin + SAMPLED_ROWS, end)), order=None)
        if isinstance(kept, torch.dtype):
            found = torch.empty(sample.shape, dtype=kept)
            self.read(sample, found)
        else:
            found = self.read_quantized(sample).dequantized()
        self.conversions.add(stored, name, exact=self._store.exact(sample), found=found.float())
        self._store.release_pages()

    def _widens(self, part: TensorSlice, kept: WeightFormat | torch.dtype) -> bool:
        if not isinstance(kept, torch.dtype) or self._opened.format_of(part.name) is not None:
            return False
        return torch.promote_types(self._opened.dtype_of(part.name), kept) == kept

    def _floats(self, part: TensorSlice) -> torch.Tensor:
        numbers = self._widened.view(part.shape, torch.float32)
        self.read(part, numbers)
        return numbers

    def _close_kept(self) -> None:
        if self.kept_matrices is not None:
            self.kept_matrices.close()
        self.kept_matrices = None

    @property
    def _opened(self) -> WeightStore:
        if self._store is None:
            raise RuntimeError("a checkpoint was read before it was opened")
        return self._store


class HeadCheckpoint(Checkpoint):
    """An open model directory of whose layers only the first multi-token-prediction head is seen, as layer 0."""

    def __init__(self, directory: Path, *, prefixes: Mapping[str, str]) -> None:
        """`prefixes`: as ModelConfig.prediction_head_prefixes."""
        super().__init__(directory)
        self._prefixes = prefixes

    def __enter__(self) -> Self:
        super().__enter__()
        self._store = RenamedStore(self._opened, self._prefixes)
        return self


def _open_store(directory: Path) -> WeightStore:
    """Open the weights of a model directory. Raises ModelError."""
    for open_special in _SPECIAL:
        if (store := open_special(directory)) is not None:
            return store
    return SafetensorsStore(directory)


def rows_in_order(rows: torch.Tensor, order: RowOrder | None) -> torch.Tensor:
    """Return rows of whole heads in an order; None: as they are."""
    if order is None or order.is_identity:
        return rows
    return rows.reshape(-1, order.head_dim, *rows.shape[1:])[:, list(order.rows)].flatten(0, 1)


def _matrix_in_order(matrix: QuantizedMatrix, order: RowOrder | None) -> QuantizedMatrix:
    if order is None or order.is_identity:
        return matrix
    minima = None if matrix.minima is None else rows_in_order(matrix.minima, order)
    return replace(
        matrix, values=rows_in_order(matrix.values, order), scales=rows_in_order(matrix.scales, order), minima=minima
    )

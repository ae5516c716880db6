"""Interface between a checkpoint and its format: slices of tensors, by Hugging Face's names."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from hetero_api.model_parts import RowOrder
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix


class StackEntry(NamedTuple):
    """One matrix, or its bias, of a stored stack of matrices [entries, in, out] or biases [entries, out].

    The entry's outputs are every `step`-th from `first` on. With a `height`, matrices are [entries, height, in], and
    the entry's outputs lie together.
    """

    number: int
    entries: int
    first: int = 0
    step: int = 1
    height: int | None = None

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stack whose entries have this shape."""
        outputs, *inputs = shape
        if self.height is not None:
            return self.entries, self.height, *inputs
        return self.entries, *inputs, outputs * self.step

    def of(self, stack: torch.Tensor, outputs: int) -> torch.Tensor:
        """Return a view of the entry: [outputs, in] or [outputs]."""
        if self.height is not None:
            return stack[self.number, self.first : self.first + outputs]
        entry = stack[self.number, ..., self.first :: self.step]
        return entry.T if entry.dim() == 2 else entry


class Stack(NamedTuple):
    """Tensor that has others as its entries."""

    name: str
    entry: StackEntry


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rectangle of one tensor of the checkpoint."""

    name: str
    full_shape: tuple[int, ...]
    """Shape of the whole tensor, or of the entry of a stack, according to the model's config."""
    rows: UnitRange | None = None
    """Range of the first dimension; None: all."""
    columns: UnitRange | None = None
    """Range of the second dimension; None: all."""
    quantize_to: WeightFormat | None = None
    """Format in which `Checkpoint.read_quantized` returns floats; None: the tensor is quantised already, or stays
    floats."""
    order: RowOrder | None = None
    """Order in which the checkpoint returns the rows of each head; None, like an order that changes nothing: as they
    are stored. Stores do not apply it."""
    entry: StackEntry | None = None
    """The entry of a stack that the tensor is; None: it is stored by itself. For floats only."""
    stack: Stack | None = None
    """The stack that some files have in place of the tensor (`Checkpoint.located`)."""

    @property
    def is_reordered(self) -> bool:
        """True if the checkpoint returns rows in another order than they are stored in."""
        return self.order is not None and not self.order.is_identity

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        picked = (self.rows, self.columns)[: len(self.full_shape)]
        sizes = zip(picked, self.full_shape, strict=False)
        return *(size if part is None else part.size for part, size in sizes), *self.full_shape[2:]

    @property
    def row_range(self) -> UnitRange:
        """Rows of the slice."""
        return self.rows or UnitRange(0, self.full_shape[0])

    @property
    def column_range(self) -> UnitRange:
        """Columns of the slice, which must be of a matrix."""
        return self.columns or UnitRange(0, self.full_shape[1])


class WeightStore(ABC):
    """Open files of one format. Methods other than `release_pages` raise ModelError for a missing tensor.

    The files are closed with the store and the last slice that lies in them.
    """

    @abstractmethod
    def format_of(self, name: str) -> WeightFormat | None:
        """Return how a matrix is quantised; None: it is floats."""

    @abstractmethod
    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type in which floats are stored."""

    @abstractmethod
    def floats(self, part: TensorSlice) -> torch.Tensor:
        """Return a slice as it is stored. It may lie in the file, so it must not be written to."""

    @abstractmethod
    def quantized(self, part: TensorSlice) -> QuantizedMatrix:
        """Return a slice of a matrix that has a format."""

    def stored_as(self, name: str) -> str:
        """Return how a tensor is stored, for a person."""
        return str(self.format_of(name) or str(self.dtype_of(name)).removeprefix("torch."))

    def exact(self, part: TensorSlice) -> torch.Tensor:
        """Return a slice as float32, before anything is rounded to what ranks keep."""
        is_quantized = self.format_of(part.name) is not None
        return self.quantized(part).dequantized() if is_quantized else self.floats(part).float()

    def has(self, tensor: str) -> bool:  # noqa: ARG002 - for formats that may hold what a config says is not there
        """Return whether there is a tensor that the config does not ask for."""
        return False

    def left_out(self) -> tuple[str, ...]:
        """Return the parts of the files that are not served, with their number of tensors and bytes, for a person."""
        return ()

    @abstractmethod
    def release_pages(self) -> None:
        """Give back the memory of file pages that were read so far."""


class RenamedStore(WeightStore):
    """Another store whose tensors are known by other names."""

    def __init__(self, store: WeightStore, prefixes: Mapping[str, str]) -> None:
        """`prefixes`: beginnings of names that stand for others; a name with none of them is itself."""
        self._store = store
        self._prefixes = prefixes

    def _stored(self, name: str) -> str:
        for prefix, stored in self._prefixes.items():
            if name.startswith(prefix):
                return stored + name.removeprefix(prefix)
        return name

    def _located(self, part: TensorSlice) -> TensorSlice:
        return replace(part, name=self._stored(part.name))

    def format_of(self, name: str) -> WeightFormat | None:
        """See `WeightStore.format_of`."""
        return self._store.format_of(self._stored(name))

    def dtype_of(self, name: str) -> torch.dtype:
        """See `WeightStore.dtype_of`."""
        return self._store.dtype_of(self._stored(name))

    def floats(self, part: TensorSlice) -> torch.Tensor:
        """See `WeightStore.floats`."""
        return self._store.floats(self._located(part))

    def quantized(self, part: TensorSlice) -> QuantizedMatrix:
        """See `WeightStore.quantized`."""
        return self._store.quantized(self._located(part))

    def stored_as(self, name: str) -> str:
        """See `WeightStore.stored_as`."""
        return self._store.stored_as(self._stored(name))

    def exact(self, part: TensorSlice) -> torch.Tensor:
        """See `WeightStore.exact`."""
        return self._store.exact(self._located(part))

    def has(self, tensor: str) -> bool:
        """See `WeightStore.has`."""
        return self._store.has(self._stored(tensor))

    def release_pages(self) -> None:
        """See `WeightStore.release_pages`."""
        self._store.release_pages()


class MappedFile:
    """A file's bytes as a tensor that nobody writes to. The mapping goes with the last tensor that lies in it.

    The pages of a mapping that a process has read count as its memory. A rank reads each weight once, so pages that
    were kept until the end of the load would take as much memory again as the weights.
    """

    def __init__(self, path: Path) -> None:
        """Map the file. Raises OSError, and ValueError if it is empty."""
        with path.open("rb") as file:
            # Copy on write, because torch wants memory that may be written to.
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def release_pages(self) -> None:
        """Give back the pages that were read. Tensors stay valid: later reads come from the file again."""
        self._mapped.madvise(mmap.MADV_DONTNEED)

"""What a checkpoint reads tensors from: one implementation for each way that weights are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_worker.memory.quantized_matrix import QuantizedMatrix
from hetero_worker.memory.safetensors_files import SafetensorsFiles


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
    quantize_to: WeightFormat | None = None
    """What `Checkpoint.read_quantized` makes of floats; None: it reads what is quantised already."""

    @property
    def shape(self) -> tuple[int, ...]:
        picked = (self.rows, self.columns)[: len(self.full_shape)]
        return tuple(size if part is None else part.size for part, size in zip(picked, self.full_shape, strict=False))

    @property
    def row_range(self) -> UnitRange:
        return self.rows or UnitRange(0, self.full_shape[0])

    @property
    def column_range(self) -> UnitRange:
        return self.columns or UnitRange(0, self.full_shape[1])


class WeightStore(Protocol):
    """Slices of tensors, by Hugging Face's names. All but `close` raise ModelError for what is not there."""

    def format_of(self, name: str) -> WeightFormat | None:
        """How a matrix is quantised; None: it is floats."""
        ...

    def dtype_of(self, name: str) -> torch.dtype:
        """What floats are stored in."""
        ...

    def floats(self, part: TensorSlice) -> torch.Tensor:
        """As they are stored. May lie in the file: not to be written to."""
        ...

    def quantized(self, part: TensorSlice) -> QuantizedMatrix:
        """Of a matrix that has a format."""
        ...

    def let_go(self) -> None:
        """Give back the memory that pages of files take which were read so far."""
        ...

    def close(self) -> None: ...


class SafetensorsStore:
    """Floats, as models are published."""

    def __init__(self, files: SafetensorsFiles) -> None:
        self._files = files

    def format_of(self, name: str) -> WeightFormat | None:  # noqa: ARG002 - floats, whatever the name
        return None

    def dtype_of(self, name: str) -> torch.dtype:
        return self._files.dtype(name)

    def floats(self, part: TensorSlice) -> torch.Tensor:
        self._files.check_shape(part.name, part.full_shape)
        return self._files.slice(part.name, part.rows, part.columns)

    def quantized(self, part: TensorSlice) -> QuantizedMatrix:
        raise RuntimeError(f"{part.name} is stored as floats")

    def let_go(self) -> None:
        self._files.let_go()

    def close(self) -> None:
        self._files.close()

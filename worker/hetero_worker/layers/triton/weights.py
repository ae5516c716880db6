"""Quantised weights on a GPU, as narrow as they are stored. Packed weights can be looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.kernels.quantized_matmul import QuantizedLayout, QuantizedWeight, quantized_linear, quantized_rows
from hetero_worker.layers.linear_kernels import PackedWeight

_PACKED_AT_ONCE: Final = 1 << 26
"""Values that are on the device one a byte while a matrix is packed."""


class DeviceWeight(PackedWeight):
    """Quantised weight [out, in] on the device."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, *, batch_invariant: bool) -> None:
        """`dtype`: of inputs and outputs."""
        self.weight: Final = weight
        """Values, scales and minima."""
        self._dtype = dtype
        self._batch_invariant = batch_invariant

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """See `PackedWeight.tensors`."""
        kept = self.weight
        return (kept.values, kept.scales) if kept.minima is None else (kept.values, kept.scales, kept.minima)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        """Return x · Wᵀ + b, contiguous [rows, out], of x [rows, in]."""
        return quantized_linear(x, self.weight, bias, batch_invariant=self._batch_invariant)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ as it was summed: float32 [rows, out], of x [rows, in]."""
        return quantized_linear(x, self.weight, None, dtype=torch.float32, batch_invariant=self._batch_invariant)

    def embed(self, ids: torch.Tensor, *, first: int = 0, scale: float = 1.0) -> torch.Tensor:
        """See `PackedWeight.embed`."""
        return quantized_rows(ids, self.weight, self._dtype, first=first, scale=scale)


def packed_on(device: torch.device, matrix: QuantizedMatrix) -> QuantizedWeight:
    """Return the matrix packed on the device, some rows at a time."""
    weights, layout = matrix.format, QuantizedLayout.of(matrix.shape, matrix.format)
    packed = QuantizedWeight(
        weights,
        layout,
        torch.empty(layout.num_bytes, dtype=torch.uint8, device=device),
        matrix.scales.t().contiguous().half().to(device),
        None if matrix.minima is None else matrix.minima.t().contiguous().half().to(device),
    )
    step = max(1, _PACKED_AT_ONCE // max(1, layout.inputs))
    for begin in range(0, layout.outputs, step):
        values = matrix.values[begin : begin + step].to(device)
        if values.dtype == torch.int8:
            values = values.view(torch.uint8)
            values = values if weights.is_float else values ^ 0x80
        for whole, part in zip(_chunks_of(packed), _packed_chunks(values, layout), strict=True):
            whole[:, begin : begin + step] = part
    return packed


def _chunks_of(packed: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [chunks, out, bytes] of whole chunks, then of the rest of the rows."""
    layout = packed.layout
    full, rest = divmod(layout.inputs, layout.chunk)
    stored = layout.stored(layout.chunk)
    split = full * layout.outputs * stored
    first, last = packed.values[:split], packed.values[split:]
    return first.view(full, layout.outputs, stored), last.view(1, layout.outputs, layout.stored(rest))


def _packed_chunks(values: torch.Tensor, layout: QuantizedLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uint8 values [rows, in] packed as `_chunks_of` has them."""
    full = layout.inputs // layout.chunk
    split = full * layout.chunk
    whole = values[:, :split].reshape(len(values), full, layout.chunk).transpose(0, 1)
    rest = values[:, split:].unsqueeze(0)
    return _joined_halves(whole, layout), _joined_halves(rest, layout)


def _joined_halves(values: torch.Tensor, layout: QuantizedLayout) -> torch.Tensor:
    """Return [..., bytes] of uint8 values [..., inputs]: of 4 bits two in a byte, the first half in the lower bits."""
    if layout.bits == 8:
        return values
    half = layout.stored(values.shape[-1])
    joined = values[..., :half].clone()
    joined[..., : values.shape[-1] - half] |= values[..., half:] << 4
    return joined

"""LinearKernels of GPUs: quantised weights stay as narrow as they are.

Quantised weights are multiplied by our kernels (`kernels.quantized_matmul`), floats by torch, by our own kernel if
there is one row (`kernels.row_product`), or by another where a row must have the same bits in any batch
(`kernels.matmul`). Packed weights can be looked up, so an embedding needs no memory beside a tied output head.
Adapters' products are two kernels a layer (`kernels.low_rank`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from hetero_api.model_parts import Activation, ExpertsConfig
from hetero_api.weight_format import WeightFormat
from hetero_worker.adapters.low_rank import MAX_ADAPTERS, AdapterRows, LowRank
from hetero_worker.adapters.peft_files import LowRankFactors
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.kernels.low_rank import FACTORS, add_low_rank, column_blocks, place_factors
from hetero_worker.kernels.matmul import linear
from hetero_worker.kernels.row_product import row_product
from hetero_worker.layers.linear_kernels import (
    HeadsByRow,
    PackedExperts,
    PackedHeads,
    PackedMlp,
    PackedWeight,
    PanelExperts,
    PlainKernel,
    TorchWeight,
)
from hetero_worker.layers.triton.experts import DeviceExperts, DevicePanelExperts, kinds_of
from hetero_worker.layers.triton.weights import DeviceWeight, packed_on
from hetero_worker.memory.panels import PanelLayer

_GROUP_UNIT: Final = 16
"""Inputs; groups are multiples of it."""


class DeviceKernel(PlainKernel):
    """LinearKernel of one device, by torch and by our kernels for quantised weights."""

    name = "torch, triton for one row and for quantised weights"
    embeds = True
    batch_invariant: bool = False

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype`: of inputs and outputs."""
        self._device = device
        self._dtype = dtype

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Return a product with the weight [out, in] as it is."""
        return _FloatWeight(weight)

    def takes(self, weights: WeightFormat) -> bool:
        """Return True for formats whose groups have a multiple of 16 inputs."""
        return weights.group % _GROUP_UNIT == 0 and not (weights.is_float and weights.has_minimum)

    def pack_quantized(self, matrix: QuantizedMatrix) -> PackedWeight:
        """Return the matrix on the device. Raises ValueError for a format that the kernel does not take."""
        if not self.takes(matrix.format):
            raise ValueError(f"our kernels take groups of a multiple of {_GROUP_UNIT} inputs, not {matrix.format}")
        packed = packed_on(self._device, matrix)
        return DeviceWeight(packed, self._dtype, batch_invariant=self.batch_invariant)

    def join_experts(
        self,
        experts: ExpertsConfig,
        activation: Activation,
        *,
        shared: PackedMlp | None,
        counts: torch.Tensor,
        loaded: Sequence[PackedMlp],
    ) -> PackedExperts | None:
        """See `LinearKernel.join_experts`. Experts whose weights are of several kinds are computed one by one."""
        if kinds_of(loaded) is None:
            return None
        return DeviceExperts(experts, activation, shared=shared, counts=counts, batch_invariant=self.batch_invariant)

    def panel_experts(
        self, experts: ExpertsConfig, activation: Activation, layer: PanelLayer, buffer: torch.Tensor
    ) -> PanelExperts:
        """See `LinearKernel.panel_experts`."""
        return DevicePanelExperts(layer, buffer, activation, num_experts=experts.number)

    def low_rank(self, heights: Sequence[int], rows: AdapterRows, *, device: torch.device) -> LowRank:
        """See `LinearKernel.low_rank`."""
        return DeviceLowRank(heights, rows, device=device)


class TritonKernel(DeviceKernel):
    """Batch-invariant LinearKernel: a row has the same bits however many rows there are."""

    name = "triton-invariant"
    batch_invariant = True

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Return a product with the weight [out, in] as it is."""
        return _InvariantWeight(weight)

    def pack_heads(self, weight: torch.Tensor) -> PackedHeads:
        """Return products with the weight [heads, out, in], by torch row by row: there is no kernel of ours."""
        return HeadsByRow(weight)


class DeviceLowRank(LowRank):
    """LowRank by our kernels: rows find their adapters on the device, so recorded steps serve any that come and go."""

    def __init__(self, heights: Sequence[int], rows: AdapterRows, *, device: torch.device) -> None:
        super().__init__(heights, rows)
        shape = MAX_ADAPTERS + 1, len(heights), int(FACTORS.value)
        self._table = torch.zeros(shape, dtype=torch.int64, device=device)
        self._blocks = column_blocks(self._bounds, device)
        self._held: dict[int, list[torch.Tensor]] = {}

    def hold(self, number: int, factors: Sequence[LowRankFactors | None], dtype: torch.dtype) -> None:
        """See `LowRank.hold`."""
        self._held[number] = place_factors(factors, self._table[number], dtype)

    def drop(self, number: int) -> None:
        """See `LowRank.drop`."""
        self._table[number].zero_()
        self._held.pop(number, None)

    def _add(self, x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> None:
        add_low_rank(x, y, numbers, self._table, self._blocks, most_rank=self._rows.max_rank)


class _FloatWeight(TorchWeight):
    """Weight [out, in] of floats; our kernel multiplies one row of 16-bit floats with it, torch the others."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        return self._by_row(x, bias, x.dtype) if self._is_ours(x) else super().__call__(x, bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._by_row(x, None, torch.float32) if self._is_ours(x) else super().logits(x)

    def _is_ours(self, x: torch.Tensor) -> bool:
        return len(x) == 1 and x.dtype.itemsize == 2 and self._weight.is_contiguous()

    def _by_row(self, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return row_product(x.contiguous(), self._weight, bias, dtype=dtype)


class _InvariantWeight(TorchWeight):
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        return linear(x, self._weight, bias)

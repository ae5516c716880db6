"""Safetensors files with floats and quantised linear layers, in the form in which ranks keep them.

`packed_layers` reads what is stored. Here numbers become a QuantizedMatrix: scales are rounded to float16. A layer
whose inputs belong to groups in any order (act-order) is quantised again, to INT8: kernels want groups of neighbours.
Scales of 4-bit floats below 2^-23, whose weights are less than 10^-6, become zero: float16 has no smaller numbers.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import torch

from hetero_api.errors import ModelError
from hetero_api.hf_config import read_config
from hetero_api.model_config import CONFIG_FILE
from hetero_api.packed_weights import PackedWeights, Packing, Scheme
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import INT8, WeightFormat
from hetero_worker.checkpoints.conversion import quantize_slice
from hetero_worker.checkpoints.packed_layers import (
    E4M3,
    MARKS,
    LayerSlice,
    StoredNumbers,
    exact_numbers,
    stacked_floats,
)
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.checkpoints.safetensors_store import SafetensorsStore
from hetero_worker.checkpoints.store import TensorSlice

logger = logging.getLogger(__name__)

_STACK_MARK: Final = "_blocks"
_ORDERS: Final = ("g_idx", "weight_g_idx")
_UNIT: Final = {8: 256.0, 4: 0.5}
"""Factors of the scales of floats that `WeightFormat` counts in other units, by bits."""


class PackedStore(SafetensorsStore):
    """Safetensors files with floats and quantised linear layers."""

    def __init__(self, directory: Path, packed: PackedWeights) -> None:
        """Find the files. Raises ModelError."""
        super().__init__(directory)
        self._packed = packed
        self._schemes: dict[str, Scheme | None] = {}
        self._orders: dict[str, torch.Tensor | None] = {}

    def format_of(self, name: str) -> WeightFormat | None:
        """See `WeightStore.format_of`."""
        scheme = self._scheme_of(name)
        if scheme is None:
            return None
        return scheme.weights if self._order_of(name, scheme) is None else INT8

    def stored_as(self, name: str) -> str:
        """See `WeightStore.stored_as`."""
        scheme = self._scheme_of(name)
        return super().stored_as(name) if scheme is None else str(scheme)

    def quantized(self, part: TensorSlice) -> QuantizedMatrix:
        """See `WeightStore.quantized`."""
        scheme = self._quantized_by(part)
        if self._order_of(part.name, scheme) is not None:
            return quantize_slice(self.exact, part, INT8)
        stored = self._numbers(part, scheme)
        begin = stored.columns.begin
        whole = self._matrix(stored, scheme, part)
        return whole.columns(UnitRange(part.column_range.begin - begin, part.column_range.end - begin))

    def exact(self, part: TensorSlice) -> torch.Tensor:
        """See `WeightStore.exact`."""
        scheme = self._scheme_of(part.name)
        if scheme is None:
            return super().exact(part)
        order, group = self._order_of(part.name, scheme), scheme.weights.group or part.full_shape[1]
        if order is not None:
            layer = LayerSlice(self, scheme, part, in_order=False)
            if len(order) != layer.inputs:
                raise layer.error(f"has an order of {len(order)} inputs, config.json says {layer.inputs}")
            return exact_numbers(layer.numbers(), scheme, order[slice(*part.column_range)])
        stored = self._numbers(part, scheme)
        begin = stored.columns.begin
        groups = torch.arange(*stored.columns) // group - begin // group
        wanted = slice(part.column_range.begin - begin, part.column_range.end - begin)
        return exact_numbers(stored, scheme, groups)[:, wanted]

    def _scheme_of(self, name: str) -> Scheme | None:
        """Return how a tensor is quantised; None: it is floats."""
        if name not in self._schemes:
            self._schemes[name] = self._find_scheme(name)
        return self._schemes[name]

    def _find_scheme(self, name: str) -> Scheme | None:
        if self._packed.is_of_experts:
            return self._packed.schemes[0] if self.has(f"{name}{_STACK_MARK}") else None
        stem, _, kind = name.rpartition(".")
        if kind != "weight":
            return None
        return next((each for each in self._packed.of_module(stem) if self._has_marks(each, stem)), None)

    def _has_marks(self, scheme: Scheme, stem: str) -> bool:
        if scheme.packing is Packing.FLOATS:
            return self.has(f"{stem}.weight") and self.kind_of(f"{stem}.weight") == E4M3
        return self.has(f"{stem}.{MARKS[scheme.packing]}")

    def _quantized_by(self, part: TensorSlice) -> Scheme:
        scheme = self._scheme_of(part.name)
        if scheme is None:
            raise RuntimeError(f"{part.name} is stored as floats")
        return scheme

    def _numbers(self, part: TensorSlice, scheme: Scheme) -> StoredNumbers:
        if scheme.packing is Packing.MXFP4:
            return stacked_floats(self, scheme, part)
        return LayerSlice(self, scheme, part).numbers()

    def _matrix(self, stored: StoredNumbers, scheme: Scheme, part: TensorSlice) -> QuantizedMatrix:
        """Round scales to float16. Raises ModelError for those that it cannot hold."""
        weights, minima = scheme.weights, None
        if weights.is_float:
            values, scales = stored.values, (stored.scales * _UNIT[weights.bits]).half().float()
        else:
            middle, is_wide = 1 << weights.bits - 1, weights.bits == 8
            values = (stored.values - middle).to(torch.int8) if is_wide else stored.values.to(torch.uint8)
            scales = stored.scales.half().float()
            if weights.has_minimum:
                minima = (scales * -(stored.zeros - middle if is_wide else stored.zeros)).half().float()
        if not all(torch.isfinite(numbers).all() for numbers in (scales, minima) if numbers is not None):
            tensor = f"{part.name}_scales" if scheme.packing is Packing.MXFP4 else part.name
            raise ModelError(f"{self.directory}: {tensor} has scales that are too large for float16")
        return QuantizedMatrix(weights, values.contiguous(), scales.contiguous(), minima)

    def _order_of(self, name: str, scheme: Scheme) -> torch.Tensor | None:
        """Return the group of each of a layer's inputs, int64; None: groups are of neighbours.

        Raises ModelError for groups that do not exist, and for an order that config.json denies.
        """
        if name not in self._orders:
            self._orders[name] = self._read_order(name.rpartition(".")[0], scheme)
        return self._orders[name]

    def _read_order(self, stem: str, scheme: Scheme) -> torch.Tensor | None:
        found = next((f"{stem}.{kind}" for kind in _ORDERS if self.has(f"{stem}.{kind}")), None)
        if found is None or not scheme.weights.group:
            return None
        order = self.slice(found).to(torch.int64)
        usual = torch.arange(order.numel()) // scheme.weights.group
        if torch.equal(order, usual) or (order == -1).all():  # the second is how compressed-tensors writes none
            return None
        if not scheme.has_order:
            raise ModelError(
                f"{self.directory}: tensor {found} has inputs in an order of their own, and config.json says that they "
                "have none (desc_act, actorder); the two are not of the same model"
            )
        if order.dim() != 1 or order.min() < 0 or order.max() > usual.max():
            raise ModelError(f"{self.directory}: tensor {found} names groups that do not exist; fetch the file again")
        return order


def open_packed_safetensors(directory: Path) -> PackedStore | None:
    """Open a directory whose config.json declares a supported quantisation; None if it declares none.

    Raises ModelError.
    """
    path = directory / CONFIG_FILE
    packed = PackedWeights.of_config(read_config(path), source=str(path)) if path.exists() else None
    if packed is None:
        return None
    logger.info("%s: weights are %s; activations and cache are not quantised", directory, _told(packed))
    return PackedStore(directory, packed)


def _told(packed: PackedWeights) -> str:
    return f"{packed.method} ({', '.join(map(str, packed.schemes))})"

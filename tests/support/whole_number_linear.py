"""What a linear layer with weights of whole numbers gives, by the arithmetic that its kernels are told to have."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix

LARGEST_GROUP = 32
"""Inputs of a row of x that share a scale, at most; fewer where the weight's groups are cut by it."""
FORMATS = [
    WeightFormat(8),
    WeightFormat(8, 16, has_minimum=True),
    WeightFormat(8, 32),
    WeightFormat(8, 128),
    WeightFormat(8, 0, has_minimum=True),
    WeightFormat(4),
    WeightFormat(4, 32),
    WeightFormat(4, 32, has_minimum=True),
    WeightFormat(4, 48, has_minimum=True),
    WeightFormat(4, 128, has_minimum=True),
    WeightFormat(4, 16, is_float=True),
    WeightFormat(4, 32, is_float=True),
]


def random_matrix(weights: WeightFormat, outputs: int, inputs: int, seed: int = 0) -> QuantizedMatrix:
    """With all values that the format has."""
    generator = torch.Generator().manual_seed(seed)
    low, high, dtype = (-128, 128, torch.int8) if weights.bits == 8 else (0, 16, torch.uint8)
    values = torch.randint(low, high, (outputs, inputs), dtype=dtype, generator=generator)
    numbers = outputs, weights.groups(inputs)
    scales = (torch.rand(numbers, generator=generator) / 100 + 0.001).half().float()
    minima = (torch.randn(numbers, generator=generator) / 20).half().float() if weights.has_minimum else None
    return QuantizedMatrix(weights, values, scales, minima)


def as_kernels_see(x: torch.Tensor, weights: WeightFormat) -> torch.Tensor:
    """Rows as whole numbers times the scale of their group: float64."""
    size = math.gcd(LARGEST_GROUP, weights.group) if weights.group else LARGEST_GROUP
    rows, inputs = x.shape
    groups = F.pad(x, (0, -inputs % size)).view(rows, -1, size)
    largest = groups.abs().amax(2, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest
    whole = torch.where(largest > 0, torch.round(groups * inverse), 0)
    return (whole.double() * (largest / 127).double()).view(rows, -1)[:, :inputs]


def exact_linear(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """float64 [rows, out]: what kernels give, but for the rounding of their float32 sums."""
    weight = QuantizedMatrix(matrix.format, matrix.values, matrix.scales, matrix.minima).dequantized().double()
    result = as_kernels_see(x, matrix.format) @ weight.T
    return result if bias is None else result + bias.double()

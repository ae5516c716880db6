"""Products with quantised weights are those of the numbers that they stand for, in float64, at odd shapes too."""

from __future__ import annotations

from typing import Final

import pytest
import torch

from hetero_api.weight_format import FP8, INT8, WeightFormat, int4
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.kernels.quantized_matmul import QuantizedLayout, QuantizedTile, quantized_linear
from hetero_worker.layers.linear_kernels import PackedWeight
from hetero_worker.layers.triton.linear import DeviceKernel, TritonKernel
from hetero_worker.layers.triton.weights import DeviceWeight, packed_on
from tests.support.seeded import seeded

pytestmark = pytest.mark.unit

DEVICE: Final = torch.get_default_device()
FORMATS: Final = {
    "int8": INT8,
    "int8 a row": WeightFormat(8),
    "int8 with minima": WeightFormat(8, 32, has_minimum=True),
    "int4": int4(),
    "int4 in small groups": int4(16),
    "int4 in odd groups": int4(48),
    "awq": int4(128),
    "gptq": WeightFormat(4, 64),
    "gptq a row": WeightFormat(4),
    "fp8": FP8,
    "fp8 blocks": WeightFormat(8, 128, is_float=True),
    "mxfp4": WeightFormat(4, 32, is_float=True),
    "nvfp4": WeightFormat(4, 16, is_float=True),
}
TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of the largest number; the interpreter cuts off what a GPU rounds."""
each_format = pytest.mark.parametrize("weights", FORMATS.values(), ids=FORMATS)


def random_matrix(outputs: int, inputs: int, weights: WeightFormat, *, seed: int = 0) -> QuantizedMatrix:
    """Of all values that the format has, with scales and minima of float16."""
    generator = seeded(seed)
    kind, least, end = (torch.int8, -128, 128) if weights.bits == 8 else (torch.uint8, 0, 16)
    values = torch.randint(least, end, (outputs, inputs), dtype=kind, generator=generator)
    if weights.is_wide:
        values[(values & 0x7F) == 0x7F] = 0  # no numbers
    groups = outputs, weights.groups(inputs)
    unit = 1.0 if weights.is_wide else 1 / 128 if weights.bits == 8 else 1 / 16
    scales = (torch.rand(groups, generator=generator) * unit).half().float()
    minima = torch.randn(groups, generator=generator).half().float() if weights.has_minimum else None
    return QuantizedMatrix(weights, values, scales, minima)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(seed)).to(dtype)


def packed(matrix: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> DeviceWeight:
    weight = DeviceKernel(DEVICE, dtype).pack_quantized(matrix)
    assert isinstance(weight, DeviceWeight)
    return weight


def check(weight: PackedWeight, matrix: QuantizedMatrix, rows: int, dtype: torch.dtype) -> None:
    """Of the product with a bias, and of logits, which are not rounded to the type."""
    outputs, inputs = matrix.shape
    x, bias = randn(rows, inputs, dtype=dtype), randn(outputs, dtype=dtype, seed=2)
    exact = x.double() @ matrix.dequantized().double().T
    bound = TOLERANCE[dtype] * max(1.0, exact.abs().max().item() if exact.numel() else 0.0)
    result, logits = weight(x, bias), weight.logits(x)
    assert (result.dtype, logits.dtype) == (dtype, torch.float32)
    assert result.shape == (rows, outputs)
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), exact + bias.double(), rtol=0, atol=bound)
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=2e-5 * max(1.0, bound / TOLERANCE[dtype]))


@each_format
@pytest.mark.parametrize("rows", [1, 17])
def test_products_are_those_of_the_numbers(weights: WeightFormat, rows: int) -> None:
    """Columns and groups have tails."""
    matrix = random_matrix(70, 151, weights)
    dtype = torch.float32 if rows == 1 else torch.bfloat16
    check(packed(matrix, dtype), matrix, rows, dtype)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(0, 5, 32), (3, 0, 32), (3, 5, 0), (3, 1, 1), (16, 65, 64), (64, 33, 96), (65, 129, 64)],
)
def test_shapes_of_all_kinds(rows: int, outputs: int, inputs: int) -> None:
    for weights, dtype in ((int4(), torch.bfloat16), (INT8, torch.float16), (FORMATS["mxfp4"], torch.bfloat16)):
        matrix = random_matrix(outputs, inputs, weights)
        check(packed(matrix, dtype), matrix, rows, dtype)


@pytest.mark.parametrize("weights", [int4(), WeightFormat(8)], ids=str)
def test_programs_that_share_the_inner_dimension_give_the_same(weights: WeightFormat) -> None:
    matrix = random_matrix(40, 870, weights)
    layout = QuantizedLayout.of(matrix.shape, weights)
    assert QuantizedTile.of(16, layout, 2, batch_invariant=False).parts > 2
    check(packed(matrix, torch.bfloat16), matrix, 3, torch.bfloat16)


@each_format
def test_a_matrix_takes_no_more_than_its_format_says(weights: WeightFormat) -> None:
    for outputs, inputs in ((70, 215), (7, 16), (3, 1), (64, 256)):
        kept = sum(tensor.nbytes for tensor in packed(random_matrix(outputs, inputs, weights)).tensors)
        assert kept <= weights.matrix_bytes(outputs, inputs)


@each_format
def test_rows_are_looked_up(weights: WeightFormat) -> None:
    matrix = random_matrix(30, 300, weights)
    ids = torch.tensor([107, 100, 129, 99, 130, 0])
    found = packed(matrix).embed(ids, first=100, scale=3.0)
    assert torch.equal(found[:3], matrix.dequantized()[[7, 0, 29]] * 3.0)
    assert not found[3:].any()
    assert packed(matrix).embed(ids[:0], first=100).shape == (0, 300)


@pytest.mark.parametrize("weights", [int4(), FP8], ids=str)
def test_a_row_has_the_same_bits_in_any_batch_in_batch_invariant_mode(weights: WeightFormat) -> None:
    kernel = TritonKernel(DEVICE, torch.bfloat16)
    weight = kernel.pack_quantized(random_matrix(37, 200, weights))
    x = randn(70, 200, dtype=torch.bfloat16)
    whole = weight(x, None)
    for rows in (1, 16, 17, 65):
        assert torch.equal(weight(x[:rows], None), whole[:rows])
    assert torch.equal(weight(x.flip(0), None), whole.flip(0))


def test_inputs_apart_from_each_other_and_at_odd_addresses_are_taken_as_they_are() -> None:
    matrix, wide = random_matrix(6, 32, int4()), randn(3, 80)
    weight = packed_on(DEVICE, matrix)
    for x in (wide[:, 3:35], wide[:, ::2][:, :32], randn(97)[1:].view(3, 32)):
        before = x.clone()
        assert torch.equal(quantized_linear(x, weight, None), quantized_linear(before, weight, None))
        assert torch.equal(x, before)


def test_formats_without_a_kernel_are_refused_by_name() -> None:
    kernel = DeviceKernel(DEVICE, torch.float32)
    for weights in (WeightFormat(4, 24), WeightFormat(4, 32, has_minimum=True, is_float=True)):
        assert not kernel.takes(weights)
    with pytest.raises(ValueError, match="groups of a multiple of 16 inputs, not 4 bits in groups of 24"):
        kernel.pack_quantized(random_matrix(2, 48, WeightFormat(4, 24)))


def test_tiles_follow_from_rows_and_fill_the_device() -> None:
    layout = QuantizedLayout.of((4096, 4096), int4(128))

    def tile_of(rows: int, element_bytes: int = 2, *, batch_invariant: bool = False) -> QuantizedTile:
        return QuantizedTile.of(rows, layout, element_bytes, batch_invariant=batch_invariant)

    assert [tile_of(rows).rows for rows in (1, 16, 17, 64, 65)] == [16, 16, 64, 64, 64]
    assert [tile_of(rows).columns for rows in (16, 64, 65)] == [64, 64, 128]
    assert [tile_of(rows).parts for rows in (1, 16, 17, 65)] == [8, 8, 1, 1]
    assert len({tile_of(rows, batch_invariant=True) for rows in (1, 16, 17, 65)}) == 1
    assert tile_of(500, 4).rows == 64

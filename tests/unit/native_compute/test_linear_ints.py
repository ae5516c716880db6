"""The native product with weights that are whole numbers: by the exact arithmetic, and with bits that are a row's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.native.op_queue import Arena, OpQueue
from tests.support.native_compute import TEAMS, op_queue_of, randn
from tests.support.whole_number_linear import FORMATS, exact_linear, random_matrix

pytestmark = pytest.mark.unit

SHAPES = [(1, 1), (15, 30), (17, 64), (130, 576), (40, 1000)]
ROWS = (1, 2, 3, 5, 7, 16, 17, 64, 130)
each_format = pytest.mark.parametrize("weights", FORMATS, ids=str)


@each_format
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.usefixtures("tile_isa")
def test_products_are_exact_but_for_the_rounding_of_sums(
    op_queues: dict[int, OpQueue], weights: WeightFormat, out_features: int, in_features: int
) -> None:
    """Each by another team, so that whose panels and rows are whose is tried."""
    matrix, bias = random_matrix(weights, out_features, in_features), randn(out_features, seed=1)
    packed = {size: NativeLinear(op_queue).pack_quantized(matrix) for size, op_queue in op_queues.items()}
    for number, rows in enumerate(ROWS):
        x = randn(rows, in_features + 3, seed=rows)[:, :in_features]
        expected = exact_linear(x, matrix, bias if rows % 2 else None)
        y = packed[TEAMS[number % len(TEAMS)]](x, bias if rows % 2 else None)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@each_format
@pytest.mark.usefixtures("tile_isa")
def test_a_rows_bits_are_its_own(op_queues: dict[int, OpQueue], weights: WeightFormat) -> None:
    """Whatever the number of rows, its place among them and the number of threads."""
    matrix, bias, x = random_matrix(weights, 100, 200), randn(100, seed=1), randn(130, 200)
    alone = NativeLinear(op_queues[1]).pack_quantized(matrix)
    expected = torch.cat([alone(row[None], bias) for row in x])
    for op_queue in op_queues.values():
        packed = NativeLinear(op_queue).pack_quantized(matrix)
        for rows in (*range(1, 41), 64, 130):
            assert torch.equal(packed(x[:rows], bias), expected[:rows]), rows
            assert torch.equal(packed(x[-rows:], bias), expected[-rows:]), rows


@each_format
@pytest.mark.usefixtures("tile_isa")
def test_bfloat16_is_widened_and_results_are_rounded_once(op_queues: dict[int, OpQueue], weights: WeightFormat) -> None:
    """To the last bit what float32 inputs give."""
    matrix, bias = random_matrix(weights, 100, 200), randn(100, seed=1).bfloat16()
    for number, rows in enumerate(ROWS):
        op_queue = op_queues[TEAMS[number % len(TEAMS)]]
        wide = NativeLinear(op_queue).pack_quantized(matrix)
        narrow = NativeLinear(op_queue, torch.bfloat16).pack_quantized(matrix)
        x = randn(rows, 200, seed=rows).bfloat16()
        assert torch.equal(narrow(x, bias), wide(x.float(), bias.float()).bfloat16())
        assert torch.equal(narrow.logits(x), wide(x.float(), None))


@pytest.mark.parametrize("weight", [-128, -127, 127])
@pytest.mark.parametrize("x", [-1.0, 1.0])
@pytest.mark.usefixtures("tile_isa")
def test_no_sum_is_too_large(weight: int, x: float) -> None:
    """All products of a row have the largest size: partial sums of 16 bits would overflow."""
    inputs = 8192
    values = torch.full((16, inputs), weight, dtype=torch.int8)
    packed = NativeLinear(op_queue_of()).pack_quantized(QuantizedMatrix(WeightFormat(8), values, torch.ones(16, 1)))
    y = packed(torch.full((3, inputs), x), None)
    torch.testing.assert_close(y, torch.full((3, 16), weight * x * inputs), rtol=1e-5, atol=0)


@pytest.mark.parametrize("weights", [WeightFormat(8), WeightFormat(4, 32, has_minimum=True)], ids=str)
@pytest.mark.usefixtures("tile_isa")
def test_what_is_no_number_stays_none(weights: WeightFormat) -> None:
    matrix, x = random_matrix(weights, 20, 100), randn(4, 100)
    x[1, 7], x[2, 99], x[3] = torch.nan, -torch.inf, 0.0
    y = NativeLinear(op_queue_of()).pack_quantized(matrix)(x, None)
    assert y[0].isfinite().all()
    assert y[1:3].isnan().all()
    assert torch.equal(y[3], torch.zeros(20))


@pytest.mark.parametrize("weights", FORMATS, ids=str)
def test_the_error_of_rounding_rows_is_small(weights: WeightFormat) -> None:
    """Against the product of the same weights with rows as they are."""
    matrix, x = random_matrix(weights, 64, 1024), randn(32, 1024)
    y = NativeLinear(op_queue_of()).pack_quantized(matrix)(x, None)
    expected = F.linear(x.double(), matrix.dequantized().double())
    assert float((y - expected).norm() / expected.norm()) < 0.01


def test_columns_of_a_larger_matrix_are_read_where_they_are() -> None:
    kernel, weights = NativeLinear(op_queue_of()), WeightFormat(4, 32, has_minimum=True)
    whole, x = random_matrix(weights, 30, 256), randn(3, 64)
    assert whole.minima is not None
    part = QuantizedMatrix(weights, whole.values[:, 64:128], whole.scales[:, 2:4], whole.minima[:, 2:4])
    copied = QuantizedMatrix(weights, part.values.clone(), part.scales.clone(), whole.minima[:, 2:4].clone())
    assert torch.equal(kernel.pack_quantized(part)(x, None), kernel.pack_quantized(copied)(x, None))


def test_a_recorded_product_is_made_again() -> None:
    op_queue, x = op_queue_of(), randn(4, 96)
    packed = NativeLinear(op_queue).pack_quantized(random_matrix(WeightFormat(8), 50, 96))
    with op_queue.computing_in(Arena()), op_queue.recording() as recorded:
        y = packed(x, None)
    x.copy_(randn(4, 96, seed=1))
    op_queue.replay(recorded)
    assert torch.equal(y, packed(x, None))


def test_groups_that_have_no_whole_vectors_are_refused() -> None:
    kernel, weights = NativeLinear(op_queue_of()), WeightFormat(8, 24)
    assert not kernel.takes(weights)
    assert all(map(kernel.takes, FORMATS))
    with pytest.raises(ValueError, match="groups of 24"):
        kernel.pack_quantized(random_matrix(weights, 16, 48))


@each_format
def test_memory_is_what_the_format_says(weights: WeightFormat) -> None:
    """Of shapes that panels and groups divide."""
    packed = NativeLinear(op_queue_of()).pack_quantized(random_matrix(weights, 160, 384))
    assert packed.num_bytes == weights.matrix_bytes(160, 384)

"""The native product with 8-bit floats: by the definition, at all shapes, and with bits that are a row's."""

from __future__ import annotations

import pytest
import torch

from hetero_api.weight_format import FP8, WeightFormat
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.native.op_queue import OpQueue
from tests.support.native_compute import TEAMS, op_queue_of, randn

pytestmark = pytest.mark.unit

FORMATS = (FP8, *(WeightFormat(8, group, is_float=True) for group in (16, 48, 128)))
SHAPES = [(1, 1), (15, 30), (16, 64), (130, 576), (80, 1000), (33, 257)]
ROWS = (1, 2, 3, 5, 14, 17, 29, 64, 130)
each_format = pytest.mark.parametrize("weights", FORMATS, ids=str)


def random_floats(weights: WeightFormat, outputs: int, inputs: int) -> QuantizedMatrix:
    """With all numbers that there are, subnormal ones and both zeros among them."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 254, (outputs, inputs), generator=generator)
    bits += (bits >= 127).long()  # 127 and 255 are no numbers
    scales = torch.rand((outputs, weights.groups(inputs)), generator=generator) / 100 + 0.001
    return QuantizedMatrix(weights, bits.to(torch.uint8).view(torch.int8), scales.half().float())


@each_format
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.usefixtures("isa")
def test_products_are_right(
    op_queues: dict[int, OpQueue], weights: WeightFormat, out_features: int, in_features: int
) -> None:
    """Each by another team, so that whose panels and rows are whose is tried."""
    matrix, bias = random_floats(weights, out_features, in_features), randn(out_features, seed=1)
    packed = {size: NativeLinear(op_queue).pack_quantized(matrix) for size, op_queue in op_queues.items()}
    for number, rows in enumerate(ROWS):
        x = randn(rows, in_features + 3, seed=rows)[:, :in_features]
        expected = x.double() @ matrix.dequantized().double().T + bias
        found = packed[TEAMS[number % len(TEAMS)]](x, bias)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7 * in_features)


@each_format
@pytest.mark.usefixtures("isa")
def test_a_rows_bits_are_its_own(op_queues: dict[int, OpQueue], weights: WeightFormat) -> None:
    """Whatever the number of rows, its place among them and the number of threads."""
    matrix, bias, x = random_floats(weights, 50, 600), randn(50, seed=1), randn(130, 600)
    alone = NativeLinear(op_queues[1]).pack_quantized(matrix)
    expected = torch.cat([alone(row[None], bias) for row in x])
    for op_queue in op_queues.values():
        packed = NativeLinear(op_queue).pack_quantized(matrix)
        for rows in (*range(1, 41, 3), 64, 130):
            assert torch.equal(packed(x[:rows], bias), expected[:rows]), rows
            assert torch.equal(packed(x[-rows:], bias), expected[-rows:]), rows


@each_format
@pytest.mark.usefixtures("isa")
def test_bfloat16_is_widened_and_results_are_rounded_once(op_queues: dict[int, OpQueue], weights: WeightFormat) -> None:
    matrix, bias, x = random_floats(weights, 100, 600), randn(100, seed=1).bfloat16(), randn(29, 600).bfloat16()
    wide = NativeLinear(op_queues[2]).pack_quantized(matrix)
    narrow = NativeLinear(op_queues[2], torch.bfloat16).pack_quantized(matrix)
    for rows in (1, 5, 29):
        assert torch.equal(narrow(x[:rows], bias), wide(x[:rows].float(), bias.float()).bfloat16())


@each_format
@pytest.mark.usefixtures("isa")
def test_rows_are_looked_up_and_memory_is_what_the_format_says(weights: WeightFormat) -> None:
    matrix = random_floats(weights, 160, 384)
    packed = NativeLinear(op_queue_of()).pack_quantized(matrix)
    torch.testing.assert_close(packed.embed(torch.arange(160)), matrix.dequantized(), rtol=1e-6, atol=0)
    assert packed.num_bytes == weights.matrix_bytes(160, 384)


def test_floats_have_no_minima() -> None:
    assert not NativeLinear(op_queue_of()).takes(WeightFormat(8, 32, has_minimum=True, is_float=True))

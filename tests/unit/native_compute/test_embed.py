"""Rows of packed tables are the rows that were packed, to the last bit, and with that packing is right."""

from __future__ import annotations

import pytest
import torch

from hetero_api.weight_format import WeightFormat
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.native.op_queue import Arena, OpQueue
from tests.support.native_compute import TEAMS, op_queue_of, randn
from tests.support.whole_number_linear import FORMATS, random_matrix

pytestmark = pytest.mark.unit

SHAPES = [(1, 1), (15, 30), (17, 64), (40, 7), (130, 576), (21, 1000)]
each_shape = pytest.mark.parametrize(("rows", "width"), SHAPES)


@pytest.fixture(params=TEAMS)
def op_queue(request: pytest.FixtureRequest, isa: str) -> OpQueue:
    return op_queue_of(request.param)


@each_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_floats(op_queue: OpQueue, dtype: torch.dtype, rows: int, width: int) -> None:
    table = randn(rows, width).to(dtype)
    found = NativeLinear(op_queue).pack(table).embed(torch.arange(rows))
    assert found.dtype == torch.float32
    assert torch.equal(found, table.float())


@each_shape
@pytest.mark.parametrize("weights", FORMATS, ids=str)
def test_rows_of_whole_numbers(op_queue: OpQueue, weights: WeightFormat, rows: int, width: int) -> None:
    matrix = random_matrix(weights, rows, width)
    numbers = torch.arange(rows).flip(0)
    found = NativeLinear(op_queue).pack_quantized(matrix).embed(numbers)
    # One rounding for product and addition, or two.
    torch.testing.assert_close(found, matrix.dequantized()[numbers], rtol=1e-6, atol=1e-7)


def test_all_halves_are_widened_rightly(op_queue: OpQueue) -> None:
    table = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(64, 1024)
    found = NativeLinear(op_queue).pack(table).embed(torch.arange(64))
    expected = table.float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5))


def test_scales_are_rounded_as_torch_rounds(op_queue: OpQueue) -> None:
    """To the nearest half, subnormal ones and what is too large among them."""
    scales = torch.logspace(-9, 5, 4000, dtype=torch.float64).float()
    scales = torch.cat([scales, -scales, torch.tensor([0.0, 65504.0, 65519.0, 65520.0, 2.0**-25, 1.5 * 2.0**-24])])
    matrix = random_matrix(WeightFormat(8), len(scales), 1)
    matrix.values.fill_(1)
    matrix.scales.copy_(scales[:, None])
    found = NativeLinear(op_queue).pack_quantized(matrix).embed(torch.arange(len(scales)))
    assert torch.equal(found[:, 0], scales.half().float())


def test_other_ranks_rows_are_zeros_and_ours_are_scaled(op_queue: OpQueue) -> None:
    table, ids = randn(20, 70), torch.tensor([100, 99, 119, 120, 0, 105, 105, -1])
    found = NativeLinear(op_queue).pack(table).embed(ids, first=100, scale=2.0)
    is_ours = (ids >= 100) & (ids < 120)
    assert torch.equal(found[is_ours], table[ids[is_ours] - 100] * 2)
    assert torch.equal(found[~is_ours], torch.zeros(4, 70))


def test_no_rows(op_queue: OpQueue) -> None:
    assert NativeLinear(op_queue).pack(randn(20, 70)).embed(torch.empty(0, dtype=torch.int64)).shape == (0, 70)


@each_shape
def test_rows_of_the_type_that_is_computed_in(op_queue: OpQueue, rows: int, width: int) -> None:
    ids, kernel = torch.tensor([0, rows - 1, rows, -1]), NativeLinear(op_queue, torch.bfloat16)
    for table in (randn(rows, width), randn(rows, width).bfloat16(), randn(rows, width).half()):
        found = kernel.pack(table).embed(ids, scale=3.0)
        assert torch.equal(found[:2], (table[ids[:2]].float() * 3).bfloat16())
        assert not found[2:].any()


def test_a_recorded_look_up_is_made_again() -> None:
    op_queue, ids = op_queue_of(), torch.tensor([1, 2, 3])
    table = randn(20, 70)
    packed = NativeLinear(op_queue).pack(table)
    with op_queue.computing_in(Arena()), op_queue.recording() as recorded:
        found = packed.embed(ids)
    ids.copy_(torch.tensor([7, 0, 19]))
    op_queue.replay(recorded)
    assert torch.equal(found, table[ids])

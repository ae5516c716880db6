"""The native product with weights that are floats: by the definition, at all shapes, and with bits that are a row's."""

from __future__ import annotations

import pytest
import torch

from hetero_worker.layers.linear_kernels import kept_dtype
from hetero_worker.layers.native_linear import NativeLinear, NativeWeight
from hetero_worker.native.compute_library import BF16, F32, linear_op
from hetero_worker.native.op_queue import Arena, OpQueue
from tests.support.native_compute import TEAMS, op_queue_of, randn

pytestmark = pytest.mark.unit

TYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 1), (15, 30), (16, 64), (17, 16), (130, 576), (80, 1000), (33, 257)]
ROWS = (1, 2, 3, 5, 14, 16, 17, 29, 64, 230)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.usefixtures("tile_isa")
def test_products_are_right(
    op_queues: dict[int, OpQueue], dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    """Each by another team, so that whose panels and rows are whose is tried."""
    weight, bias = randn(out_features, in_features).to(dtype), randn(out_features, seed=1)
    packed = {size: NativeLinear(op_queue).pack(weight) for size, op_queue in op_queues.items()}
    for number, rows in enumerate(ROWS):
        x = randn(rows, in_features + 3, seed=rows)[:, :in_features]
        expected = x.double() @ weight.double().T
        run = packed[TEAMS[number % len(TEAMS)]]
        torch.testing.assert_close(run(x, None).double(), expected, rtol=1e-5, atol=1e-6 * in_features)
        expected += bias
        torch.testing.assert_close(run(x, bias).double(), expected, rtol=1e-5, atol=1e-6 * in_features)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(50, 600), (200, 33)])
@pytest.mark.usefixtures("tile_isa")
def test_a_rows_bits_are_its_own(
    op_queues: dict[int, OpQueue], dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    """Whatever the number of rows, its place among them and the number of threads."""
    weight, bias, x = randn(out_features, in_features).to(dtype), randn(out_features, seed=1), randn(130, in_features)
    alone = NativeLinear(op_queues[1]).pack(weight)
    expected = torch.cat([alone(row[None], bias) for row in x])
    for op_queue in op_queues.values():
        packed = NativeLinear(op_queue).pack(weight)
        for rows in (*range(1, 41), 64, 130):
            assert torch.equal(packed(x[:rows], bias), expected[:rows]), rows
            assert torch.equal(packed(x[-rows:], bias), expected[-rows:]), rows


@pytest.mark.parametrize("rows", [0, 1, 3, 20])
def test_without_inputs_or_rows_there_is_the_bias_or_nothing(rows: int) -> None:
    bias = randn(40)
    packed = NativeLinear(op_queue_of()).pack(torch.empty(40, 0))
    assert torch.equal(packed(torch.empty(rows, 0), bias), bias.expand(rows, 40))
    assert NativeLinear(op_queue_of()).pack(randn(40, 8))(torch.empty(0, 8), bias).shape == (0, 40)


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.usefixtures("tile_isa")
def test_nothing_is_written_beside_the_result(rows: int) -> None:
    op_queue, (out_features, in_features) = op_queue_of(), (37, 50)
    packed = NativeLinear(op_queue).pack(randn(out_features, in_features))
    x, wide = randn(rows, in_features), torch.full((rows, 64), torch.nan)
    op = linear_op(rows, packed.address, F32, F32, x.data_ptr(), in_features)
    op.y, op.y_stride = wide.data_ptr(), 64
    op.scratch = op_queue.scratch(op)
    op_queue.submit(op)
    assert torch.equal(wide[:, :out_features], packed(x, None))
    assert wide[:, out_features:].isnan().all()


def test_what_is_no_number_stays_none() -> None:
    packed = NativeLinear(op_queue_of()).pack(torch.ones(20, 40))
    x = torch.ones(3, 40)
    x[1, 7], x[2, 9] = torch.nan, torch.inf
    y = packed(x, None)
    assert torch.equal(y[0], torch.full((20,), 40.0))
    assert y[1].isnan().all()
    assert torch.equal(y[2], torch.full((20,), torch.inf))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.usefixtures("tile_isa")
def test_bfloat16_is_widened_and_results_are_rounded_once(
    op_queues: dict[int, OpQueue], stored: torch.dtype, out_features: int, in_features: int
) -> None:
    """To the last bit what float32 inputs give, whatever the number of rows: a row's bits are its own here, too."""
    weight, bias = randn(out_features, in_features).to(stored), randn(out_features, seed=1).bfloat16()
    for number, rows in enumerate(ROWS):
        op_queue = op_queues[TEAMS[number % len(TEAMS)]]
        wide, narrow = NativeLinear(op_queue).pack(weight), NativeLinear(op_queue, torch.bfloat16).pack(weight)
        x = randn(rows, in_features + 3, seed=rows).bfloat16()[:, :in_features]
        assert torch.equal(narrow(x, bias), wide(x.float(), bias.float()).bfloat16())
        assert torch.equal(narrow.logits(x), wide(x.float(), None))


def test_nothing_is_written_beside_a_result_of_bfloat16() -> None:
    op_queue, (out_features, in_features) = op_queue_of(), (37, 600)
    packed = NativeLinear(op_queue, torch.bfloat16).pack(randn(out_features, in_features))
    for rows in (1, 5, 33):
        x, wide = randn(rows, in_features).bfloat16(), torch.full((rows, 64), torch.nan, dtype=torch.bfloat16)
        op = linear_op(rows, packed.address, BF16, BF16, x.data_ptr(), in_features)
        op.y, op.y_stride = wide.data_ptr(), 64
        op.scratch = op_queue.scratch(op)
        op_queue.submit(op)
        assert torch.equal(wide[:, :out_features], packed(x, None))
        assert wide[:, out_features:].isnan().all()


def test_inputs_of_another_type_are_refused() -> None:
    packed = NativeLinear(op_queue_of(), torch.bfloat16).pack(randn(24, 48))
    with pytest.raises(ValueError, match=r"multiplied with torch\.bfloat16, not with torch\.float32"):
        packed(randn(5, 48), None)
    with pytest.raises(ValueError, match=r"multiplied with torch\.bfloat16"):
        packed(randn(5, 48).bfloat16(), randn(24))


def test_columns_and_rows_of_a_larger_tensor_are_read_where_they_are() -> None:
    kernel, weight, x = NativeLinear(op_queue_of()), randn(30, 90), randn(40, 90, seed=1)
    parts = weight[3:20, 10:50], x[::2, 10:50]
    expected = kernel.pack(parts[0].contiguous())(parts[1].contiguous(), None)
    assert torch.equal(kernel.pack(parts[0])(parts[1], None), expected)
    assert torch.equal(kernel.pack(parts[0].T.contiguous().T)(parts[1].T.contiguous().T, None), expected)


def test_a_recorded_product_is_made_again() -> None:
    op_queue, x = op_queue_of(), randn(4, 70)
    packed, bias = NativeLinear(op_queue).pack(randn(50, 70)), randn(50)
    with op_queue.computing_in(Arena()), op_queue.recording() as recorded:
        y = packed(x, bias)
    for seed in (1, 2):
        x.copy_(randn(4, 70, seed=seed))
        op_queue.replay(recorded)
        assert torch.equal(y, packed(x, bias))


def test_what_weights_are_kept_in() -> None:
    kernel = NativeLinear(op_queue_of())
    assert [kept_dtype(stored, torch.float32, kernel) for stored in TYPES] == list(TYPES)
    assert kept_dtype(torch.float64, torch.float32, kernel) == torch.float32
    assert kept_dtype(torch.float16, torch.bfloat16, kernel) == torch.bfloat16
    assert kept_dtype(torch.float32, torch.bfloat16, kernel) == torch.bfloat16
    assert kernel.embeds


def test_memory_is_that_of_the_weights() -> None:
    for dtype in TYPES:
        packed: NativeWeight = NativeLinear(op_queue_of()).pack(torch.empty(160, 33, dtype=dtype))
        stored = 64 if dtype == torch.bfloat16 else 33  # tiles take 32 inputs at a time
        assert packed.num_bytes == 160 * stored * dtype.itemsize
        assert packed.shape == (160, 33)

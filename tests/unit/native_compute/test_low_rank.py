"""Native low-rank products: each row with its own adapter's factors, in any batch, type, team and instruction set."""

from __future__ import annotations

import pytest
import torch

from hetero_worker.adapters.low_rank import MAX_ADAPTERS, AdapterRows
from hetero_worker.adapters.native_low_rank import NativeFactors, NativeLowRank
from hetero_worker.native.op_queue import Arena, OpQueue
from tests.support.low_rank import expected, factors_of
from tests.support.native_compute import randn

pytestmark = pytest.mark.unit

HEIGHTS = (70, 1, 129)
"""Output rows of the parts."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 48, 131])
def test_rows_get_their_own_adapter_s_product(
    isa: str, op_queues: dict[int, OpQueue], dtype: torch.dtype, width: int
) -> None:
    """Of several types of factors, each with more rows than are computed together, and some left."""
    held = {
        1: factors_of(HEIGHTS, width, (3, None, 8), 1),
        9: factors_of(HEIGHTS, width, (256, 1, None), 2, torch.bfloat16),
        MAX_ADAPTERS: factors_of(HEIGHTS, width, (16, 16, 17), 3, torch.float16),
    }
    numbers = torch.tensor(([0, 1, 9, MAX_ADAPTERS, 1, 0, 9] * 20)[:130])
    x, y = randn(130, width, dtype=dtype), randn(130, sum(HEIGHTS), seed=1, dtype=dtype)
    outcomes = []
    for op_queue in op_queues.values():
        rows = AdapterRows()
        low_rank = NativeLowRank(op_queue, HEIGHTS, rows)
        for number, factors in held.items():
            low_rank.hold(number, factors, dtype)
        got = y.clone()
        low_rank.add(x, got)
        assert torch.equal(got, y), "no row has an adapter"
        rows.begin(numbers)
        low_rank.add(x, got)
        outcomes.append(got)
        alone = y[100:101].clone()
        rows.begin(numbers[100:101])
        low_rank.add(x[100:101], alone)
        assert torch.equal(alone, got[100:101]), "a row's bits do not depend on the others"
    assert all(torch.equal(each, outcomes[0]) for each in outcomes), "nor on the team"
    assert torch.equal(outcomes[0][numbers == 0], y[numbers == 0])
    for number, factors in held.items():
        own = numbers == number
        wanted = expected(HEIGHTS, x[own], y[own], factors)
        close = 1e-5 if dtype == torch.float32 else 2**-7
        assert ((outcomes[0][own].double() - wanted).abs() <= close * wanted.abs().clamp(min=50.0)).all()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_factors_are_kept_in_16_bits_where_that_loses_nothing(stored: torch.dtype) -> None:
    factors = factors_of(HEIGHTS, 16, (4, None, 8), 0, stored)
    kept = NativeFactors(factors, torch.float32).kept
    assert {each.dtype for each in kept} == {stored}
    wanted = [factor for each in factors if each is not None for factor in (each.down, each.up.T)]
    assert all(torch.equal(own.float(), each) for own, each in zip(kept, wanted, strict=True))


def test_a_recording_goes_on_with_the_adapters_that_are_held_when_it_is_replayed(op_queues: dict[int, OpQueue]) -> None:
    op_queue, rows, numbers = op_queues[2], AdapterRows(), torch.tensor([1, 0])
    low_rank, x = NativeLowRank(op_queue, HEIGHTS, rows), randn(2, 16)
    rows.begin(numbers)
    with op_queue.computing_in(Arena()), op_queue.recording() as recorded:
        y = op_queue.empty(2, sum(HEIGHTS))
        y.zero_()
        low_rank.add(x, y)
    assert not y.any(), "no adapter is held"
    factors = factors_of(HEIGHTS, 16, (4, 4, 4), 0)
    low_rank.hold(2, factors, torch.float32)
    numbers.copy_(torch.tensor([0, 2]))
    op_queue.replay(recorded)
    torch.testing.assert_close(
        y[1:].double(), expected(HEIGHTS, x[1:], torch.zeros(1, sum(HEIGHTS)), factors), rtol=1e-5, atol=1e-4
    )
    assert not y[0].any()
    low_rank.drop(2)
    y.zero_()
    op_queue.replay(recorded)
    assert not y.any()

"""Rows that a leader lends to its helpers: how they are cut, and what becomes of the sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hetero_worker.distributed.exchange import sum_in_order
from hetero_worker.distributed.routes import HelperLinks, Link
from hetero_worker.models.lending import AHEAD, SLICE_ROWS, Lending, row_slices
from tests.support.thread_exchange import run_ranks, thread_exchanges

pytestmark = pytest.mark.unit

LEADER = 1
LINKS = HelperLinks(Link(1, LEADER, (0, 2)), (Link(2, 0, (LEADER,)), Link(3, 2, (LEADER,))))
"""A helper on either side of its leader."""


@pytest.mark.parametrize("num_rows", [0, 1, 2, 127, 128, 129, 1000])
@pytest.mark.parametrize(("row_bytes", "link_bytes"), [(4, 1 << 20), (100, 1000), (100, 201), (100, 199), (100, 7)])
def test_slices_cover_all_rows_in_order_and_fit_in_the_link(num_rows: int, row_bytes: int, link_bytes: int) -> None:
    slices = row_slices(num_rows, row_bytes=row_bytes, link_bytes=link_bytes)

    assert [row for begin, end in slices.bounds for row in range(begin, end)] == list(range(num_rows))
    sizes = [end - begin for begin, end in slices.bounds]
    assert all(1 <= size <= SLICE_ROWS for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    if slices.ahead > 1:
        assert slices.ahead == AHEAD
        assert all(size * row_bytes <= link_bytes // AHEAD for size in sizes)
    else:
        assert set(sizes) <= {1}


@pytest.mark.parametrize("link_bytes", [1 << 20, 7], ids=["long link", "short link"])
@pytest.mark.parametrize(
    ("num_rows", "helpers", "sizes"),
    [
        (0, 1, []),
        (100, 8, [100]),
        (1000, 1, [1000]),
        (1000, 2, [1000]),
        (1000, 3, [500, 500]),
        (1000, 8, [250, 250, 250, 250]),
        (1000, 64, [125] * 8),
    ],
)
def test_rows_of_experts_go_in_a_slice_for_every_two_helpers(
    num_rows: int, helpers: int, sizes: list[int], link_bytes: int
) -> None:
    slices = row_slices(num_rows, row_bytes=4, link_bytes=link_bytes, expert_helpers=helpers)

    assert [end - begin for begin, end in slices.bounds] == sizes
    assert slices.ahead == (AHEAD if link_bytes > 7 or not sizes else 1)


def test_a_decode_step_is_one_slice() -> None:
    assert row_slices(64, row_bytes=16384, link_bytes=4 << 20).bounds == ((0, 64),)


@pytest.mark.parametrize("at_once", [False, True], ids=["slice by slice", "at once"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("owns", [True, False], ids=["leader owns some", "leader owns nothing"])
@pytest.mark.parametrize("has_experts", [True, False], ids=["experts", "dense"])
def test_partials_are_added_in_rank_order_in_fp32_and_rounded_once(
    has_experts: bool, owns: bool, dtype: torch.dtype, at_once: bool
) -> None:
    hidden = torch.randn(11, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = hidden.clone()
    weights = [torch.randn(8, generator=torch.Generator().manual_seed(10 + rank)).to(dtype) for rank in range(3)]
    exchanges = thread_exchanges(3, link_bytes=6 * 8 * dtype.itemsize)

    def part(rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda rows: rows * weights[rank]

    def body(rank: int) -> torch.Tensor:
        lending = Lending(LINKS, exchanges[rank], at_once=at_once)
        for _ in range(2):
            if rank == LEADER:
                total = lending.sum(hidden, part(rank) if owns else None, has_experts=has_experts)
            else:
                lending.help(torch.empty_like(hidden), part(rank), has_experts=has_experts)
                total = torch.empty(0)
        return total

    total = run_ranks(exchanges, body)[LEADER]

    expected = torch.empty_like(hidden)
    sum_in_order([hidden * weights[rank] for rank in ((0, 1, 2) if owns else (0, 2))], expected)
    assert torch.equal(total, expected)
    assert torch.equal(hidden, before)


def test_what_is_lent_is_sent_before_the_leader_computes_its_own_part() -> None:
    exchanges = thread_exchanges(3)
    sent_before: list[int] = []

    def own(rows: torch.Tensor) -> torch.Tensor:
        sent_before.append(exchanges[LEADER].traffic.messages)
        return rows

    def body(rank: int) -> None:
        lending = Lending(LINKS, exchanges[rank])
        rows = torch.ones(3 * SLICE_ROWS, 4)
        if rank == LEADER:
            lending.sum(rows, own)
        else:
            lending.help(rows, lambda lent: lent)

    run_ranks(exchanges, body)

    assert sent_before == [2, 3, 3]


def test_a_rank_that_is_no_helper_cannot_help() -> None:
    with pytest.raises(ValueError, match="rank 1 is no helper of rank 1"):
        Lending(LINKS, thread_exchanges(3)[LEADER]).help(torch.ones(1, 4), lambda rows: rows)

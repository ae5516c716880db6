"""Which subgroups and links a plan needs."""

from __future__ import annotations

import pytest

from hetero_worker.distributed.routes import NO_ROUTES, Link, Routes, hops, input_ranks, routes_of
from tests.support.rank_shares import Shares

pytestmark = pytest.mark.unit


def test_layers_split_over_all_ranks_need_no_routes() -> None:
    shares = Shares(kv_heads=((5, 2, 1, 0),), mlp_columns=((0, 20, 30, 50),), vocab_rows=(100, 0, 0, 100))
    assert routes_of(shares.plan(3)) == NO_ROUTES


def test_whole_layers_on_single_ranks_need_links_alone() -> None:
    shares = Shares(
        kv_heads=((8, 0, 0), (0, 8, 0), (0, 0, 8)),
        mlp_columns=((50, 0, 0), (0, 50, 0), (0, 0, 50)),
        vocab_rows=(0, 0, 200),
        embedding_rows=(200, 0, 0),
    )
    assert routes_of(shares.plan(3)) == Routes((), (Link(0, 0, (1,)), Link(1, 1, (2,))))


def test_wide_stages_sum_among_themselves_and_only_their_first_rank_sends() -> None:
    shares = Shares(
        kv_heads=((5, 3, 0, 0), (0, 0, 4, 4)),
        mlp_columns=((25, 25, 0, 0), (0, 0, 25, 25)),
        vocab_rows=(0, 0, 100, 100),
        embedding_rows=(100, 100, 0, 0),
    )
    assert routes_of(shares.plan(2)) == Routes(((0, 1), (2, 3)), (Link(0, 0, (2, 3)),))


def test_ranks_that_have_the_states_already_are_not_sent_them() -> None:
    shares = Shares(kv_heads=((8, 0), (4, 4), (0, 8)), mlp_columns=((50, 0), (25, 25), (0, 50)), vocab_rows=(100, 100))
    plan = shares.plan(3)
    assert input_ranks(plan) == (0, 1)
    assert hops(plan) == [Link(0, 0, (1,)), None, Link(2, 1, (0,))]


def test_two_hops_between_the_same_ranks_are_two_links() -> None:
    turns = ((8, 0), (0, 8), (8, 0), (0, 8))
    columns = tuple((heads and 50, other and 50) for heads, other in turns)
    shares = Shares(kv_heads=turns, mlp_columns=columns, vocab_rows=(0, 200), embedding_rows=(200, 0))
    assert routes_of(shares.plan(4)).links == (Link(0, 0, (1,)), Link(1, 1, (0,)), Link(2, 0, (1,)))


def test_an_embedding_elsewhere_is_summed_with_the_first_stage() -> None:
    shares = Shares(
        kv_heads=((0, 8, 0),), mlp_columns=((0, 50, 0),), vocab_rows=(0, 0, 200), embedding_rows=(200, 0, 0)
    )
    assert routes_of(shares.plan(2)) == Routes(((0, 1),), (Link(0, 1, (2,)),))

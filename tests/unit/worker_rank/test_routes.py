"""Which subgroups and links a plan needs."""

from __future__ import annotations

import pytest

from hetero_api.errors import PlanError
from hetero_worker.distributed.routes import (
    NO_ROUTES,
    HelperLinks,
    Link,
    Routes,
    device_routes_of,
    helper_links,
    hops,
    input_ranks,
    routes_of,
)
from tests.support.rank_shares import Shares

pytestmark = pytest.mark.unit


def test_layers_split_over_all_ranks_need_no_routes() -> None:
    shares = Shares(kv_heads=((5, 2, 1),), mlp_columns=((0, 20, 30),), vocab_rows=(100, 0, 100))
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


def test_holders_of_all_stages_sum_embeddings_if_layers_have_inputs_of_their_own() -> None:
    shares = Shares(
        kv_heads=((8, 0, 0, 0), (0, 8, 0, 0), (0, 0, 8, 0)),
        mlp_columns=((50, 0, 0, 0), (0, 50, 0, 0), (0, 0, 25, 25)),
        vocab_rows=(0, 0, 200, 0),
        embedding_rows=(200, 0, 0, 0),
    )
    plan = shares.plan(3)
    assert input_ranks(plan) == (0,)
    assert input_ranks(plan, inputs_everywhere=True) == (0, 1, 2)
    assert routes_of(plan, inputs_everywhere=True).subgroups == ((0, 1, 2),)
    assert routes_of(plan, 2, inputs_everywhere=True).subgroups == ((0, 2),)
    assert device_routes_of(plan, 2, inputs_everywhere=True).subgroups == ((0, 1),)


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


HELPED = Shares(kv_heads=((4, 4, 0, 0),), mlp_columns=((20, 20, 5, 5),), vocab_rows=(200, 0, 0, 0))
"""Two ranks with heads, two with MLP columns only."""


def test_helpers_meet_the_leader_over_links_and_take_part_in_no_sum() -> None:
    plan = HELPED.plan(3)
    lanes = HelperLinks(Link(1, 0, (2, 3)), (Link(2, 2, (0,)), Link(3, 3, (0,))))
    assert helper_links(plan) == [lanes]
    assert routes_of(plan) == Routes(((0, 1),), (lanes.lend, *lanes.returns))


def test_stages_with_the_same_leader_and_helpers_share_their_links() -> None:
    shares = Shares(
        kv_heads=((8, 0, 0), (0, 8, 0), (8, 0, 0)),
        mlp_columns=((20, 0, 30), (0, 20, 30), (20, 0, 30)),
        vocab_rows=(200, 0, 0),
    )
    first, second, third = helper_links(shares.plan(3))
    assert first == third
    assert first is not None
    assert second is not None
    assert (first.lend, second.lend) == (Link(3, 0, (2,)), Link(5, 1, (2,)))
    numbers = [link.number for link in routes_of(shares.plan(3)).links]
    assert sorted(set(numbers)) == sorted(numbers)


def test_head_owners_without_the_last_states_get_them_from_the_leader_also_helpers() -> None:
    shares = Shares(kv_heads=((4, 4, 0),), mlp_columns=((20, 20, 10),), vocab_rows=(100, 0, 100))
    assert hops(shares.plan(2)) == [Link(0, 0, (2,))]


def test_gpu_ranks_meet_on_their_devices_and_only_their_leader_on_the_host() -> None:
    shares = Shares(kv_heads=((3, 2, 1, 2),), mlp_columns=((20, 20, 5, 5),), vocab_rows=(200, 0, 0, 0))
    assert routes_of(shares.plan(2), 2) == Routes(((0, 2, 3),))
    assert device_routes_of(shares.plan(2), 2) == Routes(((0, 1),))


def test_sums_of_gpu_ranks_alone_are_not_on_the_host_and_helpers_are() -> None:
    plan = HELPED.plan(2)
    lanes = helper_links(plan)[0]
    assert lanes is not None
    assert routes_of(plan, 2) == Routes((), (lanes.lend, *lanes.returns))
    assert device_routes_of(plan, 2) == Routes(((0, 1),))


def test_a_hop_between_gpu_ranks_is_their_devices_and_one_to_a_cpu_rank_is_the_hosts() -> None:
    shares = Shares(
        kv_heads=((8, 0, 0), (0, 8, 0), (0, 0, 8)),
        mlp_columns=((50, 0, 0), (0, 50, 0), (0, 0, 50)),
        vocab_rows=(0, 0, 200),
        embedding_rows=(200, 0, 0),
    )
    assert device_routes_of(shares.plan(3), 2) == Routes((), (Link(0, 0, (1,)),))
    assert routes_of(shares.plan(3), 2) == Routes((), (Link(1, 1, (2,)),))


@pytest.mark.parametrize("num_gpu_ranks", [0, 1, 2, 3])
def test_idle_ranks_are_on_no_route(num_gpu_ranks: int) -> None:
    shares = Shares(kv_heads=((4, 0, 4, 0),), mlp_columns=((20, 0, 30, 0),), vocab_rows=(100, 0, 100, 0))
    plan = shares.plan(2)
    for routes in (routes_of(plan, num_gpu_ranks), device_routes_of(plan, num_gpu_ranks)):
        ranks = {rank for group in routes.subgroups for rank in group} | {
            r for link in routes.links for r in link.ranks
        }
        assert not ranks & {1, 3}


def test_a_draft_model_s_subgroups_come_beside_the_model_s_links() -> None:
    layers = Shares(
        kv_heads=((8, 0, 0), (0, 8, 0), (0, 0, 8)),
        mlp_columns=((50, 0, 0), (0, 50, 0), (0, 0, 50)),
        vocab_rows=(0, 0, 200),
        embedding_rows=(200, 0, 0),
    )
    plan, split = layers.plan(3), Shares(kv_heads=((3, 3, 2),), mlp_columns=((20, 20, 10),), vocab_rows=(100, 50, 50))
    alone = Shares(kv_heads=((0, 8, 0),), mlp_columns=((0, 50, 0),), vocab_rows=(0, 200, 0))
    for drafted in (split, alone):
        assert routes_of(plan).beside(routes_of(drafted.plan(2))) == routes_of(plan)
    # Two GPU ranks and a CPU rank: the first GPU rank meets that one, and the other on its device.
    assert routes_of(plan, 2).beside(routes_of(split.plan(2), 2)).subgroups == (*routes_of(plan, 2).subgroups, (0, 2))
    assert device_routes_of(plan, 2).beside(device_routes_of(split.plan(2), 2)).subgroups == ((0, 1),)
    with pytest.raises(PlanError, match="must not need links"):
        routes_of(split.plan(3)).beside(routes_of(plan))

"""Exchanges between real processes: shared memory equals Gloo, and no failure of a peer is a hang."""

from __future__ import annotations

import re

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from tests.support import exchange_bodies as bodies
from tests.support.rank_processes import run_ranks, segment_prefix

pytestmark = pytest.mark.distributed

SHM, GLOO = ranks_pb2.EXCHANGE_KIND_SHM, ranks_pb2.EXCHANGE_KIND_GLOO
BOTH = pytest.mark.parametrize("kind", [SHM, GLOO], ids=["shm", "gloo"])


@pytest.mark.parametrize(("world_size", "rounds", "seed"), [(2, 800, 1), (3, 1200, 2), (4, 800, 3)])
def test_shm_equals_gloo_bit_for_bit_on_every_rank(world_size: int, rounds: int, seed: int) -> None:
    results = run_ranks(bodies.same_rounds_both_ways, world_size, rounds, seed)

    over_shm, over_gloo = [r[0] for r in results], [r[1] for r in results]
    assert over_shm == over_gloo


def test_segment_has_no_name_once_the_group_stands() -> None:
    results = run_ranks(bodies.same_rounds_both_ways, 2, 1, 3)

    assert [left_over for _, _, left_over in results] == [[], []]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_all_reduce_is_the_fp32_sum_in_rank_order(kind: int, dtype: torch.dtype) -> None:
    results = run_ranks(bodies.sums, 3, kind, dtype)

    rows = [bodies.rank_row(rank, dtype).float() for rank in range(3)]
    expected = ((rows[0] + rows[1]) + rows[2]).to(dtype)
    assert results == [expected.tolist()] * 3


@BOTH
def test_abort_from_another_thread_ends_a_waiting_rank_within_a_second(kind: int) -> None:
    waited_s = run_ranks(bodies.abort_while_waiting, 2, kind)[0]

    assert waited_s < 1.0


@BOTH
def test_a_source_does_not_wait_for_its_receivers_and_may_reuse_what_it_sent(kind: int) -> None:
    (_, nothing), (_, seen) = run_ranks(bodies.runs_ahead, 2, kind)

    assert (nothing, seen) == ([], [24.0, 32.0])


@BOTH
@pytest.mark.parametrize("waiting", [0, 1], ids=["source", "receiver"])
def test_abort_ends_either_end_of_a_link_within_a_second(kind: int, waiting: int) -> None:
    waited_s = run_ranks(bodies.abort_on_a_link, 2, kind, waiting)[waiting]

    assert 0 < waited_s < 1.0
    assert bodies.shm_left_over(segment_prefix()) == []


@BOTH
@pytest.mark.parametrize(("waiting", "complaint"), [(0, "rank(s) 1 did not take"), (1, "0 did not send")])
def test_timeout_names_the_other_end_of_a_link(kind: int, waiting: int, complaint: str) -> None:
    message = run_ranks(bodies.late_end_of_a_link, 2, kind, waiting)[waiting]

    assert complaint in message
    assert message.endswith("within 0.5 s")


def test_timeout_names_the_rank_that_did_not_come() -> None:
    first, second, _ = run_ranks(bodies.late_rank, 3, SHM)

    assert first == second == "rank(s) 2 did not reach round 1 within 0.5 s"


def test_gloo_timeout_names_the_rank_that_did_not_come_or_waits_behind_it() -> None:
    first, second, _ = run_ranks(bodies.late_rank, 3, GLOO)

    assert re.fullmatch(r"the exchange with rank\(s\) (1, )?2 was not done within 0.5 s", first)
    assert re.fullmatch(r"the exchange with rank\(s\) (0, )?2 was not done within 0.5 s", second)


def test_abort_frees_all_survivors_of_a_killed_rank() -> None:
    first, second, killed = run_ranks(bodies.killed_peer, 3, may_die=[2])

    assert first < 2.0
    assert second < 2.0
    assert killed is None
    assert bodies.shm_left_over(segment_prefix()) == []


def test_full_dev_shm_is_an_error_on_every_rank_and_the_next_epoch_forms() -> None:
    (creator, left_by_creator), (other, left_by_other) = run_ranks(bodies.no_room, 2)

    assert "cannot reserve" in creator
    assert "/dev/shm" in creator
    assert "rank(s) [0] could not create" in other
    assert left_by_creator == left_by_other == []


def test_all_take_gloo_when_one_machine_lacks_store_order() -> None:
    assert run_ranks(bodies.foreign_machine, 2) == [GLOO, GLOO]


def test_rendezvous_names_the_rank_that_did_not_come() -> None:
    message, _ = run_ranks(bodies.absent_rank, 2)

    assert "rank(s) 1 did not come" in message


def test_nothing_listens_beyond_the_store_host() -> None:
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}

    for addresses in run_ranks(bodies.listening_addresses, 2):
        assert addresses
        assert set(addresses) <= loopback

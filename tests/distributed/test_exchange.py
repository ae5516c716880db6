"""Exchanges between real processes: native ones equal Gloo, and no failure of a peer is a hang."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from tests.support import exchange_bodies as bodies
from tests.support.rank_processes import run_ranks, segment_prefix
from tests.support.tcp_threads import has_ipv6

pytestmark = pytest.mark.distributed

SHM, TCP, GLOO = ranks_pb2.EXCHANGE_KIND_SHM, ranks_pb2.EXCHANGE_KIND_TCP, ranks_pb2.EXCHANGE_KIND_GLOO
EVERY_KIND = pytest.mark.parametrize("kind", [SHM, TCP, GLOO], ids=["native", "tcp", "gloo"])
NATIVE = pytest.mark.parametrize("kind", [SHM, TCP], ids=["shm", "tcp"])


@pytest.mark.parametrize(("world_size", "rounds", "seed"), [(2, 800, 1), (3, 1200, 2), (4, 800, 3)])
def test_native_exchanges_equal_gloo_bit_for_bit_on_every_rank(world_size: int, rounds: int, seed: int) -> None:
    results = run_ranks(bodies.same_rounds_every_way, world_size, rounds, seed)

    over_shm, over_tcp, over_gloo = ([digests[kind] for digests, _ in results] for kind in (SHM, TCP, GLOO))
    assert over_shm == over_tcp == over_gloo


def test_segment_has_no_name_once_the_group_stands() -> None:
    results = run_ranks(bodies.same_rounds_every_way, 2, 1, 3)

    assert [left_over for _, left_over in results] == [[], []]


@EVERY_KIND
@pytest.mark.parametrize(
    ("dtype", "host"),
    [(torch.float32, "127.0.0.1"), (torch.bfloat16, "127.0.0.1"), (torch.float32, "::1")],
    ids=["float32", "bfloat16", "IPv6"],
)
def test_all_reduce_is_the_fp32_sum_in_rank_order(kind: int, dtype: torch.dtype, host: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    results = run_ranks(bodies.sums, 3, kind, dtype, host)

    rows = [bodies.rank_row(rank, dtype).float() for rank in range(3)]
    expected = ((rows[0] + rows[1]) + rows[2]).to(dtype)
    assert results == [expected.tolist()] * 3


@EVERY_KIND
def test_abort_from_another_thread_ends_a_waiting_rank_within_a_second(kind: int) -> None:
    waited_s = run_ranks(bodies.abort_while_waiting, 2, kind)[0]

    assert waited_s < 1.0


@EVERY_KIND
def test_a_source_does_not_wait_for_its_receivers_and_may_reuse_what_it_sent(kind: int) -> None:
    (_, nothing), (_, seen) = run_ranks(bodies.runs_ahead, 2, kind)

    assert (nothing, seen) == ([], [24.0, 32.0])


@EVERY_KIND
@pytest.mark.parametrize("waiting", [0, 1], ids=["source", "receiver"])
def test_abort_ends_either_end_of_a_link_within_a_second(kind: int, waiting: int) -> None:
    waited_s = run_ranks(bodies.abort_on_a_link, 2, kind, waiting)[waiting]

    assert 0 < waited_s < 1.0
    assert bodies.shm_left_over(segment_prefix()) == []


@EVERY_KIND
@pytest.mark.parametrize(("waiting", "complaint"), [(0, "rank(s) 1 did not take"), (1, "0 did not send")])
def test_timeout_names_the_other_end_of_a_link(kind: int, waiting: int, complaint: str) -> None:
    message = run_ranks(bodies.late_end_of_a_link, 2, kind, waiting)[waiting]

    assert complaint in message
    assert message.endswith("within 0.5 s")


@NATIVE
def test_timeout_names_the_rank_that_did_not_come(kind: int) -> None:
    first, second, _ = run_ranks(bodies.late_rank, 3, kind)

    assert first == second == "rank(s) 2 did not reach round 1 within 0.5 s"


def test_gloo_timeout_names_the_rank_that_did_not_come_or_waits_behind_it() -> None:
    first, second, _ = run_ranks(bodies.late_rank, 3, GLOO)

    assert re.fullmatch(r"the exchange with rank\(s\) (1, )?2 was not done within 0.5 s", first)
    assert re.fullmatch(r"the exchange with rank\(s\) (0, )?2 was not done within 0.5 s", second)


@NATIVE
def test_a_rank_that_is_killed_in_an_exchange_ends_it_for_all_within_two_seconds(kind: int) -> None:
    first, second, killed = run_ranks(bodies.killed_peer, 3, kind, may_die=[2])

    for waited_s, message in (first, second):
        assert waited_s < 2.0
        assert message == "rank 2 ended, or left the group, while others waited for it"
    assert killed is None
    assert bodies.shm_left_over(segment_prefix()) == []


def test_a_segment_goes_though_the_rank_that_made_it_is_killed_before_it_can_remove_the_name() -> None:
    killed, second, third = run_ranks(bodies.killed_creator, 3, may_die=[0])

    assert killed is None
    assert second
    assert third
    assert bodies.shm_left_over(segment_prefix()) == []


@NATIVE
@pytest.mark.parametrize("waiting", [0, 1], ids=["source", "receiver"])
def test_a_link_whose_other_end_is_killed_ends_within_two_seconds(waiting: int, kind: int) -> None:
    results = run_ranks(bodies.killed_end_of_a_link, 2, kind, waiting, may_die=[1 - waiting])

    waited_s, message = results[waiting]
    assert waited_s < 2.0
    assert message == f"rank {1 - waiting} ended, or left the group, while others waited for it"
    assert bodies.shm_left_over(segment_prefix()) == []


@NATIVE
def test_a_frozen_rank_is_late_and_not_lost(kind: int) -> None:
    first, second, _ = run_ranks(bodies.frozen_peer, 3, kind)

    assert first == second == "rank(s) 2 did not reach round 1 within 0.5 s"


def test_full_dev_shm_is_an_error_on_every_rank_and_the_next_epoch_forms() -> None:
    (creator, left_by_creator), (other, left_by_other) = run_ranks(bodies.no_room, 2)

    assert "cannot reserve" in creator
    assert "/dev/shm" in creator
    assert "rank(s) [0] could not create" in other
    assert left_by_creator == left_by_other == []


def test_all_share_memory_natively_where_all_can() -> None:
    assert run_ranks(bodies.kind_and_reason, 2, {}) == [(SHM, "", [3.0] * 4)] * 2


@NATIVE
def test_all_take_gloo_when_one_rank_has_no_native_library(kind: int, tmp_path: Path) -> None:
    first, second = run_ranks(bodies.kind_and_reason, 2, {"native_library": tmp_path / "none.so"}, kind)

    assert first == second
    assert first[0] == GLOO
    assert first[1].startswith("rank(s) 1: the native exchange was not built: ")
    assert first[2] == [3.0] * 4


def test_all_take_tcp_when_a_rank_sees_another_folder(tmp_path: Path) -> None:
    first, second = run_ranks(bodies.kind_and_reason, 2, {"shm_folder": tmp_path})

    assert first == second
    assert first[0] == TCP
    assert re.search(r"rank\(s\) 1: .*ranks must share", first[1])
    assert bodies.shm_left_over(segment_prefix()) == []


def test_rendezvous_names_the_rank_that_did_not_come() -> None:
    message, _ = run_ranks(bodies.absent_rank, 2)

    assert "rank(s) 1 did not come" in message


@EVERY_KIND
def test_nothing_listens_beyond_the_store_host(kind: int) -> None:
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}

    for addresses in run_ranks(bodies.listening_addresses, 2, kind):
        assert addresses
        assert set(addresses) <= loopback

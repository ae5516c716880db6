"""Who is still there and what was moved: what ranks know of one another over native exchanges."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetero_worker.distributed.exchange import HostExchange, Traffic
from hetero_worker.distributed.routes import Link, Routes
from hetero_worker.errors import ExchangeAborted, ExchangeTimeout, PeerLost
from tests.support.shm_threads import PAGE, on_every_rank
from tests.support.tcp_threads import MakeExchanges

pytestmark = pytest.mark.unit

LINK = Link(0, 0, (1, 2))
ROUTES = Routes(subgroups=((0, 1),), links=(LINK,))


@pytest.mark.parametrize(
    "wait",
    [
        lambda exchange: exchange.all_reduce(torch.ones(1), (0, 1, 2)),
        lambda exchange: exchange.all_gather(torch.ones(1), (1, 1, 1)),
        lambda exchange: exchange.broadcast(torch.ones(1), 2),
    ],
    ids=["all_reduce", "all_gather", "broadcast"],
)
def test_all_learn_who_left_while_they_waited(
    wait: Callable[[HostExchange], object], exchanges: MakeExchanges, tmp_path: Path
) -> None:
    def run(exchange: HostExchange) -> str:
        if exchange.rank == 2:
            exchange.close()
            return ""
        with pytest.raises(PeerLost) as caught:
            wait(exchange)
        with pytest.raises(PeerLost):
            exchange.broadcast(torch.ones(1), exchange.rank)
        return str(caught.value)

    with exchanges(tmp_path, 3) as ranks:
        began = time.monotonic()
        first, second, _ = on_every_rank(ranks, run)
        assert first == second == "rank 2 ended, or left the group, while others waited for it"
        assert time.monotonic() - began < 2.0


def test_a_rank_that_has_done_its_part_may_leave(exchanges: MakeExchanges, tmp_path: Path) -> None:
    def run(exchange: HostExchange) -> float:
        tensor = torch.ones(1)
        if exchange.rank == 0:
            time.sleep(0.25)
        exchange.all_reduce(tensor, (0, 1))
        exchange.close()
        return tensor.item()

    with exchanges(tmp_path) as ranks:
        assert on_every_rank(ranks, run) == [2.0, 2.0]


def test_a_rank_that_sleeps_in_a_long_wait_is_woken_by_its_peer(exchanges: MakeExchanges, tmp_path: Path) -> None:
    def run(exchange: HostExchange) -> float:
        began = time.monotonic()
        if exchange.rank:
            time.sleep(0.35)
        exchange.all_reduce(torch.ones(1), (0, 1))
        return time.monotonic() - began

    with exchanges(tmp_path) as ranks:
        waited_s, _ = on_every_rank(ranks, run)
        assert 0.3 < waited_s < 1.0


def test_an_abort_wakes_a_sleeping_rank(exchanges: MakeExchanges, tmp_path: Path) -> None:
    with exchanges(tmp_path, timeout_s=30.0) as ranks:
        timer = threading.Timer(0.3, ranks[1].abort)
        timer.start()
        began = time.monotonic()
        with pytest.raises(ExchangeAborted, match="the epoch was aborted"):
            ranks[0].all_reduce(torch.ones(1), (0, 1))
        assert time.monotonic() - began < 1.0
        timer.join()


def test_what_was_given_up_in_its_middle_does_not_go_on(exchanges: MakeExchanges, tmp_path: Path) -> None:
    with exchanges(tmp_path, timeout_s=0.05) as ranks:
        with pytest.raises(ExchangeTimeout):
            ranks[0].all_reduce(torch.ones(1), (0, 1))
        with pytest.raises(ExchangeAborted, match="given up"):
            ranks[0].all_reduce(torch.ones(1), (0, 1))


def test_traffic_counts_what_a_rank_published(exchanges: MakeExchanges, tmp_path: Path) -> None:
    def run(exchange: HostExchange) -> Traffic:
        exchange.all_reduce(torch.zeros(PAGE), (0, 2))  # four areas long
        exchange.all_reduce(torch.zeros(0), (0, 2))
        exchange.broadcast(torch.zeros(3, dtype=torch.int64), 1)
        exchange.all_gather(torch.zeros(exchange.rank, dtype=torch.bfloat16), (0, 1, 2))
        if exchange.rank < 2:
            exchange.among((0, 1)).all_reduce(torch.zeros(10), (1,))
        if exchange.rank == 0:
            exchange.send(torch.zeros(PAGE), LINK)
            exchange.send(torch.zeros(0), LINK)
        else:
            exchange.receive(torch.zeros(PAGE), LINK).wait()
        return exchange.traffic

    with exchanges(tmp_path, 3, routes=ROUTES) as ranks:
        first, second, third = on_every_rank(ranks, run)
    assert first == Traffic(4 * PAGE + 4 * PAGE, rounds=4, messages=1)
    assert second == Traffic(24 + 2 + 40, rounds=4)
    assert third == Traffic(4 * PAGE + 4, rounds=3)


def test_the_time_of_calls_is_counted_with_their_waits(exchanges: MakeExchanges, tmp_path: Path) -> None:
    late_s = 0.03

    def run(exchange: HostExchange) -> Traffic:
        exchange.all_reduce(torch.ones(1), (0, 1))
        before = exchange.traffic
        if exchange.rank == 1:
            time.sleep(late_s)
        exchange.all_reduce(torch.ones(4), (0, 1))
        return exchange.traffic - before

    with exchanges(tmp_path) as ranks:
        waited, late = on_every_rank(ranks, run)
    assert late_s / 2 < waited.seconds < 100 * late_s
    assert 0 < late.seconds < waited.seconds


def test_tensors_must_lie_in_one_piece(exchanges: MakeExchanges, tmp_path: Path) -> None:
    with exchanges(tmp_path) as ranks:
        with pytest.raises(ValueError, match="contiguous"):
            ranks[0].all_reduce(torch.ones(4, 4).t()[:2], (0, 1))
        with pytest.raises(ValueError, match="contiguous"):
            ranks[0].broadcast(torch.ones(4, 4).t()[:2], 0)

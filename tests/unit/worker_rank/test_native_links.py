"""Links and subgroups of the native exchanges, with threads for ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hetero_worker.distributed.exchange import HostExchange, LocalExchange
from hetero_worker.distributed.native_exchange import LINK_DEPTH
from hetero_worker.distributed.routes import Link, Routes
from hetero_worker.distributed.shm_segment import SegmentLayout
from hetero_worker.errors import ExchangeAborted, ExchangeTimeout
from tests.support.shm_threads import PAGE
from tests.support.shm_threads import exchanges as shm_exchanges
from tests.support.tcp_threads import MakeExchanges

pytestmark = pytest.mark.unit

LINK = Link(0, 0, (1, 2))
BACK = Link(1, 2, (0,))
ROUTES = Routes(subgroups=((0, 1), (1, 2)), links=(LINK, BACK))


def test_areas_and_counters_of_a_segment_do_not_overlap() -> None:
    layout = SegmentLayout(3, PAGE, ROUTES)
    rounds, links = layout.rounds(), layout.links()
    words = [word for part in rounds for word in part.counters]
    words += [word for part in links for word in (part.sent, *part.taken)]
    areas = [area for part in rounds for pair in part.areas for area in pair]
    areas += [area for part in links for area in part.areas]
    assert len(set(words)) == len(words) == 3 + 2 + 2 + 3 + 2
    assert max(words) * 8 < layout.header_bytes
    assert sorted(areas) == list(range(layout.header_bytes, layout.total_bytes, PAGE))


def test_receivers_get_all_that_was_sent_in_order(exchanges: MakeExchanges, tmp_path: Path) -> None:
    count = 5 * LINK_DEPTH

    def run(exchange: HostExchange) -> list[float]:
        tensors = [torch.full((number + 1,), float(number)) for number in range(count)]
        if exchange.rank == 0:
            for tensor in tensors:
                exchange.send(tensor, LINK)
            return []
        pending = [exchange.receive(torch.empty_like(tensor), LINK) for tensor in tensors]
        return [item.wait().mean().item() for item in pending]

    with exchanges(tmp_path, 3, routes=ROUTES) as ranks, ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run, ranks))
    assert results == [[], *[[float(number) for number in range(count)]] * 2]


def test_a_tensor_longer_than_the_whole_link_goes_through(exchanges: MakeExchanges, tmp_path: Path) -> None:
    whole = torch.arange(PAGE * (LINK_DEPTH + 2) // 4 + 3, dtype=torch.float32)

    def run(exchange: HostExchange) -> bool:
        if exchange.rank == 0:
            exchange.send(whole, LINK)
            return True
        return torch.equal(exchange.receive(torch.empty_like(whole), LINK).wait(), whole)

    with exchanges(tmp_path, 3, routes=ROUTES) as ranks, ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, ranks)) == [True] * 3


def test_a_source_runs_ahead_by_as_much_as_the_link_holds(tmp_path: Path) -> None:
    with shm_exchanges(tmp_path, 3, routes=ROUTES, timeout_s=0.05) as ranks:
        for _ in range(LINK_DEPTH):
            ranks[0].send(torch.ones(4), LINK)
        with pytest.raises(ExchangeTimeout, match=r"rank\(s\) 1, 2 did not take what was sent to them within 0.05 s"):
            ranks[0].send(torch.ones(4), LINK)


def test_a_timeout_names_only_the_receiver_that_is_late(tmp_path: Path) -> None:
    with shm_exchanges(tmp_path, 3, routes=ROUTES, timeout_s=0.05) as ranks:
        for _ in range(LINK_DEPTH):
            ranks[0].send(torch.ones(4), LINK)
        assert ranks[1].receive(torch.zeros(4), LINK).wait().tolist() == [1.0] * 4
        with pytest.raises(ExchangeTimeout, match=r"rank\(s\) 2 did not take"):
            ranks[0].send(torch.ones(4), LINK)


def test_an_empty_tensor_is_there_at_once_and_keeps_the_order(exchanges: MakeExchanges, tmp_path: Path) -> None:
    with exchanges(tmp_path, 3, routes=ROUTES) as ranks:
        for tensor in (torch.empty(0), torch.full((1,), 7.0), torch.empty(0, 3)):
            ranks[2].send(tensor, BACK)
        first, second, third = (ranks[0].receive(torch.zeros(shape), BACK) for shape in ((0,), (1,), (0, 3)))
        assert third.wait().shape == (0, 3)
        assert second.wait().tolist() == [7.0]
        assert first.wait().shape == (0,)


def test_what_arrived_may_be_asked_for_again_but_not_out_of_turn(exchanges: MakeExchanges, tmp_path: Path) -> None:
    with exchanges(tmp_path, 3, routes=ROUTES) as ranks:
        for number in (1.0, 2.0):
            ranks[2].send(torch.full((1,), number), BACK)
        first, second = (ranks[0].receive(torch.zeros(1), BACK) for _ in range(2))
        with pytest.raises(ValueError, match="in the order in which they were posted"):
            second.wait()
        assert [first.wait().item(), first.wait().item(), second.wait().item()] == [1.0, 1.0, 2.0]


def test_an_abort_ends_waits_on_links_and_in_subgroups(exchanges: MakeExchanges, tmp_path: Path) -> None:
    def wait(exchange: HostExchange) -> str:
        try:
            if exchange.rank == 0:
                exchange.receive(torch.zeros(1), BACK).wait()
            elif exchange.rank == 1:
                exchange.among((0, 1)).all_reduce(torch.zeros(1), (0, 1))
            else:
                exchange.abort()
        except ExchangeAborted:
            return "aborted"
        return "done"

    with exchanges(tmp_path, 3, routes=ROUTES) as ranks, ThreadPoolExecutor(3) as pool:
        assert list(pool.map(wait, ranks)) == ["aborted", "aborted", "done"]


def test_subgroups_sum_independently_of_one_another(exchanges: MakeExchanges, tmp_path: Path) -> None:
    """Rank 1 is in two subgroups; each has its own rounds, in any number."""

    def run(exchange: HostExchange) -> list[float]:
        seen = []
        for number in range(30):
            for ranks in ((0, 1),) * (number % 3) + ((1, 2),):
                if exchange.rank in ranks:
                    tensor = torch.tensor([10.0**exchange.rank])
                    exchange.among(ranks).all_reduce(tensor, ranks)
                    seen.append(tensor.item())
        return seen

    with exchanges(tmp_path, 3, routes=ROUTES) as ranks, ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(run, ranks)
    assert first == [11.0] * 30
    assert third == [110.0] * 30
    assert sorted(second) == sorted(first + third)


def test_contributors_must_be_of_the_subgroup(exchanges: MakeExchanges, tmp_path: Path) -> None:
    with (
        exchanges(tmp_path, 3, routes=ROUTES) as ranks,
        pytest.raises(ValueError, match=r"no ranks of a group of 2: \(1, 2\)"),
    ):
        ranks[1].among((1, 2)).all_reduce(torch.ones(1), (0,))


def test_a_rank_among_itself_is_alone_and_all_are_the_group(exchanges: MakeExchanges, tmp_path: Path) -> None:
    with exchanges(tmp_path, 3, routes=ROUTES) as ranks:
        assert isinstance(ranks[1].among((1,)), LocalExchange)
        assert ranks[1].among((0, 1, 2)).world_size == 3


def test_a_closed_exchange_neither_sends_nor_receives(exchanges: MakeExchanges, tmp_path: Path) -> None:
    with exchanges(tmp_path, 3, routes=ROUTES) as ranks:
        pending = ranks[0].receive(torch.zeros(1), BACK)
        ranks[0].close()
        for use in (
            pending.wait,
            lambda: ranks[0].receive(torch.zeros(1), BACK),
            lambda: ranks[0].send(torch.zeros(1), LINK),
            lambda: ranks[0].among((0, 1)).all_reduce(torch.zeros(1), (0, 1)),
        ):
            with pytest.raises(ExchangeAborted, match="closed"):
                use()

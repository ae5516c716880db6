"""Rounds of the native exchanges with threads for ranks."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from hetero_worker.distributed.exchange import HostExchange
from hetero_worker.errors import ExchangeAborted, ExchangeTimeout
from tests.support.shm_threads import PAGE, on_every_rank
from tests.support.tcp_threads import MakeExchanges

pytestmark = pytest.mark.unit


def test_bfloat16_is_summed_in_fp32_and_rounded_once(exchanges: MakeExchanges, tmp_path: Path) -> None:
    # In bf16, 256 + 1 is 256; added in fp32 first, three small terms survive.
    terms = [256.0, 1.0, 1.0]

    def add(exchange: HostExchange) -> float:
        tensor = torch.tensor([terms[exchange.rank]], dtype=torch.bfloat16)
        exchange.all_reduce(tensor, (0, 1, 2))
        return tensor.item()

    with exchanges(tmp_path, 3) as ranks:
        assert on_every_rank(ranks, add) == [258.0] * 3


def test_terms_are_added_in_rank_order_however_contributors_are_listed(
    exchanges: MakeExchanges, tmp_path: Path
) -> None:
    # In fp32, (1e8 - 1e8) + 1 is 1, and 1e8 + (-1e8 + 1) is 0.
    terms = [1e8, -1e8, 1.0]

    def add(exchange: HostExchange) -> float:
        tensor = torch.tensor([terms[exchange.rank]])
        exchange.all_reduce(tensor, (2, 1, 0))
        return tensor.item()

    with exchanges(tmp_path, 3) as ranks:
        assert on_every_rank(ranks, add) == [1.0] * 3


def test_only_contributors_count(exchanges: MakeExchanges, tmp_path: Path) -> None:
    def add(exchange: HostExchange) -> list[float]:
        seen = []
        for contributors in ((0, 2), (2, 0), (1,), (0, 1, 2)):
            tensor = torch.tensor([10.0**exchange.rank])
            exchange.all_reduce(tensor, contributors)
            seen.append(tensor.item())
        return seen

    with exchanges(tmp_path, 3) as ranks:
        assert on_every_rank(ranks, add) == [[101.0, 101.0, 10.0, 111.0]] * 3


def test_source_may_run_ahead_without_overwriting_what_others_read(exchanges: MakeExchanges, tmp_path: Path) -> None:
    rounds = 200

    def receive(exchange: HostExchange) -> list[float]:
        seen = []
        for number in range(rounds):
            if exchange.rank == 1 and number % 20 == 0:
                time.sleep(0.001)
            tensor = torch.full((8,), float(number) if exchange.rank == 0 else -1.0)
            exchange.broadcast(tensor, 0)
            seen.append(tensor.sum().item())
        return seen

    with exchanges(tmp_path, 3) as ranks:
        assert on_every_rank(ranks, receive) == [[8.0 * n for n in range(rounds)]] * 3


def test_gathered_tensors_are_the_callers_own(exchanges: MakeExchanges, tmp_path: Path) -> None:
    def gather(exchange: HostExchange) -> list[list[int]]:
        mine = torch.full((exchange.rank + 1,), exchange.rank, dtype=torch.int64)
        first = exchange.all_gather(mine, (1, 2))
        exchange.all_gather(mine * 7, (1, 2))
        exchange.all_gather(mine * 9, (1, 2))
        return [part.tolist() for part in first]

    with exchanges(tmp_path) as ranks:
        assert on_every_rank(ranks, gather) == [[[0], [1, 1]]] * 2


def test_longer_than_an_area_goes_in_slices(exchanges: MakeExchanges, tmp_path: Path) -> None:
    size = 3 * PAGE // 4 + 5

    def add(exchange: HostExchange) -> bool:
        tensor = torch.arange(size, dtype=torch.float32) * (exchange.rank + 1)
        exchange.all_reduce(tensor, (0, 1))
        return torch.equal(tensor, torch.arange(size, dtype=torch.float32) * 3)

    with exchanges(tmp_path) as ranks:
        assert on_every_rank(ranks, add) == [True, True]


def test_abort_ends_the_wait_of_every_rank(exchanges: MakeExchanges, tmp_path: Path) -> None:
    def wait(exchange: HostExchange) -> str:
        if exchange.rank == 2:
            exchange.abort()
        try:
            exchange.all_reduce(torch.ones(1), (0, 1, 2))
        except ExchangeAborted:
            return "aborted"
        return "done"

    with exchanges(tmp_path, 3) as ranks:
        assert on_every_rank(ranks, wait) == ["aborted"] * 3


def test_timeout_names_who_is_late(exchanges: MakeExchanges, tmp_path: Path) -> None:
    with exchanges(tmp_path, 3, timeout_s=0.05) as ranks:
        ranks[1].broadcast(torch.ones(1), 1)
        with pytest.raises(ExchangeTimeout, match=r"rank\(s\) 2 did not reach round 1 within 0.05 s"):
            ranks[0].all_reduce(torch.ones(1), (0, 1, 2))


def test_closed_exchange_raises_and_can_be_closed_and_aborted_again(exchanges: MakeExchanges, tmp_path: Path) -> None:
    with exchanges(tmp_path) as ranks:
        ranks[0].close()
        ranks[0].close()
        ranks[0].abort()
        with pytest.raises(ExchangeAborted, match="closed"):
            ranks[0].broadcast(torch.ones(1), 0)
        with pytest.raises(ExchangeAborted, match="closed"):
            ranks[0].all_gather(torch.ones(1), (1, 1))


def test_abort_racing_with_close_is_harmless(exchanges: MakeExchanges, tmp_path: Path) -> None:
    for _ in range(50):
        with exchanges(tmp_path) as ranks:
            thread = threading.Thread(target=ranks[0].abort)
            thread.start()
            ranks[0].close()
            thread.join()


@pytest.mark.parametrize("contributors", [(), (0, 2), (-1,)])
def test_contributors_must_be_ranks(contributors: tuple[int, ...], exchanges: MakeExchanges, tmp_path: Path) -> None:
    with exchanges(tmp_path) as ranks, pytest.raises(ValueError, match="no ranks of a group of 2"):
        ranks[0].all_reduce(torch.ones(1), contributors)


def test_counts_must_fit_the_tensor(exchanges: MakeExchanges, tmp_path: Path) -> None:
    with exchanges(tmp_path) as ranks, pytest.raises(ValueError, match="do not fit"):
        ranks[0].all_gather(torch.ones(3), (2, 2))


def test_integers_are_not_summed(exchanges: MakeExchanges, tmp_path: Path) -> None:
    with exchanges(tmp_path) as ranks, pytest.raises(TypeError, match=r"torch\.int64"):
        ranks[0].all_reduce(torch.ones(1, dtype=torch.int64), (0, 1))

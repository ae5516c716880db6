"""Which groups' sums a step can have as operations of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_worker.backends.base import HOST
from hetero_worker.distributed.exchange import Exchange, LocalExchange
from hetero_worker.distributed.hierarchical import HierarchicalExchange
from hetero_worker.distributed.staging import staging_for
from hetero_worker.runners.graphs.breaks import Breaks
from hetero_worker.runners.graphs.current_step import CurrentStep
from hetero_worker.runners.recorded.exchange import RecordedExchange
from tests.support.native_compute import op_queue_of
from tests.support.shm_threads import exchanges
from tests.support.tape import TapeBackend
from tests.support.thread_exchange import thread_exchanges

pytestmark = pytest.mark.unit


def sums_natively(exchange: Exchange) -> bool:
    return RecordedExchange(exchange, Breaks(TapeBackend()), CurrentStep(), op_queue_of(1)).sums_natively


def test_a_rank_alone_needs_no_sums() -> None:
    assert sums_natively(LocalExchange())


def test_a_groups_sums_are_operations_where_it_shares_memory(tmp_path: Path) -> None:
    with exchanges(tmp_path, 3) as ranks:
        assert [sums_natively(rank) for rank in ranks] == [True] * 3
    assert not any(map(sums_natively, thread_exchanges(3)))


def test_beside_gpu_ranks_they_are_not_also_for_a_rank_that_is_idle(tmp_path: Path) -> None:
    """Among whom there is a sum is the plan's to say: here among the GPU ranks 0 and 1, and never among all."""
    with exchanges(tmp_path, 3) as ranks:
        idle = HierarchicalExchange(ranks[2], num_gpu_ranks=2, groups={}, links={}, staging=staging_for(HOST))
        assert not sums_natively(idle)

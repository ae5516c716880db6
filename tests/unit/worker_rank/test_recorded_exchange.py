"""Which groups' sums a step can have as operations of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from hetero_worker.distributed.exchange import Exchange, LocalExchange
from hetero_worker.distributed.hierarchical import STAGED_BYTES, HierarchicalExchange
from hetero_worker.distributed.staging import PlainStaging
from hetero_worker.native.op_queue import Arena, RecordedOps
from hetero_worker.runners.graphs.breaks import Breaks, CurrentStep
from hetero_worker.runners.recorded.exchange import RecordedExchange, native_exchange_of
from tests.support.native_compute import op_queue_of
from tests.support.shm_threads import exchanges
from tests.support.tape import TapeBackend
from tests.support.thread_exchange import thread_exchanges

pytestmark = pytest.mark.unit
T = TypeVar("T")


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
        idle = HierarchicalExchange(ranks[2], num_gpu_ranks=2, groups={}, links={}, staging=PlainStaging())
        assert not sums_natively(idle)


def test_a_cpu_rank_records_its_sum_with_gpu_ranks_slice_by_slice(tmp_path: Path) -> None:
    """A replay is a sum like the first: the GPU ranks' leader, which joins by Python, notices nothing."""
    size = STAGED_BYTES // 4 + 3
    with exchanges(tmp_path, 2) as ranks:
        leader, cpu = (
            HierarchicalExchange(rank, num_gpu_ranks=1, groups={}, links={}, staging=PlainStaging()) for rank in ranks
        )
        queue, breaks, mine, others = op_queue_of(1), Breaks(TapeBackend()), torch.empty(size), torch.empty(size)
        sums = RecordedExchange(cpu, breaks, CurrentStep(), queue).among((0, 1))
        assert sums.world_size == 2

        def record() -> RecordedOps:
            with queue.computing_in(Arena()), queue.recording() as recorded:
                sums.all_reduce(mine, (0, 1))
            return recorded

        def meet(work: Callable[[], T], number: float) -> T:
            mine.fill_(number)
            others.fill_(0.5)
            with ThreadPoolExecutor(1) as pool:
                leading = pool.submit(leader.among((0, 1)).all_reduce, others, (0, 1))
                done = work()
                leading.result()
            expected = torch.full((size,), number + 0.5)
            assert torch.equal(mine, expected)
            assert torch.equal(others, expected)
            return done

        recorded = meet(record, 1.0)
        assert len(recorded.ops) == 2
        meet(lambda: queue.replay(recorded), 7.0)
        with pytest.raises(ValueError, match="no ranks of a group of 2"):
            sums.all_reduce(mine, (0, 2))


def test_gpu_ranks_and_cpu_ranks_without_shared_memory_break_recordings(tmp_path: Path) -> None:
    with exchanges(tmp_path, 2) as ranks:
        leader = HierarchicalExchange(ranks[0], num_gpu_ranks=1, groups={}, links={}, staging=PlainStaging())
        assert native_exchange_of(leader) is None
        assert native_exchange_of(ranks[1]) is ranks[1]
    _, host = thread_exchanges(2)
    assert native_exchange_of(host) is None
    beside = HierarchicalExchange(host, num_gpu_ranks=1, groups={}, links={}, staging=PlainStaging())
    assert native_exchange_of(beside) is None

"""The KV budget is what the sum says, and a rank without room says the sum."""

from __future__ import annotations

import dataclasses

import pytest

from hetero_api.rank_memory import KvCost
from hetero_worker.errors import MemoryBudgetError
from hetero_worker.memory.budget import MemoryBudget

pytestmark = pytest.mark.unit

MIB = 1024**2
BUDGET = MemoryBudget(1000 * MIB, 300 * MIB, 100 * MIB, runtime_bytes=200 * MIB)
WITH_GRAPHS = dataclasses.replace(BUDGET, graph_bytes=150 * MIB)


def test_budget_is_what_is_left_less_the_scratch_of_decoding() -> None:
    assert BUDGET.kv_budget_bytes(KvCost(cache_bytes=300, scratch_bytes=100)) == 300 * MIB


def test_graphs_are_recorded_later_and_have_their_room() -> None:
    cost = KvCost(cache_bytes=64, scratch_bytes=0)
    assert WITH_GRAPHS.kv_budget_bytes(cost) == 250 * MIB
    # What the device has left is workspace's and graphs' too.
    assert dataclasses.replace(WITH_GRAPHS, available_bytes=300 * MIB).kv_budget_bytes(cost) == 50 * MIB


def test_the_sum_names_graphs_where_there_are_any() -> None:
    assert "graphs" not in str(BUDGET)
    assert str(WITH_GRAPHS) == (
        "1,000 MiB given - 200 MiB runtime - 300 MiB weights - 100 MiB workspace - 150 MiB graphs = 250 MiB"
    )
    short = dataclasses.replace(WITH_GRAPHS, available_bytes=240 * MIB)
    assert str(short).endswith("but the device has 240 MiB available - 100 MiB workspace - 150 MiB graphs = -10 MiB")
    with pytest.raises(MemoryBudgetError, match="or set enforceEager"):
        short.kv_budget_bytes(KvCost(64, 8))


def test_a_rank_without_heads_has_no_kv_budget() -> None:
    assert MemoryBudget(1000 * MIB, 0, 0).kv_budget_bytes(KvCost(0, 0)) == 0


def test_too_little_memory_is_told_with_the_sum() -> None:
    budget = MemoryBudget(500 * MIB, 300 * MIB, 100 * MIB, runtime_bytes=200 * MIB)
    with pytest.raises(MemoryBudgetError) as caught:
        budget.kv_budget_bytes(KvCost(64, 8))
    for word in ("500 MiB given", "200 MiB runtime", "300 MiB weights", "100 MiB workspace", "-100 MiB"):
        assert word in str(caught.value)
    assert "enforceEager" not in str(caught.value)

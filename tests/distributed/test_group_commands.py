"""Commands are done by all processes of a group or by none, whatever carries their votes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetero_api.v1 import ranks_pb2
from tests.support.group_command_bodies import BLOCK_SIZE, NUM_BLOCKS, PROMPT, Order, Told, serve_between_commands
from tests.support.rank_group import Shares
from tests.support.rank_processes import run_ranks
from tests.support.reference import Reference
from tests.support.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.distributed

SHARES = Shares(kv_heads=((5, 3),), mlp_columns=((17, 33),), vocab_rows=(64, 136))
MUCH, LITTLE = 2 << 30, 400 << 20
"""A rank's memory; RUNTIME_BYTES of it is not for the cache."""
NUM_CHOSEN = 3
"""Experts of a token of tiny qwen3-moe."""
MOE_SHARES = replace(SHARES, experts=((2, 4),))


def command(**action: object) -> bytes:
    return ranks_pb2.GroupCommand(**action).SerializeToString()  # type: ignore[arg-type]


def cache(num_blocks: int = NUM_BLOCKS, block_size: int = BLOCK_SIZE) -> ranks_pb2.AllocateCache:
    return ranks_pb2.AllocateCache(num_blocks=num_blocks, block_size=block_size)


@pytest.mark.parametrize("kind", [ranks_pb2.EXCHANGE_KIND_SHM, ranks_pb2.EXCHANGE_KIND_GLOO])
def test_a_group_of_processes_resets_sleeps_and_wakes(tmp_path: Path, kind: ranks_pb2.ExchangeKind.ValueType) -> None:
    checkpoint = save_tiny("qwen3", tmp_path)
    orders = [
        Order(command(reset_cache=cache(3, 128))),
        Order(command(reset_cache=cache())),
        Order(command(reset_cache=cache(500, 128))),
        Order(command(sleep=ranks_pb2.SleepCommand(level=1)), serves=False),
        Order(command(wake=ranks_pb2.WakeCommand(weights=True, cache=cache()))),
        Order(command(sleep=ranks_pb2.SleepCommand(level=2)), serves=False),
        Order(command(wake=ranks_pb2.WakeCommand(weights=True, cache=cache()))),
    ]
    told = run_ranks(serve_between_commands, 2, tmp_path, SHARES.plan(3), orders, kind, (MUCH, LITTLE))
    first, second = told
    assert isinstance(first, Told)
    assert isinstance(second, Told)
    assert first.completions == second.completions
    assert first.completions == [first.completions[0]] * 6
    assert Reference(checkpoint.reference).disagreements(PROMPT, first.completions[0]) == []
    done = [True, True, False, True, True, True, True]
    assert [report[0] for report in first.reports] == [report[0] for report in second.reports] == done
    assert first.reports[2][1] == ""
    assert "ask for fewer blocks" in second.reports[2][1]


@pytest.mark.parametrize("kind", [ranks_pb2.EXCHANGE_KIND_SHM, ranks_pb2.EXCHANGE_KIND_TCP])
def test_a_group_of_processes_counts_and_moves_experts(tmp_path: Path, kind: ranks_pb2.ExchangeKind.ValueType) -> None:
    checkpoint = save_tiny("qwen3-moe", tmp_path, initializer_range=0.2)
    plan = MOE_SHARES.plan(3, expert_layers=range(3))
    moved = replace(plan, expert_orders=((), (), (5, 1, 2, 3, 4, 0)))
    impossible = replace(plan, expert_orders=((5, 5, 4, 3, 2, 1), (), ()))
    count = Order(command(count_experts=ranks_pb2.CountExperts()), serves=False)
    orders = [
        count,
        Order(command(place_experts=ranks_pb2.PlaceExperts(shard_plan=moved.to_proto(), ahead=True)), serves=False),
        Order(command(place_experts=ranks_pb2.PlaceExperts(shard_plan=moved.to_proto()))),
        count,
        Order(command(place_experts=ranks_pb2.PlaceExperts(shard_plan=impossible.to_proto(), ahead=True))),
        Order(command(sleep=ranks_pb2.SleepCommand(level=2)), serves=False),
        Order(command(wake=ranks_pb2.WakeCommand(weights=True, cache=cache()))),
    ]
    first, second = run_ranks(serve_between_commands, 2, tmp_path, plan, orders, kind, (MUCH, MUCH))
    assert isinstance(first, Told)
    assert isinstance(second, Told)
    assert [report[0] for report in first.reports] == [report[0] for report in second.reports]
    assert [report[0] for report in first.reports] == [True, True, True, True, False, True, True]
    assert "no permutation" in first.reports[4][1]
    assert first.completions == second.completions
    reference = Reference(checkpoint.reference)
    assert [reference.disagreements(PROMPT, tokens) for tokens in first.completions] == [[]] * 4
    # Before and after the move each layer's tokens are counted once, by the rank that holds the expert.
    num_computed = len(PROMPT) + len(first.completions[0]) - 1
    for own, other, held in zip(first.counts, second.counts, (plan, moved), strict=True):
        for layer in range(3):
            assert sum(own[layer]) + sum(other[layer]) == num_computed * NUM_CHOSEN
            assert not any(n for expert, n in enumerate(own[layer]) if expert not in held.experts_of(0, layer))
            assert not any(n for expert, n in enumerate(other[layer]) if expert not in held.experts_of(1, layer))

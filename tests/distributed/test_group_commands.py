"""Commands are done by all processes of a group or by none, whatever carries their votes."""

from __future__ import annotations

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

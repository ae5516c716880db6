"""One GPU rank and two CPU ranks as processes: every path's logits are those that one CPU rank computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.distributed.exchange import LocalExchange
from tests.support.gpu_needed import skip_without_gpu
from tests.support.mixed_runners import body, largest_difference, work_off
from tests.support.quiet_step import WHOLE
from tests.support.random_model import save_random_llama
from tests.support.rank_processes import run_ranks
from tests.support.rank_shares import Shares

skip_without_gpu()

pytestmark = pytest.mark.gpu

LAYOUTS = {
    "CPU ranks on MLP only": Shares(
        kv_heads=((8, 0, 0),), mlp_columns=((192, 100, 28),), vocab_rows=(320, 0, 0)
    ),
    "CPU ranks with heads": Shares(
        kv_heads=((5, 1, 2),), mlp_columns=((192, 128, 0),), vocab_rows=(192, 0, 128)
    ),
    "the GPU on attention only": Shares(
        kv_heads=((8, 0, 0),), mlp_columns=((0, 120, 200),), vocab_rows=(0, 320, 0)
    ),
    "layers on the GPU, then on a CPU rank": Shares(
        kv_heads=((8, 0, 0), (8, 0, 0), (8, 0, 0), (0, 8, 0)),
        mlp_columns=((320, 0, 0), (320, 0, 0), (320, 0, 0), (0, 320, 0)),
        vocab_rows=(0, 320, 0),
        embedding_rows=(320, 0, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("shares", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("kind", [ranks_pb2.EXCHANGE_KIND_SHM, ranks_pb2.EXCHANGE_KIND_GLOO], ids=["shm", "gloo"])
def test_a_gpu_and_two_cpu_ranks_equal_one_cpu_rank(
    tmp_path: Path, shares: Shares, kind: ranks_pb2.ExchangeKind.ValueType
) -> None:
    model = save_random_llama(tmp_path / "model")
    expected = work_off(cpu_backend(memory_bytes=2 << 30), model, WHOLE, 0, LocalExchange())
    drawn = run_ranks(body, 3, kind, model, shares, 1, "float32", False)
    assert drawn[1] == drawn[0]
    assert drawn[2] == drawn[0]
    assert drawn[0][0].tokens == expected[0].tokens
    assert largest_difference(drawn[0], expected) <= 2e-3


def test_bfloat16_over_both_kinds_of_ranks(tmp_path: Path) -> None:
    model = save_random_llama(tmp_path / "model")
    expected = work_off(cpu_backend(memory_bytes=2 << 30), model, WHOLE, 0, LocalExchange())
    shares = LAYOUTS["CPU ranks on MLP only"]
    drawn = run_ranks(body, 3, ranks_pb2.EXCHANGE_KIND_SHM, model, shares, 1, "bfloat16", False)
    assert largest_difference(drawn[0], expected) <= 1.5

"""Stages in real processes, over every exchange: the same logits, and transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from tests.support import stage_bodies as bodies
from tests.support.exchange_bodies import shm_left_over
from tests.support.rank_processes import run_ranks, segment_prefix
from tests.support.rank_shares import Shares, layers_on
from tests.support.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.distributed

TOKENS = [(37 * i + 11) % 200 for i in range(90)]
WIDE = Shares(
    kv_heads=((5, 3, 0), (0, 0, 8)),
    mlp_columns=((17, 33, 0), (0, 0, 50)),
    vocab_rows=(0, 0, 200),
    embedding_rows=(64, 136, 0),
)


@pytest.mark.parametrize("shares", [layers_on(0, 1, 2, world_size=3), WIDE], ids=["1+1+1 ranks", "2+1 ranks"])
def test_all_exchanges_carry_the_same_states(tmp_path: Path, shares: Shares) -> None:
    checkpoint = save_tiny("qwen3", tmp_path)
    over_shm, over_tcp, over_gloo = (
        run_ranks(bodies.staged_logits, 3, kind, tmp_path, shares, TOKENS)
        for kind in (ranks_pb2.EXCHANGE_KIND_SHM, ranks_pb2.EXCHANGE_KIND_TCP, ranks_pb2.EXCHANGE_KIND_GLOO)
    )

    assert over_shm == over_tcp == over_gloo
    assert over_shm[:2] == [[[]] * len(TOKENS)] * 2
    assert (torch.tensor(over_shm[2]) - checkpoint.logits(TOKENS)).abs().max() <= 1e-4
    assert shm_left_over(segment_prefix()) == []

"""Runners of GPU and CPU ranks over the real exchange, device group and all: every path's logits are transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from tests.support.exchange_bodies import shm_left_over
from tests.support.graph_bodies import Replayed, graphs_body
from tests.support.mixed_runners import body
from tests.support.rank_processes import run_ranks, segment_prefix
from tests.support.rank_shares import Shares, layers_on
from tests.support.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "2 GPU + 2 CPU, CPU ranks on MLP only": (
        Shares(
            kv_heads=((5, 3, 0, 0),),
            mlp_columns=((11, 16, 3, 20),),
            vocab_rows=(64, 136, 0, 0),
            experts=((1, 2, 0, 3),),
        ),
        2,
    ),
    "2 GPU + 2 CPU, all have heads": (
        Shares(
            kv_heads=((3, 2, 2, 1),), mlp_columns=((20, 0, 29, 1),), vocab_rows=(64, 0, 64, 72), experts=((0, 3, 2, 1),)
        ),
        2,
    ),
    "2 GPU + 1 CPU, in stages": (layers_on(0, 1, 2, world_size=3), 2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("variant", ["qwen3-moe-some-dense", "gemma2"])
def test_every_path_equals_transformers(tmp_path: Path, variant: str, layout: tuple[Shares, int]) -> None:
    checkpoint = save_tiny(variant, tmp_path)
    shares, num_gpu_ranks = layout
    drawn = run_ranks(
        body, len(shares.vocab_rows), ranks_pb2.EXCHANGE_KIND_SHM, tmp_path, shares, num_gpu_ranks, "float32", True
    )
    assert drawn.count(drawn[0]) == len(drawn)
    assert len(drawn[0]) >= 20
    for draw in drawn[0]:
        expected = checkpoint.logits(draw.tokens)[-1]
        assert (torch.tensor(draw.logits) - expected).abs().max() <= 1e-4
    assert shm_left_over(segment_prefix()) == []


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_steps_that_are_replayed_equal_transformers(tmp_path: Path, layout: tuple[Shares, int]) -> None:
    checkpoint = save_tiny("gemma2", tmp_path)
    shares, num_gpu_ranks = layout
    ranks: list[Replayed] = run_ranks(
        graphs_body, len(shares.vocab_rows), ranks_pb2.EXCHANGE_KIND_SHM, tmp_path, shares, num_gpu_ranks
    )
    assert all(rank.drawn == ranks[0].drawn for rank in ranks)
    assert [rank.num_replayed > 0 for rank in ranks] == [i < num_gpu_ranks for i in range(len(ranks))]
    for draw in ranks[0].drawn:
        expected = checkpoint.logits(draw.tokens)[-1]
        assert (torch.tensor(draw.logits) - expected).abs().max() <= 1e-4
    assert shm_left_over(segment_prefix()) == []

"""Weights that are made, weights that are streamed: what the GPU bench computes with in place of a model's files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.gpu.shapes import TINY
from bench.gpu.weights import MadeWeights
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.plan_runner import PlanRunner
from tests.support.rank_shares import Shares

pytestmark = pytest.mark.unit

WHOLE = Shares(kv_heads=((2,),), mlp_columns=((256,),), vocab_rows=(512,))


def test_matrices_are_random_and_norms_are_ones() -> None:
    matrix, norm = torch.zeros(300, 64), torch.zeros(64)
    with MadeWeights(Path("nowhere")) as weights:
        weights.read(TensorSlice("a.weight", (300, 64)), matrix)
        weights.read(TensorSlice("a.norm", (64,)), norm)
    assert torch.equal(norm, torch.ones(64))
    assert matrix.std().item() == pytest.approx(0.02, rel=0.05)
    assert len(torch.unique(matrix)) > 10_000


def test_embeddings_tell_tokens_apart() -> None:
    embedding = torch.zeros(300, 64)
    with MadeWeights(Path("nowhere")) as weights:
        weights.read(TensorSlice("model.embed_tokens.weight", (300, 64)), embedding)
    assert embedding.std().item() == pytest.approx(4.0, rel=0.05)


def test_a_runner_loads_them_where_there_is_no_directory() -> None:
    request = LoadRequest(
        directory=Path("nowhere"), config=TINY, dtype="float32", shard_plan=WHOLE.plan(TINY.num_layers), rank=0,
        max_model_len=64, max_num_batched_tokens=64, max_num_seqs=2, memory_bytes=2 << 30, open_weights=MadeWeights,
    )  # fmt: skip
    runner = PlanRunner(cpu_backend())
    runner.attach(LocalExchange())
    assert runner.load(request).weight_bytes >= 4 * TINY.num_parameters

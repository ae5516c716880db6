"""A played GPU rank serves quantised models with weights that stay narrow, and draws what torch's operators draw."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cuda.backend import CudaBackend
from tests.support.pseudo_gpu import PseudoGpu
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.tiny_checkpoints import TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

PROMPT: Final = [7, 150, 3, 88, 199, 0, 42, 42, 64, 63, 127]
ALONE: Final = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),))
KERNEL: Final = "linear=torch, triton for one row and for quantised weights"


@pytest.fixture(scope="module", params=["llama-tied", "qwen3-moe"])
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TinyCheckpoint:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param), num_hidden_layers=1, head_dim=16)


@pytest.fixture
def _with_our_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "_triton_problem", None)
    monkeypatch.setattr(PseudoGpu, "linear", CudaBackend.linear)


def gpu_rank(directory: Path, quantization: str) -> RankGroup:
    return RankGroup(directory, ALONE, num_gpu_ranks=1, quantization=quantization)


def served(builder: PlanBuilder, slot: int = 0) -> tuple[list[int], torch.Tensor]:
    """Tokens of a prompt and some steps, and their logits."""
    builder.start(slot, PROMPT)
    outcomes = []
    for _ in range(3):
        builder.schedule(slot)
        outcomes.append(builder.run())
    tokens = list(builder.sequences[slot].tokens)
    builder.release(slot)
    return tokens, torch.cat([outcome.logits for outcome in outcomes])


def order(builder: PlanBuilder, command: ranks_pb2.GroupCommand) -> None:
    (output,) = builder.command(command).outputs
    assert output.report is not None
    assert output.report.done, output.report


@pytest.mark.parametrize("quantization", ["int4", "int8", "none"])
def test_it_draws_what_widened_weights_draw_and_all_of_it_sleeps(
    checkpoint: TinyCheckpoint, quantization: str, request: pytest.FixtureRequest
) -> None:
    plain = gpu_rank(checkpoint.directory, quantization)
    tokens, logits = served(PlanBuilder(plain))
    request.getfixturevalue("_with_our_linear_layers")
    narrow = gpu_rank(checkpoint.directory, quantization)
    builder = PlanBuilder(narrow)
    found, found_logits = served(builder)
    assert found == tokens
    torch.testing.assert_close(found_logits, logits, rtol=0, atol=1e-4)
    (before,), (report,), shard = plain.reports, narrow.reports, narrow.runners[0]._model_state.shard
    assert shard is not None
    assert report.kernels[0] == KERNEL
    assert (report.weight_bytes < 0.6 * before.weight_bytes) == (quantization != "none")
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in shard.decoder.tensors}
    assert 0.5 * report.weight_bytes < sum(storage.nbytes() for storage in storages.values()) <= report.weight_bytes
    order(builder, ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=1)))
    assert not any(storage.nbytes() for storage in storages.values())
    cache = ranks_pb2.AllocateCache(num_blocks=64, block_size=4)
    order(builder, ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(weights=True, cache=cache)))
    builder.use_blocks(64, 4)
    assert torch.equal(served(builder)[1], found_logits)

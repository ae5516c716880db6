"""A whole decoder with fused steps gives the logits of one without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_api.model_config import ModelConfig
from hetero_worker.attention.base import AttentionBackend
from hetero_worker.attention.torch_paged import TorchPagedAttention
from hetero_worker.attention.triton_paged import TritonPagedAttention
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.linear_kernels import PlainKernel
from hetero_worker.layers.triton_ops import TritonOps
from hetero_worker.models.decoder import Decoder
from tests.support.rank_shares import Shares
from tests.support.stages import BLOCK_SIZE, NUM_BLOCKS, KnownSequence, step_of
from tests.support.tiny_checkpoints import TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

HOST = torch.device("cpu")
ALONE = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),))
TOKENS = [17, 3, 99, 140, 8, 61, 77]
VARIANTS = ("llama-biased", "qwen3", "qwen3-moe-some-dense", "gemma3")
"""Without head norms and with them, with experts, and with GELU, norms of sums and weights less an offset."""


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TinyCheckpoint:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param), num_hidden_layers=2)


def logits_of(checkpoint: TinyCheckpoint, ops: FusedOps, attention: AttentionBackend) -> torch.Tensor:
    """A prompt in one step, and two tokens, one a step: of all three, with their rows of a batch."""
    config = ModelConfig.from_directory(checkpoint.directory)
    plan = ALONE.plan_for(config)
    decoder = Decoder(
        config, plan, rank=0, dtype=torch.float32, max_length=64, attention=attention, device=HOST, ops=ops
    )
    with Checkpoint(checkpoint.directory) as weights:
        decoder.load(weights, PlainKernel())
    caches = decoder.allocate_caches(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    sequence, rows = KnownSequence(TOKENS, [5, 2]), []
    for count in (len(TOKENS) - 2, 1, 1):
        step = step_of(((sequence, count),))
        with torch.inference_mode():
            rows.append(decoder.forward(step, caches=caches, exchange=LocalExchange()))
        sequence.computed += count
    return torch.cat(rows)


def test_kernels_for_all_of_it_give_the_same_logits(tmp_path: Path) -> None:
    """With attention by our kernels, which have no heads as narrow as the other checkpoints'."""
    checkpoint = save_tiny("qwen3", tmp_path, num_hidden_layers=2, head_dim=16)
    plain = logits_of(checkpoint, PLAIN_OPS, TorchPagedAttention(HOST))
    attention = TritonPagedAttention(HOST, head_dim=16, group_size=2, num_programs=16)
    torch.testing.assert_close(logits_of(checkpoint, TritonOps(), attention), plain, rtol=1e-4, atol=1e-4)


def test_fused_steps_give_the_same_logits(checkpoint: TinyCheckpoint) -> None:
    plain = logits_of(checkpoint, PLAIN_OPS, TorchPagedAttention(HOST))
    fused = logits_of(checkpoint, TritonOps(), TorchPagedAttention(HOST))
    assert len(plain) == len(TOKENS)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)

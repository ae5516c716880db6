"""A whole decoder with fused steps gives the logits of one without, whether attention reads the cache only or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_api.model_config import ModelConfig
from hetero_worker.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionRule,
    CacheReadingAttention,
    StepAttention,
)
from hetero_worker.attention.device_paged import DevicePagedAttention
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.triton_paged import TritonPagedAttention
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.linear_kernels import PlainKernel
from hetero_worker.layers.triton_ops import TritonOps
from hetero_worker.memory.loader import Checkpoint
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


class CacheReader:
    """A device's attention that gets queries only, and finds this step's keys and values in the cache."""

    name = "cache reader"
    gather_bytes = 0

    def __init__(self) -> None:
        self.written = 0
        self._inner = DevicePagedAttention(HOST)

    def begin(self, batch: AttentionBatch) -> StepAttention:
        return _Step(self, batch, self._inner.begin(batch))

    def release(self) -> None:
        """Nothing is kept."""


class _Step(CacheReadingAttention):
    def __init__(self, counts: CacheReader, batch: AttentionBatch, inner: StepAttention) -> None:
        self.slot_mapping = batch.slot_mapping
        self._counts = counts
        self._inner = inner

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, rule: AttentionRule
    ) -> torch.Tensor:
        raise AssertionError("keys and values are in the cache already")

    def attend_written(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        self._counts.written += 1
        key, value = (rows.index_select(0, self.slot_mapping) for rows in (cache.keys, cache.values))
        return self._inner.attend(query, key, value, cache, rule)


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TinyCheckpoint:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param), num_hidden_layers=2)


def logits_of(checkpoint: TinyCheckpoint, ops: FusedOps, attention: AttentionBackend) -> torch.Tensor:
    """A prompt in one step, and two tokens, one a step: of all three, with their rows of a batch."""
    config = ModelConfig.from_directory(checkpoint.directory)
    plan = ALONE.plan(config.num_layers, expert_layers=config.expert_layers)
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
    plain = logits_of(checkpoint, PLAIN_OPS, DevicePagedAttention(HOST))
    attention = TritonPagedAttention(HOST, head_dim=16, group_size=2)
    torch.testing.assert_close(logits_of(checkpoint, TritonOps(), attention), plain, rtol=1e-4, atol=1e-4)


def test_fused_steps_give_the_same_logits(checkpoint: TinyCheckpoint) -> None:
    plain = logits_of(checkpoint, PLAIN_OPS, DevicePagedAttention(HOST))
    fused = logits_of(checkpoint, TritonOps(), DevicePagedAttention(HOST))
    assert len(plain) == len(TOKENS)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ops", [PLAIN_OPS, TritonOps()], ids=lambda ops: ops.name)
def test_keys_that_are_written_as_they_are_rotated_give_the_same_logits(
    checkpoint: TinyCheckpoint, ops: FusedOps
) -> None:
    reader = CacheReader()
    plain = logits_of(checkpoint, PLAIN_OPS, DevicePagedAttention(HOST))
    torch.testing.assert_close(logits_of(checkpoint, ops, reader), plain, rtol=1e-4, atol=1e-4)
    assert reader.written == 3 * 2

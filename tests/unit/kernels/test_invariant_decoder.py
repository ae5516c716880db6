"""A whole decoder by our kernels gives a sequence the same bits alone, in company, in chunks and after a prefix hit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_api.model_config import ModelConfig
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.triton_paged import TritonPagedAttention
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.layers.fused_ops import FusedOps
from hetero_worker.layers.linear_kernels import LinearKernel, PlainKernel
from hetero_worker.layers.triton.linear import TritonKernel
from hetero_worker.layers.triton_ops import InvariantTritonOps, TritonOps
from hetero_worker.models.decoder import Decoder
from tests.support.rank_shares import Shares
from tests.support.stages import BLOCK_SIZE, NUM_BLOCKS, KnownSequence, step_of
from tests.support.tiny_checkpoints import TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

HOST = torch.device("cpu")
ALONE = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),))
TOKENS = [(17 + 31 * i * i) % 200 for i in range(11)]


class Rank:
    """A decoder by our kernels, and its cache."""

    def __init__(
        self, checkpoint: TinyCheckpoint, dtype: torch.dtype, *, kernel: LinearKernel, ops: FusedOps, invariant: bool
    ) -> None:
        config = ModelConfig.from_directory(checkpoint.directory)
        plan = ALONE.plan_for(config)
        attention = TritonPagedAttention(HOST, head_dim=16, group_size=2, batch_invariant=invariant, num_programs=16)
        self._decoder = Decoder(
            config, plan, rank=0, dtype=dtype, max_length=64, attention=attention, device=HOST, ops=ops
        )
        with Checkpoint(checkpoint.directory) as weights:
            self._decoder.load(weights, kernel)
        self._caches: list[LayerCache | None] = self._decoder.allocate_caches(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
        )

    def compute(self, *computing: tuple[KnownSequence, int]) -> list[torch.Tensor]:
        """So many tokens of each sequence, those with one first: the logits of each."""
        with torch.inference_mode():
            logits = self._decoder.forward(step_of(computing), caches=self._caches, exchange=LocalExchange())
        for sequence, count in computing:
            sequence.computed += count
        return list(torch.split(logits, [count for _, count in computing]))


def all_ways(rank: Rank) -> dict[str, torch.Tensor]:
    """Logits of all of TOKENS, or of the last ones."""
    whole, parts = KnownSequence(TOKENS, [5, 2, 9]), KnownSequence(TOKENS, [11, 10, 1])
    ways = {"whole": rank.compute((whole, len(TOKENS)))[0]}
    other = KnownSequence([*TOKENS[5:], *TOKENS], list(range(40, 45)))
    rank.compute((other, 9))
    pieces = [rank.compute((other, 1), (parts, count))[1] for count in (6, 1, 4)]
    ways["in chunks, in company"] = torch.cat(pieces)
    hit = KnownSequence(TOKENS, [5, 2, 61], computed=2 * BLOCK_SIZE)
    ways["after a prefix hit"] = rank.compute((hit, len(TOKENS) - hit.computed))[0]
    return ways


def saved(variant: str, folder: Path) -> TinyCheckpoint:
    return save_tiny(variant, folder, num_hidden_layers=2, head_dim=16)


@pytest.mark.parametrize(("variant", "dtype"), [("qwen3-moe-some-dense", torch.float32), ("gemma2", torch.bfloat16)])
def test_every_way_has_the_same_bits(tmp_path: Path, variant: str, dtype: torch.dtype) -> None:
    checkpoint = saved(variant, tmp_path)
    ways = all_ways(Rank(checkpoint, dtype, kernel=TritonKernel(HOST, dtype), ops=InvariantTritonOps(), invariant=True))
    for way, logits in ways.items():
        assert torch.equal(logits, ways["whole"][-len(logits) :]), way
    if dtype == torch.float32:
        torch.testing.assert_close(ways["whole"], checkpoint.logits(TOKENS), rtol=1e-4, atol=1e-4)


def test_without_these_kernels_some_way_has_others(tmp_path: Path) -> None:
    rank = Rank(saved("qwen3", tmp_path), torch.float32, kernel=PlainKernel(), ops=TritonOps(), invariant=False)
    ways = all_ways(rank)
    assert any(not torch.equal(logits, ways["whole"][-len(logits) :]) for logits in ways.values())

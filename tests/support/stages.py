"""Decoders of all ranks of a plan, driven step by step without runners: what a step computes is known beforehand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_worker.adapters.peft_files import LoraAdapter
from hetero_worker.attention.base import AttentionBatch, DecodeRows, PrefillSpan
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.torch_paged import TorchPagedAttention
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.layers.linear_kernels import LinearKernel, PlainKernel
from hetero_worker.models.decoder import Decoder, DecoderInput
from hetero_worker.models.decoder_layer import adapter_targets
from tests.support.rank_shares import Shares
from tests.support.thread_exchange import ThreadExchange, run_ranks, thread_exchanges

BLOCK_SIZE = 4
NUM_BLOCKS = 64
NUM_SLOTS = 8


@dataclass(slots=True)
class KnownSequence:
    """A sequence whose tokens are known; `computed` of them are in the cache."""

    tokens: list[int]
    blocks: list[int]
    slot: int = 0
    computed: int = 0
    adapter: int = 0


@dataclass(slots=True)
class Stages:
    """All ranks' decoders of one plan, loaded, on threads of this process."""

    directory: Path
    plan: ShardPlan
    decoders: list[Decoder]
    exchanges: list[ThreadExchange]
    caches: list[list[LayerCache | None]]
    free_blocks: list[int] = field(
        default_factory=lambda: random.Random(0).sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    )
    num_started: int = 0

    @classmethod
    def load(
        cls,
        directory: Path,
        shares: Shares,
        *,
        num_parts: int = 1,
        link_bytes: int = 1 << 20,
        expert_deferral: int = 0,
        new_kernel: Callable[[], LinearKernel] = PlainKernel,
    ) -> Stages:
        """Every step goes in `num_parts` micro-batches, as many as rows when there are fewer."""
        config = ModelConfig.from_directory(directory)
        plan = shares.plan_for(config)
        decoders = [
            load_decoder(directory, config, plan, rank, num_parts, expert_deferral, new_kernel())
            for rank in range(plan.world_size)
        ]
        caches = [
            decoder.allocate_caches(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS)
            for decoder in decoders
        ]
        return cls(directory, plan, decoders, thread_exchanges(plan.world_size, link_bytes=link_bytes), caches)

    def hold_adapter(self, number: int, directory: Path, new_kernel: Callable[[], LinearKernel] = PlainKernel) -> None:
        """Every rank takes its slices of an adapter."""
        targets = adapter_targets(ModelConfig.from_directory(self.directory), experts=True)
        for decoder in self.decoders:
            with LoraAdapter(directory, targets) as adapter:
                decoder.hold_adapter(number, decoder.read_adapter(adapter), new_kernel())

    def start(self, tokens: list[int], *, adapter: int = 0) -> KnownSequence:
        needed = -(-len(tokens) // BLOCK_SIZE)
        blocks = [self.free_blocks.pop() for _ in range(needed)]
        self.num_started += 1
        return KnownSequence(tokens, blocks, slot=self.num_started % NUM_SLOTS, adapter=adapter)

    def logits(self, *computing: tuple[KnownSequence, int]) -> torch.Tensor:
        """Compute so many tokens of each, those with one first; float32 [tokens, vocabulary] of all of them."""
        step = step_of(computing)
        outputs = run_ranks(self.exchanges, lambda rank: self._forward(rank, step))
        for sequence, count in computing:
            sequence.computed += count
        return torch.cat(outputs, dim=1)

    def _forward(self, rank: int, step: DecoderInput) -> torch.Tensor:
        exchange: Exchange = self.exchanges[rank]
        with torch.inference_mode():
            return self.decoders[rank].forward(step, caches=self.caches[rank], exchange=exchange)


def load_decoder(
    directory: Path,
    config: ModelConfig,
    plan: ShardPlan,
    rank: int,
    num_parts: int,
    expert_deferral: int = 0,
    kernel: LinearKernel | None = None,
) -> Decoder:
    decoder = Decoder(
        config,
        plan,
        rank=rank,
        dtype=torch.float32,
        max_length=128,
        attention=TorchPagedAttention(),
        count_parts=lambda num_rows, num_stages: num_parts,
        expert_deferral=expert_deferral,
        adapts_experts=True,
    )
    with Checkpoint(directory) as checkpoint:
        decoder.load(checkpoint, kernel or PlainKernel())
    return decoder


def step_of(computing: tuple[tuple[KnownSequence, int], ...]) -> DecoderInput:
    decoding = sorted((s for s, count in computing if count == 1), key=lambda s: -s.computed)
    assert [s for s, count in computing[: len(decoding)]] == decoding, "decode rows first, longest first"
    rows = [(sequence, sequence.computed + i) for sequence, count in computing for i in range(count)]
    spans, begin = [], len(decoding)
    for sequence, count in computing[len(decoding) :]:
        blocks = np.array(sequence.blocks, dtype=np.int32)
        spans.append(PrefillSpan(begin, begin + count, sequence.computed, blocks, sequence.slot))
        begin += count
    tables = np.zeros((len(decoding), NUM_BLOCKS), dtype=np.int32)
    for row, sequence in enumerate(decoding):
        tables[row, : len(sequence.blocks)] = sequence.blocks
    lengths = np.array([sequence.computed + 1 for sequence in decoding], dtype=np.int32)
    slots = np.array([sequence.slot for sequence in decoding], dtype=np.int64)
    mapping = [s.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for s, position in rows]
    return DecoderInput(
        token_ids=torch.tensor([sequence.tokens[position] for sequence, position in rows]),
        positions=torch.tensor([position for _, position in rows]),
        attention=AttentionBatch(torch.tensor(mapping), DecodeRows(lengths, tables, slots), tuple(spans)),
        logit_rows=None,
        adapters=torch.tensor([s.adapter for s, _ in rows]) if any(s.adapter for s, _ in rows) else None,
    )

"""Profile run: the largest step, made to measure what it takes beside weights and cache.

It has the most tokens, as the continuation of sequences as long as can be, and logits of as many rows as can be wanted
at a time. It runs alone, on a scratch cache, with no peers (`LoopbackExchange`), and through one layer of each kind
only, for layers take their memory one after another. It is made twice: native kernels' scratch stays from one layer to
the next. Its peak comes from the host's kernel or the device's allocator (`MemoryPool`), after the allocator has given
back what it keeps. A margin comes on top, and the sampler's memory, which is computed.

The loopback exchange also serves the probe and `checksum`, a small step that shows whether weights compute the same.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from hetero_api.rank_memory import LOGITS_AT_ONCE, PROMPT_LOGIT_ROWS, StepLimits, with_margin
from hetero_worker.attention.base import AttentionBatch, DecodeRows, IntArray, PrefillSpan
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.distributed.exchange import Arrived, PendingTensor, SendsAtOnce, SumExchange
from hetero_worker.distributed.routes import Link
from hetero_worker.errors import MemoryBudgetError
from hetero_worker.memory.budget import mib
from hetero_worker.memory.memory_pool import MemoryPool
from hetero_worker.models.decoder import Decoder, DecoderInput
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.shard import LoadedShard, limits_of, memory_of

logger = logging.getLogger(__name__)

_NULL_BLOCKS: Final = 1
_BLOCK_SIZE: Final = 16
"""The resource's default: a device compiles kernels for each size of blocks, and would do so for these steps alone."""


def measure_workspace(decoder: Decoder, request: LoadRequest, pool: MemoryPool) -> int | None:
    """Return the bytes that the largest step takes, beside what decode rows gather; None where they are unknown.

    Raises MemoryBudgetError when the step does not fit at all.
    """
    limits, began_s = limits_of(request), time.perf_counter()
    try:
        grown = _growth(decoder.shallow(), request, pool)
    except (MemoryError, RuntimeError) as error:
        raise MemoryBudgetError(
            f"a step of {limits.max_num_batched_tokens} tokens in sequences of {limits.max_model_len} cannot be made: "
            f"{str(error).partition(chr(10))[0]}; lower maxNumBatchedTokens or maxModelLen"
        ) from error
    finally:
        decoder.release_buffers()
    if grown is None:
        logger.info("this kernel does not tell peaks of memory: the workspace of a step is computed, not measured")
        return None
    memory, shard = memory_of(request), request.shard_plan.ranks[request.rank]
    sampler = (LOGITS_AT_ONCE - 1) * memory.logits_bytes(shard)
    logger.info(
        "the largest step took %s, in %.2f s; by its shapes at most %s",
        mib(grown),
        time.perf_counter() - began_s,
        mib(memory.workspace_bytes(shard) - sampler),
    )
    return with_margin(grown) + sampler


def _growth(decoder: Decoder, request: LoadRequest, pool: MemoryPool) -> int | None:
    """Return by how much the largest step grows the memory that is held, at its peak; None if unknown."""
    limits = limits_of(request)
    caches = _scratch_caches(decoder, limits.max_model_len, pool)
    step = _largest_step(limits, vocab_size=request.config.vocab_size, device=decoder.device)
    decoder.release_buffers()
    pool.release_unused()
    if not pool.begin_peak():
        return None
    with torch.inference_mode():
        for _ in range(2):  # a layer finds the scratch that one before it has left
            hidden = decoder.hidden(step, caches=caches, exchange=loopback_exchange(request))
            decoder.logits(hidden[: max(limits.max_num_seqs, PROMPT_LOGIT_ROWS)])
    return pool.peak_growth_bytes()


def _scratch_caches(decoder: Decoder, length: int, pool: MemoryPool) -> list[LayerCache | None]:
    """Return caches whose pages are in memory already, so that the step's growth is not theirs."""
    num_blocks = _NULL_BLOCKS + len(_block_ids(length))
    caches = decoder.allocate_caches(num_blocks=num_blocks, block_size=_BLOCK_SIZE, zeros=pool.zeros)
    for i in decoder.computed_layers:
        if (cache := caches[i]) is not None:
            cache.keys.zero_()
            cache.values.zero_()
    return caches


def _block_ids(length: int) -> IntArray:
    """Return the blocks of a sequence of this length in a scratch cache, int32 [blocks], behind the null block."""
    return np.arange(_NULL_BLOCKS, _NULL_BLOCKS - (-length // _BLOCK_SIZE), dtype=np.int32)


def _largest_step(limits: StepLimits, *, vocab_size: int, device: torch.device) -> DecoderInput:
    """Spans of up to half the longest sequence, each at its end: together as many tokens as are allowed."""
    tokens, length = limits.max_num_batched_tokens, limits.max_model_len
    rows = min(tokens, max(1, length // 2))
    block_ids = _block_ids(length)
    spans, positions = [], []
    for begin in range(0, tokens, rows):
        end = min(begin + rows, tokens)
        spans.append(PrefillSpan(begin, end, length - (end - begin), block_ids))
        positions.append(torch.arange(length - (end - begin), length, device=device))
    at = torch.cat(positions)
    return DecoderInput(
        token_ids=torch.arange(tokens, device=device) % vocab_size,
        positions=at,
        attention=AttentionBatch(at + _BLOCK_SIZE * _NULL_BLOCKS, NO_DECODE_ROWS, tuple(spans)),
        logit_rows=torch.arange(tokens, device=device),
    )


_CHECKED_TOKENS: Final = 16
NO_DECODE_ROWS: Final = DecodeRows(np.zeros(0, dtype=np.int32), np.zeros((0, 1), dtype=np.int32))


def checksum(shard: LoadedShard) -> int:
    """Return a checksum of the shard's result in a small step. The same weights, kernel and threads give the same.

    Every weight of the layers and the head takes part (of the embedding, the rows of some tokens spread over the
    vocabulary), so weights that are missing, mixed up or overwritten give another sum. A change too small to survive
    rounding does not.
    """
    request, device = shard.request, shard.decoder.device
    count = min(_CHECKED_TOKENS, request.max_model_len, request.config.vocab_size)
    step = DecoderInput(
        token_ids=torch.linspace(0, request.config.vocab_size - 1, count).long().to(device),
        positions=torch.arange(count, device=device),
        attention=AttentionBatch(
            slot_mapping=torch.arange(count, device=device) + _BLOCK_SIZE * _NULL_BLOCKS,
            decode=NO_DECODE_ROWS,
            prefills=(PrefillSpan(0, count, 0, _block_ids(count)),),
        ),
        logit_rows=None,
    )
    exchange = loopback_exchange(request)
    caches = shard.decoder.allocate_caches(
        num_blocks=_NULL_BLOCKS + 1, block_size=_BLOCK_SIZE, zeros=shard.memory_pool.zeros
    )
    with torch.inference_mode():
        exchange.add(shard.decoder.forward(step, caches=caches, exchange=exchange))
    return exchange.checksum


def loopback_exchange(request: LoadRequest) -> LoopbackExchange:
    """In the place of the group's."""
    return LoopbackExchange(rank=request.rank, world_size=request.shard_plan.world_size)


_PEERS_VALUE: Final = 0.5
_LINK_BYTES: Final = 2 * 1024 * 1024
"""As many as a real link takes."""


class LoopbackExchange(SendsAtOnce):
    """Exchange with played peers, for steps that one rank makes alone, with tensors on any device.

    The peers' tensors are a constant, and what this rank sends is kept as a checksum. So a step runs as it would in
    the group, with buffers of the same sizes, but waits for nobody. Its numbers are only good for comparison with
    those of the same step at another time.
    """

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self.checksum = 0
        """CRC of everything that this rank has sent."""

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks that are played."""
        return self._world_size

    @property
    def link_bytes(self) -> int:
        """Bytes that a link takes in."""
        return _LINK_BYTES

    def add(self, tensor: torch.Tensor) -> None:
        """Add the tensor's bits to the checksum."""
        self.checksum = zlib.crc32(tensor.contiguous().view(torch.uint8).cpu().numpy().data, self.checksum)

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """Add a contributor's tensor to the checksum; replace any other by the constant."""
        self._share(tensor, is_sender=self._rank in contributors)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Add the source's tensor to the checksum; replace any other by the constant."""
        self._share(tensor, is_sender=self._rank == source)

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return this rank's tensor among constants."""
        self.add(tensor)
        gathered = [torch.full((count,), _PEERS_VALUE).to(tensor.dtype) for count in counts]
        gathered[self._rank].copy_(tensor)
        return gathered

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        """Return an exchange that plays these ranks."""
        return _LoopbackSubgroup(self, len(ranks))

    def send(self, tensor: torch.Tensor, link: Link) -> None:  # noqa: ARG002
        """Add the tensor to the checksum."""
        self.add(tensor)

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:  # noqa: ARG002
        """Return `out` filled with the constant."""
        return Arrived(out.fill_(_PEERS_VALUE))

    def abort(self) -> None:
        """Return at once: no call ever blocks."""

    def close(self) -> None:
        """Return at once: there is nothing to free."""

    def _share(self, tensor: torch.Tensor, *, is_sender: bool) -> None:
        if is_sender:
            self.add(tensor)
        else:
            tensor.fill_(_PEERS_VALUE)


class _LoopbackSubgroup:
    """Ranks that a LoopbackExchange plays, including this one."""

    def __init__(self, whole: LoopbackExchange, world_size: int) -> None:
        self._whole = whole
        self._world_size = world_size

    @property
    def world_size(self) -> int:
        return self._world_size

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        self._whole.all_reduce(tensor, contributors)

"""Measures what the largest step takes beside weights and cache, by making it once.

The most tokens, as the continuation of sequences as long as can be, and logits of as many rows as can be wanted at a
time; alone, on a scratch cache, with no peers (`LoopbackExchange`), and through one layer of each kind only, for layers
take their memory one after another. Its peak is what the host's kernel or the device's allocator says
(`MemoryPool`), taken after the allocator has given back what it keeps. On top of it come a margin, and what the
sampler makes of the logits, which is computed.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import numpy as np
import torch

from hetero_api.rank_memory import LOGITS_AT_ONCE, PROMPT_LOGIT_ROWS, StepLimits, with_margin
from hetero_worker.attention.base import AttentionBatch, PrefillSpan
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.errors import MemoryBudgetError
from hetero_worker.memory.budget import mib
from hetero_worker.memory.memory_pool import memory_pool_of
from hetero_worker.models.decoder import Decoder, DecoderInput
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.rehearsal import NO_DECODE_ROWS, loopback_exchange
from hetero_worker.runners.shard import limits_of, memory_of

logger = logging.getLogger(__name__)

_BLOCK: Final = 1
"""The scratch cache has the null block and this one, as long as the longest sequence."""


def measure_workspace(decoder: Decoder, request: LoadRequest) -> int | None:
    """Bytes, beside what decode rows gather; None where nobody tells.

    Raises MemoryBudgetError when the step does not fit at all.
    """
    limits, began_s = limits_of(request), time.perf_counter()
    try:
        grown = _growth(decoder.shallow(), request)
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


def _growth(decoder: Decoder, request: LoadRequest) -> int | None:
    """By how much the largest step grows what is held, at its peak; None where nobody tells."""
    limits, pool = limits_of(request), memory_pool_of(decoder.device)
    caches = _scratch_caches(decoder, limits.max_model_len)
    step = _largest_step(limits, vocab_size=request.config.vocab_size, device=decoder.device)
    pool.release_unused()
    if not pool.begin_peak():
        return None
    with torch.inference_mode():
        hidden = decoder.hidden(step, caches=caches, exchange=loopback_exchange(request))
        decoder.logits(hidden[: max(limits.max_num_seqs, PROMPT_LOGIT_ROWS)])
    return pool.peak_growth_bytes()


def _scratch_caches(decoder: Decoder, length: int) -> list[LayerCache | None]:
    """In memory already, where they will be written to, so that the step's growth is not theirs."""
    caches = decoder.allocate_caches(num_blocks=_BLOCK + 1, block_size=length)
    for i in decoder.computed_layers:
        if (cache := caches[i]) is not None:
            cache.keys.zero_()
            cache.values.zero_()
    return caches


def _largest_step(limits: StepLimits, *, vocab_size: int, device: torch.device) -> DecoderInput:
    """Spans of up to half the longest sequence, each at its end: together as many tokens as are allowed."""
    tokens, length = limits.max_num_batched_tokens, limits.max_model_len
    rows = min(tokens, max(1, length // 2))
    block_ids = np.array([_BLOCK], dtype=np.int32)
    spans, positions = [], []
    for begin in range(0, tokens, rows):
        end = min(begin + rows, tokens)
        spans.append(PrefillSpan(begin, end, length - (end - begin), block_ids))
        positions.append(torch.arange(length - (end - begin), length, device=device))
    at = torch.cat(positions)
    return DecoderInput(
        token_ids=torch.arange(tokens, device=device) % vocab_size,
        positions=at,
        attention=AttentionBatch(at + length * _BLOCK, NO_DECODE_ROWS, tuple(spans)),
        logit_rows=torch.arange(tokens, device=device),
    )

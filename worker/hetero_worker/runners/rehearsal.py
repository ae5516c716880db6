"""Steps that a rank makes alone, on caches of their own, for what can be seen of them.

`checksum` tells whether weights are what they were: every weight of the layers and the head takes part in what comes
out (of the embedding, the rows of some tokens spread over the vocabulary), so weights that are missing, mixed up or
overwritten give another sum. A change too small to survive rounding does not.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from hetero_worker.attention.base import AttentionBatch, DecodeRows, PrefillSpan
from hetero_worker.models.decoder import DecoderInput
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.loopback import LoopbackExchange
from hetero_worker.runners.shard import LoadedShard

_CHECKED_TOKENS: Final = 16
_NULL_BLOCKS: Final = 1
NO_DECODE_ROWS: Final = DecodeRows(np.zeros(0, dtype=np.int32), np.zeros((0, 1), dtype=np.int32))


def checksum(shard: LoadedShard) -> int:
    """Return a checksum of the shard's result in a small step. The same weights, kernel and threads give the same."""
    request, device = shard.request, shard.decoder.device
    count = min(_CHECKED_TOKENS, request.max_model_len, request.config.vocab_size)
    step = DecoderInput(
        token_ids=torch.linspace(0, request.config.vocab_size - 1, count).long().to(device),
        positions=torch.arange(count, device=device),
        attention=AttentionBatch(
            slot_mapping=torch.arange(count, device=device) + count * _NULL_BLOCKS,
            decode=NO_DECODE_ROWS,
            prefills=(PrefillSpan(0, count, 0, np.array([_NULL_BLOCKS], dtype=np.int32)),),
        ),
        logit_rows=None,
    )
    exchange = loopback_exchange(request)
    caches = shard.decoder.allocate_caches(num_blocks=_NULL_BLOCKS + 1, block_size=count)
    with torch.inference_mode():
        exchange.add(shard.decoder.forward(step, caches=caches, exchange=exchange))
    return exchange.checksum


def loopback_exchange(request: LoadRequest) -> LoopbackExchange:
    """In the place of the group's."""
    return LoopbackExchange(rank=request.rank, world_size=request.shard_plan.world_size)

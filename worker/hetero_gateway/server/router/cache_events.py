"""Streams of the prefix cache's blocks, for a router that sends prompts where their prefix is.

A subscriber has a place in the order of batches, not a queue: one that is slow, or was away, goes on where it was
while the log reaches back that far. Otherwise, or without a place, it gets all blocks that are stored now, as a
snapshot whose numbers end where the log stands.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Final

from smg_grpc_proto.generated import common_pb2 as common

from hetero_gateway.engine.block_pool import CacheEvent, CacheLog, ClearedCache, RemovedBlock, StoredBlock

SNAPSHOT_BLOCKS: Final = 2048
"""Blocks in one chunk of a snapshot, unless too few batches came before it for so many chunks."""


class CacheEvents:
    """The log's batches for subscribers. One asyncio loop, on which the log is written."""

    def __init__(self, log: CacheLog) -> None:
        self._log = log
        self._news = asyncio.Event()
        log.begin(self._on_news)

    async def stream(self, start: int) -> AsyncIterator[common.KvEventBatch]:
        """Yield batches from number `start` on, for ever; 0: what is stored now, then what changes."""
        following = start
        while True:
            batches = self._log.since(following) if following else None
            if batches is None:  # it has no place, or the log is past it
                chunks = self._snapshot()  # which seals a batch
                following = self._log.last_number + 1
                for chunk in chunks:
                    yield chunk
                continue
            for batch in batches:
                yield _batch(batch.number, batch.events)
                following = batch.number + 1
            if following > self._log.last_number:
                await self._news.wait()

    def _on_news(self) -> None:
        # All that one turn of the engine brings is one batch.
        asyncio.get_running_loop().call_soon(self._seal)

    def _seal(self) -> None:
        self._log.seal()
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _snapshot(self) -> list[common.KvEventBatch]:
        """Return chunks with all blocks that are stored, numbered up to the last batch."""
        self._log.seal()
        last = self._log.last_number
        blocks = list(self._log.stored_blocks.values())
        count = max(1, min(last, -(-len(blocks) // SNAPSHOT_BLOCKS)))
        size = -(-len(blocks) // count) or 1
        chunks = []
        for index in range(count):
            events: list[CacheEvent] = [*blocks[index * size : (index + 1) * size]]
            batch = _batch(last - count + 1 + index, [*([] if index else [ClearedCache()]), *events])
            batch.snapshot.CopyFrom(common.KvSnapshotChunk(index=index, count=count, blocks=len(blocks)))
            chunks.append(batch)
        return chunks


def _batch(number: int, events: Iterable[CacheEvent]) -> common.KvEventBatch:
    return common.KvEventBatch(sequence_number=number, timestamp=time.time(), events=_events(events), dp_rank=0)


def _events(events: Iterable[CacheEvent]) -> Iterator[common.KvCacheEvent]:
    """Yield the protocol's events. Blocks that follow one another are one event."""
    run: list[StoredBlock] = []
    for event in events:
        if run and not (isinstance(event, StoredBlock) and event.parent == run[-1].key):
            yield _stored(run)
            run = []
        match event:
            case StoredBlock():
                run.append(event)
            case RemovedBlock(key):
                yield common.KvCacheEvent(removed=common.KvBlocksRemoved(block_hashes=[key]))
            case ClearedCache():
                yield common.KvCacheEvent(cleared=common.KvCacheCleared())
    if run:
        yield _stored(run)


def _stored(run: list[StoredBlock]) -> common.KvCacheEvent:
    blocks = [
        common.KvBlock(block_hash=each.key, token_ids=each.token_ids, block_size=len(each.token_ids)) for each in run
    ]
    return common.KvCacheEvent(stored=common.KvBlocksStored(blocks=blocks, parent_block_hash=run[0].parent))

"""Several streams read as one, in the order in which their events come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    """A stream is over, well or with an error."""

    error: BaseException | None


async def merged(streams: Sequence[tuple[K, AsyncIterable[T]]]) -> AsyncIterator[tuple[K, T]]:
    """Every event with its stream's key. What one stream raises is raised, and ends it all."""
    # One event of each stream at most waits here: the streams themselves merge what is not read.
    news: asyncio.Queue[tuple[K, T] | _End] = asyncio.Queue(maxsize=len(streams))
    readers = [asyncio.create_task(_read(key, stream, news)) for key, stream in streams]
    try:
        num_open = len(readers)
        while num_open:
            event = await news.get()
            if not isinstance(event, _End):
                yield event
                continue
            if event.error is not None:
                raise event.error
            num_open -= 1
    finally:
        for reader in readers:
            reader.cancel()


async def _read(key: K, stream: AsyncIterable[T], news: asyncio.Queue[tuple[K, T] | _End]) -> None:
    error: BaseException | None = None
    try:
        async for event in stream:
            await news.put((key, event))
    except Exception as raised:  # noqa: BLE001 — whoever reads the merged stream is told
        error = raised
    await news.put(_End(error))

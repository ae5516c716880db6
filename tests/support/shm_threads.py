"""Shared-memory exchanges with threads for ranks, each with a mapping of its own."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hetero_worker.distributed.native_exchange import load
from hetero_worker.distributed.routes import NO_ROUTES, Routes
from hetero_worker.distributed.shm_exchange import ShmExchange
from hetero_worker.distributed.shm_segment import SegmentLayout, ShmSegment, unlink

PAGE = mmap.PAGESIZE
T = TypeVar("T")


def native_library() -> Any:
    """The library, which tests need. `make native` builds it."""
    loaded = load()
    assert loaded.library is not None, loaded.reason
    return loaded.library


def segments(folder: Path, layout: SegmentLayout) -> list[ShmSegment]:
    """One segment, as each rank has it."""
    made = [ShmSegment.create("segment", layout, folder=folder)]
    made += [ShmSegment.attach("segment", layout, rank=rank, folder=folder) for rank in range(1, layout.world_size)]
    unlink("segment", folder=folder)
    return made


@contextmanager
def exchanges(
    folder: Path, world_size: int = 2, *, timeout_s: float = 20.0, routes: Routes = NO_ROUTES
) -> Iterator[list[ShmExchange]]:
    """Every rank's, in rank order."""
    made = [
        ShmExchange(segment, timeout_s=timeout_s, library=native_library())
        for segment in segments(folder, SegmentLayout(world_size, PAGE, routes))
    ]
    yield made
    for exchange in made:
        exchange.close()


def on_every_rank(ranks: list[Any], body: Callable[[Any], T]) -> list[T]:
    """Results in rank order."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(body, ranks))

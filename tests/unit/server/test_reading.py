"""Long requests are read in threads: few at once, and only so many bytes of them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from hetero_gateway.engine.errors import QueueFull
from hetero_gateway.server.reading import INLINE_BYTES, MAX_THREADS, MAX_WAITING_BYTES, RequestReader
from tests.unit.server.server_setup import served_model

pytestmark = pytest.mark.unit


class Gate:
    """Work that waits for a signal, and counts itself."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = threading.Semaphore(0)
        self.at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    def __call__(self) -> str:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.begun.release()
        assert self.open.wait(30)
        with self._lock:
            self.at_once -= 1
        return "read"


async def test_few_long_requests_are_read_at_once_and_too_many_bytes_are_refused(tmp_path: Path) -> None:
    reader, gate = RequestReader(served_model(tmp_path)), Gate()
    reading = [asyncio.create_task(reader.run(gate, cost=INLINE_BYTES + 1)) for _ in range(3 * MAX_THREADS)]
    for _ in range(MAX_THREADS):
        assert await asyncio.to_thread(gate.begun.acquire, timeout=30)
    with pytest.raises(QueueFull, match=r"long prompts of .* bytes wait to be read"):
        await reader.run(gate, cost=MAX_WAITING_BYTES)
    assert await reader.run(lambda: "short", cost=INLINE_BYTES) == "short"
    gate.open.set()
    assert await asyncio.gather(*reading) == ["read"] * len(reading)
    assert gate.most_at_once == MAX_THREADS
    # Nothing is held any longer: a request alone may be as long as it likes.
    assert await reader.run(lambda: "long", cost=2 * MAX_WAITING_BYTES) == "long"

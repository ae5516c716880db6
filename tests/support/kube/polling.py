"""Waiting for something to become true: poll with a deadline, never a bare sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

INTERVAL_S = 0.05


def poll(
    probe: Callable[[], T | None],
    *,
    timeout_s: float,
    describe: Callable[[], str] = lambda: "",
    interval_s: float = INTERVAL_S,
) -> T:
    """The first truthy value of `probe`. Fails with the description when the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {describe()}")
        time.sleep(interval_s)

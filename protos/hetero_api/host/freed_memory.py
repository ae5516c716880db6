"""Memory that was freed, and that the C library still keeps for what may come."""

from __future__ import annotations

import ctypes


def release_freed_memory() -> bool:
    """Give it back to the system, once; False where the C library cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))

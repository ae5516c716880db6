"""How malloc treats the buffers of a step.

Left alone, glibc may give large buffers back to the kernel when a step frees them, and the next step pays a page fault
for every 4 KiB of them again: measured, 1,536 in every decode step of 32 sequences (its 6 MiB of logits). So malloc is
told to keep freed memory of up to 32 MiB a piece and never to trim its heap. What a rank keeps in this way is bounded
by its largest step.

Between steps, when a rank goes to sleep, what is kept is given back (`hetero_api.host.freed_memory`).
"""

from __future__ import annotations

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_THRESHOLD_BYTES: Final = 32 * 1024 * 1024
"""The largest that glibc takes."""
_NEVER_TRIM: Final = 2**31 - 1


def keep_freed_memory() -> bool:
    """Set it up for this process; False where the C library has no mallopt, and only time is lost then."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM))

"""Long-lived host tensors on huge pages.

A KV block that is written for the first time costs a page fault for every 4 KiB of it, in every layer; on virtual
machines a fault costs several microseconds. On pages of 2 MiB there are 512 times fewer, and the reads of later steps
need fewer translations. Short-lived tensors are better off without: a huge page is zeroed whole each time.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Final

import torch

from hetero_worker.host.process_memory import advise

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE (Linux 5.14): fault pages in as a write would, and leave their content."""
_LOWEST_PRIORITY: Final = 19


def empty_on_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros whose memory is reserved now and given to the thread that touches it first.

    Huge pages are asked for, not demanded: the kernel may give small ones. Small tensors come from torch's allocator.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(*shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def populate_in_background(tensors: Sequence[torch.Tensor], begin: int, end: int) -> threading.Thread:
    """Fault in bytes [begin, end) of each tensor, a huge page of each in turn, on a thread of the lowest priority.

    Their content stays, so that they may be written meanwhile. The thread ends when one of them is gone, and where the
    kernel cannot do it or has no memory: pages then come as they are written.
    """
    left = [weakref.ref(tensor) for tensor in tensors]
    thread = threading.Thread(target=_populate, args=(left, begin, end), name="populate", daemon=True)
    thread.start()
    return thread


def _populate(tensors: Sequence[weakref.ref[torch.Tensor]], begin: int, end: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    for offset in range(begin, end, HUGE_PAGE_BYTES):
        for reference in tensors:
            tensor = reference()
            if tensor is None:
                return
            past = min(offset + HUGE_PAGE_BYTES, end, tensor.nbytes)
            first = (tensor.data_ptr() + offset) // mmap.PAGESIZE * mmap.PAGESIZE
            if past > offset and not advise(first, tensor.data_ptr() + past - first, _POPULATE_WRITE):
                return

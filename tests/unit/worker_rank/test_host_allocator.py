"""What the allocator's settings do, seen from processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetero_worker.memory.huge_pages import HUGE_PAGE_BYTES, empty_on_huge_pages

pytestmark = pytest.mark.unit

THP_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")

MALLOC = """
import ctypes, sys
from hetero_worker.host.process_memory import keep_freed_memory
class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "mapped", "mapped_bytes", "usmblks", "fsmblks", "used", "free", "top")]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype = Mallinfo2, ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
if sys.argv[1] == "kept":
    assert keep_freed_memory()
mapped = libc.mallinfo2().mapped
buffer = libc.malloc(20 << 20)
mapped = libc.mallinfo2().mapped - mapped
libc.free(buffer)
print(int(mapped == 0 and libc.mallinfo2().top >= 20 << 20))
"""

HUGE = """
import torch
from hetero_worker.memory.huge_pages import empty_on_huge_pages
cache = empty_on_huge_pages((16, 1024, 1024), torch.float32)
cache.fill_(1.0)
with open("/proc/self/smaps_rollup") as smaps:
    print(next(int(line.split()[1]) for line in smaps if line.startswith("AnonHugePages")))
"""


def run(program: str, *arguments: str) -> int:
    result = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True)
    return int(result.stdout)


def test_what_a_step_frees_stays_with_the_process() -> None:
    # 20 MiB come from the heap, not from a mapping of their own, and are still there when freed.
    assert run(MALLOC, "kept") == 1
    assert run(MALLOC, "as it is") == 0


@pytest.mark.skipif(
    not THP_MODE.exists() or "[never]" in THP_MODE.read_text(), reason="this kernel gives no huge pages"
)
def test_a_large_tensor_lies_on_huge_pages() -> None:
    assert run(HUGE) >= 32 * 1024  # kB, of 65,536


@pytest.mark.parametrize("shape", [(3, 5), (2, HUGE_PAGE_BYTES)], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_an_ordinary_tensor_of_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = empty_on_huge_pages(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    assert not tensor.any()
    tensor[1, 2] = 7
    assert float(tensor.sum()) == 7

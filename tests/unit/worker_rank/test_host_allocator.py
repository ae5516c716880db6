"""What the allocator's settings do, seen from processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetero_worker.platforms.huge_pages import HUGE_PAGE_BYTES, empty_on_huge_pages

pytestmark = pytest.mark.unit

THP_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")

KEPT = """
import sys
from hetero_worker.platforms.host_allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
import torch
def resident_mib():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4 // 1024
torch.ones(1024 * 1024)  # from here on malloc takes pieces of this size from its heap
before = resident_mib()
pieces = [torch.ones(768 * 1024) for _ in range(100)]
del pieces
print(resident_mib() - before)
"""

HUGE = """
import torch
from hetero_worker.platforms.huge_pages import empty_on_huge_pages
cache = empty_on_huge_pages((16, 1024, 1024), torch.float32)
cache.fill_(1.0)
with open("/proc/self/smaps_rollup") as smaps:
    print(next(int(line.split()[1]) for line in smaps if line.startswith("AnonHugePages")))
"""


def run(program: str, *arguments: str) -> int:
    result = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True)
    return int(result.stdout)


def test_what_a_step_frees_stays_with_the_process() -> None:
    # 100 pieces of 3 MiB, freed: as it is, the heap's top goes back to the kernel, to be faulted in again.
    assert run(KEPT, "kept") > 250
    assert run(KEPT, "as it is") < 50


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

"""Trial kernel: shows whether Triton can compile and run one, which takes a device, its driver and a host compiler."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _count(out, block: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, block), tl.arange(0, block))


def run_one(device: torch.device) -> None:
    """Compile and run a kernel: about a second the first time, then it is cached on disk.

    Raises RuntimeError for a wrong result, and lets Triton's own errors pass.
    """
    out = torch.full((4,), -1, dtype=torch.int32, device=device)
    _count[(1,)](out, block=4)
    if out.tolist() != [0, 1, 2, 3]:
        raise RuntimeError(f"a kernel on {device} stored {out.tolist()} instead of 0, 1, 2, 3")

"""One kernel that shows whether any can be compiled and run: a device, its driver and a host compiler must be there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _count(out, block: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, block), tl.arange(0, block))


def run_one(device: torch.device) -> None:
    """Raises what Triton raises when it cannot; about a second at first, then it is cached on disk."""
    out = torch.full((4,), -1, dtype=torch.int32, device=device)
    _count[(1,)](out, block=4)
    if out.tolist() != [0, 1, 2, 3]:
        raise RuntimeError(f"a kernel on {device} stored {out.tolist()} instead of 0, 1, 2, 3")

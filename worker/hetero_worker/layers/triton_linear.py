"""LinearKernel by our Triton matrix product. Imported only where it is used: it needs Triton."""

from __future__ import annotations

import torch

from hetero_worker.kernels.matmul import linear
from hetero_worker.layers.linear_kernels import PackedWeight


class TritonKernel:
    """Gives a row the same bits however many rows there are: `kernels.matmul` says how, and what it costs."""

    name = "triton-invariant"
    copies_weight = False

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        return lambda x, bias: linear(x, weight, bias)

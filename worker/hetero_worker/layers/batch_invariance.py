"""What a rank computes with in batch-invariant mode (`engine.batchInvariant`), where it is not attention.

A request's numbers are then the same to the last bit whatever else is in its batch, and however its prompt was split
over steps or found in the cache. Every part of a step gives a row bits of its own: attention (`attention.selection`),
linear layers and all that is between them (here), the order in which ranks' sums are added (`distributed.rank_order`).
"""

from __future__ import annotations

import torch

from hetero_api.errors import ModelError
from hetero_worker.kernels.availability import triton_problem
from hetero_worker.layers.fused_ops import FusedOps
from hetero_worker.layers.invariant_ops import InvariantOps
from hetero_worker.layers.linear_kernels import LinearKernel, RowKernel
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.layers.native_ops import NativeOps
from hetero_worker.native.issuing import Issuer
from hetero_worker.platforms.base import HOST


def invariant_ops(device: torch.device, *, issuer: Issuer | None = None) -> FusedOps:
    """On host cores by the native kernels where there is an issuer: they compute in float32, row by row anyhow.

    Raises ModelError for a device without our kernels.
    """
    if device.type == HOST.type:
        return InvariantOps() if issuer is None else NativeOps(issuer, others=InvariantOps())
    _require_triton(device)
    from hetero_worker.layers.triton_ops import InvariantTritonOps  # imports triton

    return InvariantTritonOps()


def invariant_kernel(usual: LinearKernel, *, device: torch.device) -> LinearKernel:
    """Return the kernel of batch-invariant mode.

    On host tensors `usual` if it is native, for its rows are independent, else torch row by row; on devices Triton's.
    Raises ModelError for a device without it.
    """
    if device.type == HOST.type:
        return usual if isinstance(usual, NativeLinear) else RowKernel()
    _require_triton(device)
    from hetero_worker.layers.triton_linear import TritonKernel  # imports triton

    return TritonKernel()


def _require_triton(device: torch.device) -> None:
    if (problem := triton_problem(device)) is not None:
        raise ModelError(
            f"batch-invariant mode needs our kernels on {device}, but {problem}; install what is missing, or turn "
            "engine.batchInvariant off"
        )

"""Choice of a rank's linear kernel and fused operators, by device, arithmetic type and batch invariance.

A host rank computes with the native kernels wherever their library is built, otherwise with torch's operators. A GPU
uses Triton's kernels where Triton works, otherwise torch's operators. Nothing is timed, so every rank of a group and
every start computes the same way. The choice is made when the decoder is built, and reported.

In batch-invariant mode (`engine.batchInvariant`) a request's numbers are the same to the last bit, regardless of the
rest of its batch and of how its prompt was split over steps or found in the cache. Every part of a step then computes
each row on its own: attention (`attention.selection`), linear layers and the operators between them (here), and the
order in which ranks' sums are added (`distributed.rank_order`).
"""

from __future__ import annotations

import logging

import torch

from hetero_api.errors import ModelError
from hetero_worker.backends.base import HOST
from hetero_worker.kernels.availability import triton_problem
from hetero_worker.layers.fused_ops import FusedOps, PlainOps
from hetero_worker.layers.invariant_ops import InvariantOps
from hetero_worker.layers.linear_kernels import LinearKernel, PlainKernel, RowKernel
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.layers.native_ops import NativeOps
from hetero_worker.native.op_queue import OpQueue

logger = logging.getLogger(__name__)


def usual_kernel(dtype: torch.dtype, op_queue: OpQueue | None) -> LinearKernel:
    """Return the kernel of a rank for inputs of `dtype`: native, or torch's without an op_queue.

    GPU ranks have none, and neither have host ranks whose native library is missing.
    """
    return PlainKernel() if op_queue is None else NativeLinear(op_queue, dtype)


def fused_ops_of(device: torch.device, *, op_queue: OpQueue | None = None, no_op_queue: str = "") -> FusedOps:
    """Return the operators of a rank on the device.

    `no_op_queue`: why a host rank has no native kernels. Slower operators report the reason in their name.
    """
    if device.type == HOST.type:
        return PlainOps(no_op_queue) if op_queue is None else NativeOps(op_queue)
    if (problem := triton_problem(device)) is not None:
        logger.warning("fused steps on %s are torch's operators, which are slower: %s", device, problem)
        return PlainOps(problem)
    from hetero_worker.layers.triton_ops import TritonOps  # imports triton

    return TritonOps()


def invariant_kernel(usual: LinearKernel, *, device: torch.device) -> LinearKernel:
    """Return the linear kernel of batch-invariant mode.

    On host tensors that is `usual` if it is native, since its rows are independent, else torch row by row; on other
    devices Triton's. Raises ModelError for a device without Triton.
    """
    if device.type == HOST.type:
        return usual if isinstance(usual, NativeLinear) else RowKernel()
    _require_triton(device)
    from hetero_worker.layers.triton_ops import TritonKernel  # imports triton

    return TritonKernel()


def invariant_ops(device: torch.device, *, op_queue: OpQueue | None = None) -> FusedOps:
    """Return the operators of batch-invariant mode; the native ones compute row by row anyway.

    Raises ModelError for a device without Triton.
    """
    if device.type == HOST.type:
        return InvariantOps() if op_queue is None else NativeOps(op_queue, others=InvariantOps())
    _require_triton(device)
    from hetero_worker.layers.triton_ops import InvariantTritonOps  # imports triton

    return InvariantTritonOps()


def _require_triton(device: torch.device) -> None:
    if (problem := triton_problem(device)) is not None:
        raise ModelError(
            f"batch-invariant mode needs our kernels on {device}, but {problem}; install what is missing, or turn "
            "engine.batchInvariant off"
        )

"""NativeSteps: how a host rank's steps are made."""

from __future__ import annotations

import torch

from hetero_worker.distributed.exchange import Exchange
from hetero_worker.native.op_queue import OpQueue, whole_lines
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.forward import EagerForward
from hetero_worker.runners.input_batch import InputBuffers
from hetero_worker.runners.plan_check import PlanBounds
from hetero_worker.runners.recorded.exchange import native_exchange_of
from hetero_worker.runners.recorded.forward import NativeForward
from hetero_worker.runners.recorded.sampling import NativeSampling
from hetero_worker.runners.step_parts import MultiStepParts, StepParts


class NativeSteps:
    """StepMaker of a host rank: it records steps where the kernels are native."""

    def __init__(self, op_queue: OpQueue | None, reason: str = "") -> None:
        """`reason`: why there is no queue that records."""
        self._op_queue = op_queue
        self._reason = reason

    def make(self, bounds: PlanBounds, request: LoadRequest) -> StepParts:
        """See `StepMaker.make`."""
        op_queue, inputs = self._op_queue, InputBuffers(bounds)
        if op_queue is None:
            return StepParts(inputs, EagerForward())
        draws = NativeSampling(op_queue, most_rows=bounds.max_num_seqs, block_size=bounds.block_size)
        forward = NativeForward(op_queue, logits_bytes=_logits_bytes(request), draws=draws)
        return StepParts(inputs, forward, multi_step=MultiStepParts(inputs, forward))

    def kernels(self, request: LoadRequest, exchange: Exchange | None) -> tuple[str, ...]:
        """See `StepMaker.kernels`."""
        if self._op_queue is None:
            return (f"steps=operator by operator{f' ({self._reason})' if self._reason else ''}",)
        experts = request.config.experts
        has_experts = any(layer.experts.size for layer in request.shard_plan.ranks[request.rank].layers)
        if experts is not None and experts.norms is not None and has_experts:
            return ("steps=operator by operator (torch joins sums of experts with norms of their own)",)
        in_pieces = exchange is not None and exchange.world_size > 1 and native_exchange_of(exchange) is None
        return (f"steps=recorded{' in pieces (sums and links between ranks break them)' if in_pieces else ''}",)

    def graph_sizes(self, request: LoadRequest) -> tuple[int, ...]:  # noqa: ARG002
        """Return none: host ranks have no graphs."""
        return ()


def _logits_bytes(request: LoadRequest) -> int:
    """Return the bytes of the most logits that a step has, and of their inputs; 0 if they are not recorded."""
    config, vocabulary = request.config, request.shard_plan.ranks[request.rank].head_rows.size
    if not vocabulary or config.logit_soft_cap is not None:
        return 0
    column_bytes = torch.float32.itemsize * request.max_num_seqs
    return whole_lines(column_bytes * config.hidden_size) + whole_lines(column_bytes * vocabulary)

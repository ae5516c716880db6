"""RecordedExchange: the Exchange of a step that is recorded as native operations.

Sums and messages of the native exchange are operations like any other, also those of a CPU rank in a group with GPU
ranks: what it exchanges goes through the host, whose rounds a GPU rank joins by the same library. Everything else that
crosses the host breaks the recording.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_worker.distributed.exchange import SENT, Exchange, PendingSend, PendingTensor, SumExchange
from hetero_worker.distributed.hierarchical import CpuRankSum, HierarchicalExchange
from hetero_worker.distributed.native_ends import NativeCall, NativeExchange, NativeRounds
from hetero_worker.distributed.routes import Link
from hetero_worker.native.compute_library import call_op
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.runners.graphs.breaking_exchange import BreakingExchange
from hetero_worker.runners.graphs.breaks import Breaks, CurrentStep


class RecordedExchange(BreakingExchange):
    """Exchange that records native sums and messages. Nothing is padded: the step's rows are all rows."""

    def __init__(self, exchange: Exchange, breaks: Breaks, step: CurrentStep, op_queue: OpQueue) -> None:
        super().__init__(exchange, breaks, step, records_device_sums=False)
        self._op_queue = op_queue
        self._native = native_exchange_of(exchange)

    @property
    def sums_natively(self) -> bool:
        """True if a sum among all ranks is an operation, or none is needed.

        With GPU ranks it is False, and the plan may need no such sum.
        """
        return self.world_size == 1 or isinstance(self._exchange, NativeExchange)

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        """Return the exchange of a subgroup; its sums are operations if the host exchange is native."""
        sums = self._exchange.among(ranks)
        rounds = sums.host if isinstance(sums, CpuRankSum) else sums
        return _NativeSums(sums, rounds, self._op_queue) if isinstance(rounds, NativeRounds) else super().among(ranks)

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        """Record a send, or break the recording."""
        if self._native is None or not tensor.numel():
            super().send(tensor, link)
        else:
            _submit(self._native.send_call(tensor, link), self._op_queue)

    def start_send(self, tensor: torch.Tensor, link: Link) -> PendingSend:
        """Record a send, or break the recording where it begins and finishes."""
        if self._native is None:
            return super().start_send(tensor, link)
        self.send(tensor, link)
        return SENT

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:
        """Return a receipt that is recorded when it is waited for, or that breaks the recording."""
        if self._native is None or not out.numel():
            return super().receive(out, link)
        return _NativeReceipt(self._native.receive_call(out, link), out, self._op_queue)


def native_exchange_of(exchange: Exchange) -> NativeExchange | None:
    """Return the exchange that carries all sums and messages of a CPU rank if it is native, else None."""
    host = exchange.host if isinstance(exchange, HierarchicalExchange) and not exchange.is_gpu_rank else exchange
    return host if isinstance(host, NativeExchange) else None


class _NativeSums:
    """SumExchange whose sums are operations, each a call of `rounds`."""

    def __init__(self, sums: SumExchange, rounds: NativeRounds, op_queue: OpQueue) -> None:
        self._sums = sums
        self._rounds = rounds
        self._op_queue = op_queue
        self.world_size = sums.world_size

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        sums = self._sums
        rounds = sums.rounds(tensor, contributors) if isinstance(sums, CpuRankSum) else [(tensor, contributors)]
        for part, meeting in rounds:
            _submit(self._rounds.all_reduce_call(part, meeting), self._op_queue)


class _NativeReceipt:
    """PendingTensor that becomes an operation when it is first waited for."""

    def __init__(self, call: NativeCall, out: torch.Tensor, op_queue: OpQueue) -> None:
        self._call: NativeCall | None = call
        self._out = out
        self._op_queue = op_queue

    def wait(self) -> torch.Tensor:
        call, self._call = self._call, None
        if call is not None:
            _submit(call, self._op_queue)
        return self._out


def _submit(call: NativeCall, op_queue: OpQueue) -> None:
    """Record the call. It works on the op queue's memory, as all of a recorded step does."""
    op_queue.call(call_op(call.function, *call.arguments), call.finish, call)

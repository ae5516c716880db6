"""NativeSumsExchange: the Exchange that a step sees which is recorded as native operations.

Sums that the native exchange takes are operations like any other; what else crosses the host breaks the recording.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_worker.distributed.exchange import Exchange, SumExchange
from hetero_worker.distributed.shm_native_rounds import NativeRounds
from hetero_worker.native.issuing import Issuer
from hetero_worker.runners.graphs.breaking_exchange import BreakingExchange
from hetero_worker.runners.graphs.breaks import Breaks
from hetero_worker.runners.graphs.current_step import CurrentStep


class NativeSumsExchange(BreakingExchange):
    """See the module. Nothing is padded: the step's rows are all rows."""

    def __init__(self, exchange: Exchange, breaks: Breaks, step: CurrentStep, issuer: Issuer) -> None:
        super().__init__(exchange, breaks, step, records_device_sums=False)
        self._issuer = issuer

    @property
    def sums_natively(self) -> bool:
        """Whether a sum among all ranks is an operation, or none is needed."""
        sums = self.among(tuple(range(self.world_size)))
        return sums.world_size == 1 or isinstance(sums, _NativeSums)

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        sums = self._exchange.among(ranks)
        return _NativeSums(sums, self._issuer) if isinstance(sums, NativeRounds) else super().among(ranks)


class _NativeSums:
    """A SumExchange whose sums are operations."""

    def __init__(self, rounds: NativeRounds, issuer: Issuer) -> None:
        self._rounds = rounds
        self._issuer = issuer

    @property
    def world_size(self) -> int:
        return self._rounds.world_size

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        call = self._rounds.all_reduce_call(tensor, contributors)
        self._issuer.call(call.op, call.finish, call)

"""LowRank by the native kernels: one operation a layer, which finds each row's adapter whenever it runs.

So a recorded step serves any mix of adapters, and stays valid when adapters come and go. A row's bits depend on that
row and its adapter alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_worker.adapters.low_rank import MAX_ADAPTERS, AdapterRows, LowRank
from hetero_worker.adapters.peft_files import LowRankFactors
from hetero_worker.native.compute_library import FORMATS, ffi, low_rank_op
from hetero_worker.native.loading import address_of
from hetero_worker.native.op_queue import OpQueue


class NativeLowRank(LowRank):
    """Adapters' products of one linear layer on an op queue's team."""

    def __init__(self, op_queue: OpQueue, heights: Sequence[int], rows: AdapterRows) -> None:
        super().__init__(heights, rows)
        self._op_queue = op_queue
        self._ends = ffi.new("uint64_t[]", [end for _, end in self._bounds])
        self._table = ffi.new("hc_factors[]", (MAX_ADAPTERS + 1) * len(heights))
        self._held: dict[int, list[torch.Tensor]] = {}

    def hold(self, number: int, factors: Sequence[LowRankFactors | None], dtype: torch.dtype) -> None:
        """See `LowRank.hold`."""
        kept: list[torch.Tensor] = []
        for part, each in enumerate(factors):
            entry = self._table[number * len(factors) + part]
            entry.rank = 0
            if each is not None:
                down, up = each.down.to(dtype).contiguous(), each.up.T.to(dtype).contiguous()
                kept += (down, up)
                entry.down, entry.up = down.data_ptr(), up.data_ptr()
                entry.rank = len(down)
        self._held[number] = kept

    def drop(self, number: int) -> None:
        """See `LowRank.drop`."""
        for part in range(len(self._bounds)):
            self._table[number * len(self._bounds) + part].rank = 0
        self._held.pop(number, None)

    def _add(self, x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> None:
        if x.stride(1) != 1:
            x = x.contiguous()
        (rows, width), parts = x.shape, len(self._bounds)
        op = low_rank_op(rows, FORMATS[x.dtype], width, x.data_ptr(), x.stride(0), parts, address_of(self._ends))
        op.y, op.numbers, op.adapters = y.data_ptr(), numbers.data_ptr(), MAX_ADAPTERS + 1
        op.table = address_of(self._table)
        op.scratch = self._op_queue.scratch(op)
        self._op_queue.submit(op, self, numbers)

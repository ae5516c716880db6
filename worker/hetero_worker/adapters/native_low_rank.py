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


class NativeFactors:
    """An adapter's factors of a layer's parts, as the kernels take them: in 16 bits where that loses nothing."""

    def __init__(self, factors: Sequence[LowRankFactors | None], dtype: torch.dtype) -> None:
        """None: the adapter leaves the part as it is."""
        self.kept: list[torch.Tensor] = []
        """Both factors of each part that is changed."""
        self._table = ffi.new("hc_factors[]", len(factors))
        for entry, each in zip(self._table, factors, strict=True):
            if each is not None:
                kept = _narrowest(each, dtype)
                down, up = each.down.to(kept).contiguous(), each.up.T.to(kept).contiguous()
                self.kept += (down, up)
                entry.type, entry.rank = FORMATS[kept], len(down)
                entry.down, entry.up = down.data_ptr(), up.data_ptr()

    def __bool__(self) -> bool:
        """Return True if the adapter changes any part."""
        return bool(self.kept)

    @property
    def address(self) -> int:
        """Address of the hc_factors; 0 if the adapter changes nothing."""
        return address_of(self._table) if self.kept else 0


def _narrowest(factors: LowRankFactors, dtype: torch.dtype) -> torch.dtype:
    """Return the narrowest type in which both factors are as exact as in `dtype`."""
    if dtype != torch.float32:
        return dtype
    narrow = (torch.bfloat16, torch.float16)
    return next((kept for kept in narrow if all(torch.equal(each.to(kept).to(dtype), each) for each in factors)), dtype)


class NativeLowRank(LowRank):
    """Adapters' products of one linear layer on an op queue's team."""

    def __init__(self, op_queue: OpQueue, heights: Sequence[int], rows: AdapterRows) -> None:
        super().__init__(heights, rows)
        self._op_queue = op_queue
        self._ends = ffi.new("uint64_t[]", [end for _, end in self._bounds])
        self._table = ffi.new("uintptr_t[]", MAX_ADAPTERS + 1)
        self._held: dict[int, NativeFactors] = {}

    def hold(self, number: int, factors: Sequence[LowRankFactors | None], dtype: torch.dtype) -> None:
        """See `LowRank.hold`."""
        self._held[number] = held = NativeFactors(factors, dtype)
        self._table[number] = held.address

    def drop(self, number: int) -> None:
        """See `LowRank.drop`."""
        self._table[number] = 0
        self._held.pop(number, None)

    def _add(self, x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> None:
        if x.stride(1) != 1:
            x = x.contiguous()
        (rows, width), parts = x.shape, len(self._bounds)
        types = FORMATS[x.dtype], FORMATS[y.dtype]
        op = low_rank_op(rows, *types, width, x.data_ptr(), x.stride(0), parts, address_of(self._ends))
        op.y, op.numbers, op.adapters = y.data_ptr(), numbers.data_ptr(), MAX_ADAPTERS + 1
        op.table = address_of(self._table)
        op.scratch = self._op_queue.scratch(op)
        self._op_queue.submit(op, self, numbers)

"""Low-rank products that adapters add to a linear layer, each to the rows of the step that ask for it.

Adapters have numbers from 1 to MAX_ADAPTERS; 0 means none. Rows of several adapters, and rows of none, may stand in one
step. A step without such rows does nothing here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch

from hetero_worker.adapters.peft_files import MAX_RANK, LowRankFactors

MAX_ADAPTERS: Final = 64
"""Adapters that a rank holds at once, at most."""
Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Returns x · Wᵀ + b, [rows, out], of x [rows, in] and b."""


class AdapterRows:
    """Adapters of the rows that a decoder computes now; all of its layers look here."""

    def __init__(self, max_rank: int = MAX_RANK) -> None:
        """`max_rank`: the largest of an adapter."""
        self.max_rank: Final = max_rank
        self.numbers: torch.Tensor | None = None
        """int64 [rows] on the rank's device: the number of each row's adapter, 0: none. None: no row has one."""
        self._all: torch.Tensor | None = None
        self._groups: dict[int, torch.Tensor] | None = None

    def begin(self, numbers: torch.Tensor | None) -> None:
        """Go on to other rows, see `numbers`."""
        self._all = self.numbers = numbers
        self._groups = None

    def select(self, begin: int, end: int) -> None:
        """Go on to rows [begin, end) of those that `begin` was called with."""
        if self._all is not None:
            self.numbers = self._all[begin:end]
            self._groups = None

    def groups(self) -> dict[int, torch.Tensor]:
        """Return the rows of each adapter, int64 on the rank's device, which the host waits for. There must be some."""
        assert self.numbers is not None, "no row has an adapter"
        if self._groups is None:
            found = sorted(set(self.numbers.tolist()))
            self._groups = {n: (self.numbers == n).nonzero()[:, 0] for n in found if n}
        return self._groups


class LowRank(ABC):
    """Adapters' products of one linear layer."""

    def __init__(self, heights: Sequence[int], rows: AdapterRows) -> None:
        """`heights`: output rows of each of the layer's parts, which adapters may change or not."""
        self._bounds: Final = tuple(pairwise(accumulate(heights, initial=0)))
        self._rows: Final = rows
        self._held: Mapping[int, object] = {}
        """What is kept of each adapter, by its number; nothing of one that leaves the layer as it is."""

    @property
    def is_asked(self) -> bool:
        """Whether rows of the step have adapters."""
        return self._rows.numbers is not None

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the products of rows x [rows, in] to the layer's outputs y [rows, out], contiguous, in place."""
        if self._rows.numbers is not None:
            self._add(x, y, self._rows.numbers)

    @abstractmethod
    def hold(self, number: int, factors: Sequence[LowRankFactors | None], dtype: torch.dtype) -> None:
        """Keep an adapter's factors of each part in a type; None: it leaves the part as it is."""

    @abstractmethod
    def drop(self, number: int) -> None:
        """Forget an adapter; no row has it. Does nothing if it is not held."""

    @abstractmethod
    def _add(self, x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> None:
        """As `add`, for rows some of which have adapters."""


class PackedLowRank(LowRank):
    """LowRank by a linear kernel's products, one adapter after another: a row's bits are as the kernel makes them."""

    def __init__(
        self,
        heights: Sequence[int],
        rows: AdapterRows,
        *,
        pack: Callable[[torch.Tensor], Product],
        device: torch.device,
    ) -> None:
        """`pack` makes the product with a weight [out, in] on the device."""
        super().__init__(heights, rows)
        self._pack = pack
        self._device = device
        self._held: dict[int, list[tuple[slice, Product, Product]]] = {}

    def hold(self, number: int, factors: Sequence[LowRankFactors | None], dtype: torch.dtype) -> None:
        """See `LowRank.hold`."""
        self._held[number] = [
            (slice(*bounds), self._packed(each.down, dtype), self._packed(each.up, dtype))
            for bounds, each in zip(self._bounds, factors, strict=True)
            if each is not None
        ]

    def drop(self, number: int) -> None:
        """See `LowRank.drop`."""
        self._held.pop(number, None)

    def _packed(self, factor: torch.Tensor, dtype: torch.dtype) -> Product:
        return self._pack(factor.to(device=self._device, dtype=dtype).contiguous())

    def _add(self, x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> None:  # noqa: ARG002 - groups know
        for number, index in self._rows.groups().items():
            own = x.index_select(0, index)
            for columns, down, up in self._held.get(number, ()):
                y[:, columns].index_add_(0, index, up(down(own, None), None))

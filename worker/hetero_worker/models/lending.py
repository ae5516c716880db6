"""How a stage's leader has others compute part of an MLP: it lends its hidden states and takes partial sums back.

Ranks that own MLP columns or experts of a layer, and no heads, are its *helpers*. They hold no residual stream; what
they need of it comes over the *lend* link after the attention's sum, as soon as it exists, and their partial sums go
back over a *return* link each. Meanwhile the leader computes its own part; the wait is at the add, in rank order, in
fp32, rounded once. A layer costs the leader one message out and every helper one message back, rows · hidden each.

Many rows go in slices, so that what one rank does with a slice overlaps with what others do with the next. The leader
lends slice k + ahead only when all partial sums of slice k have come. Nobody waits in a circle for that:

* A link has room for `ahead` slices (`row_slices` sees to it, or else ahead is 1), and no more than that are ever
  lent and not returned. So a helper never waits for room to return a sum. With ahead = 2 the leader does not wait for
  room to lend either; with ahead = 1 it may, while all helpers are waiting for just that slice, and take it.
* What is left are waits for something to come: a helper's for slice k, which the leader sends before it waits for
  anything of that slice; the leader's for a sum of slice k, which the helper sends once it has slice k and has
  returned slice k - 1. All go through layers, micro-batches and stages in the same order (pipeline.py).

A leader's device copies all slices off before it is given its own part, however many may be lent by then: what is given
to a device later is done later. They are sent when it is their turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Final

import torch

from hetero_worker.distributed.exchange import Exchange, PendingSend, PendingTensor, sum_in_order
from hetero_worker.distributed.routes import HelperLinks
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps, empty_like

SLICE_ROWS: Final = 128
"""Rows of a slice at most: enough that reading the weights is little of the work."""
AHEAD: Final = 2
"""Slices that may be lent and not yet returned."""

Mlp = Callable[[torch.Tensor], torch.Tensor]
"""One rank's part of an MLP: hidden [rows, hidden] to partial [rows, hidden]."""


@dataclass(frozen=True, slots=True)
class RowSlices:
    """How rows are cut, the same on the leader and its helpers."""

    bounds: tuple[tuple[int, int], ...]
    """Rows [begin, end) of each slice."""
    ahead: int
    """Slices that may be lent and not yet returned."""


def row_slices(num_rows: int, *, row_bytes: int, link_bytes: int) -> RowSlices:
    """About equal slices of up to SLICE_ROWS rows, `ahead` of which fit in the link; or single rows, one at a time."""
    fitting = link_bytes // AHEAD // row_bytes
    most = max(1, min(SLICE_ROWS, fitting))
    number = -(-num_rows // most)
    cuts = [num_rows * i // number for i in range(number + 1)] if number else [0]
    return RowSlices(tuple(pairwise(cuts)), AHEAD if fitting else 1)


class Lending:
    """The leader's end, or a helper's, for one step."""

    def __init__(
        self, links: HelperLinks, exchange: Exchange, *, at_once: bool = False, ops: FusedOps = PLAIN_OPS
    ) -> None:
        """`at_once`: the leader's device is given its own part of all rows first, and computes on while others wait."""
        self._ops = ops
        self._exchange = exchange
        self._at_once = at_once
        self._copies_all = at_once and all(exchange.is_staged(link) for link in (links.lend, *links.returns))
        """Whether the device's copies of all slices are asked for before anything else."""
        self._lend = links.lend
        self._returns = links.returns
        leader = links.lend.source
        self._rank_order = sum(link.source < leader for link in links.returns)
        """How many helpers come before the leader."""
        self._own_return = next((link for link in links.returns if link.source == exchange.rank), None)
        self._slices: tuple[torch.Size, RowSlices] | None = None
        """How states of the shape that was last seen are cut: it is the same for all layers."""

    def sum(self, hidden: torch.Tensor, own: Mlp | None) -> torch.Tensor:
        """On the leader: its own partial and all helpers', added: [rows, hidden], new. `own` is its part of the MLP."""
        slices = self._cut(hidden)
        pieces = [hidden[begin:end] for begin, end in slices.bounds]
        if len(pieces) == 1:
            return next(self._sums(pieces, own, slices.ahead, hidden))
        total = empty_like(self._ops, hidden)
        for (begin, end), summed in zip(slices.bounds, self._sums(pieces, own, slices.ahead, hidden), strict=True):
            total[begin:end] = summed
        return total

    def help(self, like: torch.Tensor, mlp: Mlp) -> None:
        """On a helper: its partial sums of the rows that are lent to it. `like` [rows, hidden] tells their shape."""
        if self._own_return is None:
            raise ValueError(f"rank {self._exchange.rank} is no helper of rank {self._lend.source}")
        slices = self._cut(like)
        coming: deque[PendingTensor] = deque()
        for k in range(len(slices.bounds)):
            for begin, end in slices.bounds[k + len(coming) : k + slices.ahead]:
                coming.append(self._exchange.receive(empty_like(self._ops, like[begin:end]), self._lend))
            self._exchange.send(mlp(coming.popleft().wait()), self._own_return)

    def _cut(self, hidden: torch.Tensor) -> RowSlices:
        if self._slices is None or self._slices[0] != hidden.shape:
            row_bytes = hidden.shape[1] * hidden.element_size()
            slices = row_slices(len(hidden), row_bytes=row_bytes, link_bytes=self._exchange.link_bytes)
            self._slices = hidden.shape, slices
        return self._slices[1]

    def _sums(
        self, pieces: Sequence[torch.Tensor], own: Mlp | None, ahead: int, whole: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Of each slice, in turn."""
        lent: deque[_Lent] = deque()
        started = len(pieces) if self._copies_all else ahead
        partials = self._own_partials(pieces, own, whole)
        for k in range(len(pieces)):
            lent.extend(self._start(piece) for piece in pieces[k + len(lent) : k + started])
            partial = next(partials)  # what is lent is on its way
            for slice_lent in islice(lent, ahead):
                slice_lent.finish()
            yield self._add(partial, [pending.wait() for pending in lent.popleft().sums])

    def _own_partials(
        self, pieces: Sequence[torch.Tensor], own: Mlp | None, whole: torch.Tensor
    ) -> Iterator[torch.Tensor | None]:
        """The leader's, of each slice in turn, computed when the first is asked for, or each when it is."""
        if own is None:
            yield from [None] * len(pieces)
        elif self._at_once:
            yield from torch.split(own(whole), [len(piece) for piece in pieces])
        else:
            yield from map(own, pieces)

    def _start(self, piece: torch.Tensor) -> _Lent:
        send = self._exchange.start_send(piece, self._lend)
        return _Lent(send, [self._exchange.receive(empty_like(self._ops, piece), link) for link in self._returns])

    def _add(self, partial: torch.Tensor | None, sums: list[torch.Tensor]) -> torch.Tensor:
        terms = sums if partial is None else [*sums[: self._rank_order], partial, *sums[self._rank_order :]]
        if terms[0].dtype == torch.float32:  # every addition rounds: one after another is in order
            for term in terms[1:]:
                self._ops.add(terms[0], term)
            return terms[0]
        if len(terms) == 1:
            return terms[0]
        total = terms[0] if len(terms) == 2 else torch.empty_like(terms[0])
        sum_in_order(terms, total)
        return total


class _Lent:
    """A slice that helpers work on."""

    def __init__(self, send: PendingSend, sums: list[PendingTensor]) -> None:
        self.sums = sums
        self._send: PendingSend | None = send

    def finish(self) -> None:
        """Have it sent, once."""
        if self._send is not None:
            self._send.finish()
            self._send = None

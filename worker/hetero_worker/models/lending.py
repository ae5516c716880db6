"""Lending: a stage's leader sends its hidden states to helpers, which compute part of an MLP and return partial sums.

Ranks that own MLP columns or experts of a layer, but no heads, are its *helpers*. They have no residual stream; its
rows come over the *lend* link as soon as the attention's sum exists, and partial sums go back over a *return* link per
helper. Meanwhile the leader computes its own part. It waits at the addition, which is in rank order, in fp32, and
rounded once. A layer costs the leader one message out and every helper one message back, rows · hidden each.

Many rows go in slices, so that ranks work on different slices at the same time. Rows of experts go in one or few, for
every slice reads nearly all of the weights: its ways there and back are a small part of what that takes. The leader
lends slice k + ahead only after all partial sums of slice k have arrived. This cannot deadlock:

* With ahead = 2 a link has room for both slices, and at most so many are lent and not returned. So nobody waits for
  room. With ahead = 1 a slice may be larger than the link. The leader may wait for room to lend it, while all helpers
  wait for just that slice, and take it. A helper may wait for room to return its sum, which the leader comes to take.
* The other waits are for arrivals. A helper waits for slice k, which the leader sends before it waits for any part of
  that slice. The leader waits for a sum of slice k, which a helper sends after it has received slice k and returned
  slice k - 1. All ranks go through layers, micro-batches and stages in the same order (`pipeline`).

A helper may return a part of its sums a layer late (`help`): each sum that it returns then includes what the layer
before still owes. The late part is computed after the sum of its slice was returned, while the leader goes on to the
next layer. So the number and the order of messages are the same.

A leader with a device copies all slices off the device before its own part starts, because a device executes in order.
The copies are sent when it is their turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Final

import torch

from hetero_worker.distributed.exchange import Exchange, PendingSend, PendingTensor
from hetero_worker.distributed.routes import HelperLinks
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps, empty_like
from hetero_worker.layers.linear_kernels import LateSum

SLICE_ROWS: Final = 128
"""Most rows of a dense layer's slice: enough to make reading the weights a small part of the work."""
AHEAD: Final = 2
"""Most slices that are lent and not yet returned."""

Mlp = Callable[[torch.Tensor], torch.Tensor]
"""One rank's part of an MLP, from hidden [rows, hidden] to partial [rows, hidden]."""

MlpInTwo = Callable[[torch.Tensor], tuple[torch.Tensor, LateSum]]
"""One rank's part of an MLP, as a sum and what returns the rest of it, [rows, hidden] each."""


@dataclass(frozen=True, slots=True)
class RowSlices:
    """A step's rows in slices, the same on the leader and its helpers."""

    bounds: tuple[tuple[int, int], ...]
    """Rows [begin, end) of each slice."""
    ahead: int
    """Most slices that are lent and not yet returned."""


def row_slices(num_rows: int, *, row_bytes: int, link_bytes: int, expert_helpers: int = 0) -> RowSlices:
    """Return about equal slices, with an `ahead` of 1 if not even two fit in the link.

    Those of a dense layer have up to SLICE_ROWS rows, and two fit unless they are single rows. Of a layer with experts
    and so many helpers, SLICE_ROWS go in one, and more in a slice for every two helpers, however large it is: so sums
    that are returned at a time have no more than twice the step's rows.
    """
    fitting = link_bytes // AHEAD // row_bytes
    if expert_helpers:
        most = max(SLICE_ROWS, -(-2 * num_rows // max(2, expert_helpers)))
    else:
        most = max(1, min(SLICE_ROWS, fitting))
    number = -(-num_rows // most)
    cuts = [num_rows * i // number for i in range(number + 1)] if number else [0]
    return RowSlices(tuple(pairwise(cuts)), AHEAD if min(num_rows, most) <= fitting else 1)


class Lending:
    """The leader's or a helper's end, for one step."""

    def __init__(
        self,
        links: HelperLinks,
        exchange: Exchange,
        *,
        at_once: bool = False,
        sum_width: int | None = None,
        ops: FusedOps = PLAIN_OPS,
        on_rows: Callable[[int, int], None] = lambda _begin, _end: None,
    ) -> None:
        """`at_once`: the leader's device starts its own part of all rows first, and computes while helpers work.

        `sum_width`: elements of a row of partial sums; None: as many as hidden states have. `on_rows` is called before
        rows [begin, end) of the step are computed.
        """
        self._on_rows = on_rows
        self._sum_width = sum_width
        self._ops = ops
        self._exchange = exchange
        self._at_once = at_once
        self._copies_all = at_once and all(exchange.is_staged(link) for link in (links.lend, *links.returns))
        """True if the copies of all slices off the device start before anything else."""
        self._lend = links.lend
        self._returns = links.returns
        leader = links.lend.source
        self._rank_order = sum(link.source < leader for link in links.returns)
        """Number of helpers before the leader in rank order."""
        self._own_return = next((link for link in links.returns if link.source == exchange.rank), None)
        self._owed: list[torch.Tensor] = []
        """Sums of a helper's slices that the next layer's include."""
        self._slices: dict[tuple[torch.Size, bool], RowSlices] = {}
        """Slices by shape and whether a layer has experts; layers share them."""

    def sum(self, hidden: torch.Tensor, own: Mlp | None, *, has_experts: bool = False) -> torch.Tensor:
        """Return the leader's partial plus all helpers', new [rows, sum_width].

        `own` is the leader's part. `has_experts`: the layer has some, here or elsewhere.
        """
        slices = self._cut(hidden, has_experts=has_experts)
        pieces = [hidden[begin:end] for begin, end in slices.bounds]
        if len(pieces) == 1:
            return next(self._sums(pieces, own, slices, hidden))
        total = self._empty_sum(hidden)
        for (begin, end), summed in zip(slices.bounds, self._sums(pieces, own, slices, hidden), strict=True):
            total[begin:end] = summed
        self._on_rows(0, len(hidden))
        return total

    def help(self, like: torch.Tensor, mlp: Mlp, in_two: MlpInTwo | None = None, *, has_experts: bool = False) -> None:
        """Compute a helper's partial sums of the rows that it receives, and return them over its link.

        `like` [rows, hidden] has the rows' shape. With `in_two`, which takes the place of `mlp`, the rest of each sum
        is returned with the next layer's, which has experts, too.

        Raises ValueError on a rank that is no helper.
        """
        if self._own_return is None:
            raise ValueError(f"rank {self._exchange.rank} is no helper of rank {self._lend.source}")
        slices = self._cut(like, has_experts=has_experts)
        owed, self._owed = self._owed, []
        coming: deque[PendingTensor] = deque()
        for k in range(len(slices.bounds)):
            for begin, end in slices.bounds[k + len(coming) : k + slices.ahead]:
                coming.append(self._exchange.receive(empty_like(self._ops, like[begin:end]), self._lend))
            rows = coming.popleft().wait()
            self._on_rows(*slices.bounds[k])
            partial, late = (mlp(rows), None) if in_two is None else in_two(rows)
            if owed:
                self._ops.add(partial, owed[k])
            self._exchange.send(partial, self._own_return)
            if late is not None:
                self._owed.append(late())

    def _cut(self, hidden: torch.Tensor, *, has_experts: bool) -> RowSlices:
        key = hidden.shape, has_experts
        if key not in self._slices:
            row_bytes = max(hidden.shape[1], self._sum_width or 0) * hidden.element_size()
            helpers = len(self._returns) if has_experts else 0
            link_bytes = self._exchange.link_bytes
            self._slices[key] = row_slices(
                len(hidden), row_bytes=row_bytes, link_bytes=link_bytes, expert_helpers=helpers
            )
        return self._slices[key]

    def _sums(
        self, pieces: Sequence[torch.Tensor], own: Mlp | None, slices: RowSlices, whole: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yield the sum of each slice in turn."""
        lent: deque[_Lent] = deque()
        ahead = slices.ahead
        started = len(pieces) if self._copies_all else ahead
        partials = self._own_partials(pieces, own, slices, whole)
        for k in range(len(pieces)):
            lent.extend(self._start(piece) for piece in pieces[k + len(lent) : k + started])
            partial = next(partials)  # the lent slices travel meanwhile
            for slice_lent in islice(lent, ahead):
                slice_lent.finish()
            yield self._add(partial, [pending.wait() for pending in lent.popleft().sums])

    def _own_partials(
        self, pieces: Sequence[torch.Tensor], own: Mlp | None, slices: RowSlices, whole: torch.Tensor
    ) -> Iterator[torch.Tensor | None]:
        """Yield the leader's partial of each slice; on a device, all are computed for the first."""
        if own is None:
            yield from [None] * len(pieces)
        elif self._at_once:
            yield from torch.split(own(whole), [len(piece) for piece in pieces])
        else:
            for bounds, piece in zip(slices.bounds, pieces, strict=True):
                self._on_rows(*bounds)
                yield own(piece)

    def _start(self, piece: torch.Tensor) -> _Lent:
        send = self._exchange.start_send(piece, self._lend)
        return _Lent(send, [self._exchange.receive(self._empty_sum(piece), link) for link in self._returns])

    def _empty_sum(self, like: torch.Tensor) -> torch.Tensor:
        width = self._sum_width or like.shape[1]
        return self._ops.empty(len(like), width, dtype=like.dtype, device=like.device)

    def _add(self, partial: torch.Tensor | None, sums: list[torch.Tensor]) -> torch.Tensor:
        terms = sums if partial is None else [*sums[: self._rank_order], partial, *sums[self._rank_order :]]
        if len(terms) > 1:
            self._ops.add(terms[0], *terms[1:])
        return terms[0]


class _Lent:
    """A slice that is lent to helpers."""

    def __init__(self, send: PendingSend, sums: list[PendingTensor]) -> None:
        self.sums = sums
        self._send: PendingSend | None = send

    def finish(self) -> None:
        """Finish sending it, once."""
        if self._send is not None:
            self._send.finish()
            self._send = None

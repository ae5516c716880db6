"""NativeSampling: the operations behind a recorded pass that draw its tokens and make them the next step's inputs.

They serve draws from logits as these are: the largest one, or one with noise, of what filters leave. With them a step
needs nothing from the host but its start, and consecutive steps are one call each (`multi_step`). The tokens are kept
until the last of these steps is done.

Each rank with vocabulary rows sends its best, and every rank decides: among equals the lowest id, as
`sampling.decision` does. One sum brings the bests to all. Each rank has a place of its own in it and zeros in all
others, so nothing is rounded: x + 0 is x, for infinities and NaN too. Ids go as float32, which has all whole numbers up
to 2^24; models with more tokens do not draw so.

Filters are applied to whole rows. Where ranks share the vocabulary, sums to which one rank contributes bring its logits
to all, some rows at a time; rank 0 draws, and another such sum brings what it has drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from hetero_api.rank_memory import WHOLE_LOGITS
from hetero_api.sharding import UnitRange
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.models.decoder import DecoderInput
from hetero_worker.native.compute_library import choose_op, pick_op, step_on_op
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.runners.forward import StepDraws
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import BEST_FIELDS, RowParameters

MAX_STEPS: Final = 10
"""Steps whose draws are kept: as many as a gateway sends ahead (`lookahead.MOST` there)."""


class NativeSampling:
    """Draws of the steps on one cache, of at most `most_rows` rows a step."""

    def __init__(self, op_queue: OpQueue, *, most_rows: int, block_size: int) -> None:
        self._op_queue = op_queue
        self._block_size = block_size
        self._num_kept = np.zeros(1, dtype=np.uint64)
        self._token_ids = np.zeros(MAX_STEPS * most_rows, dtype=np.int64)
        self._scores = np.zeros(MAX_STEPS * most_rows, dtype=np.float32)
        self._parameters = RowParameters(most_rows)
        self._most_rows = most_rows
        self._shared: torch.Tensor | None = None
        """Whole rows, and other ranks' parts of them: float32 [2, logits]."""

    def submit(
        self,
        step: DecoderInput,
        logits: torch.Tensor | None,
        *,
        head_ranges: Sequence[UnitRange],
        exchange: Exchange,
        gathers: bool = False,
    ) -> None:
        """Draw and keep a token for each row of a step that only decodes, and make its inputs the next step's.

        `logits` is float32 [rows, this rank's vocabulary rows], contiguous, and unused on a rank without such rows.
        With `gathers` rank 0 draws from whole rows, which ranks that share the vocabulary need for filters.
        Raises ValueError for other logits, and the exchange's errors.
        """
        rows, own, inputs = len(step.token_ids), head_ranges[exchange.rank], step.logit_rows
        assert inputs is not None, "a runner's steps say which rows' logits they want"
        telling = [rank for rank, others in enumerate(head_ranges) if others.size]
        if own.size:
            _check_logits(logits, rows, own)
        best = self._op_queue.empty(1 if gathers else len(telling), rows, BEST_FIELDS)
        if gathers:
            self._draw_whole(step, inputs, logits, best, head_ranges=head_ranges, exchange=exchange)
            telling = [0]
        elif own.size:
            self._choose(step, inputs, logits, best, first=own.begin, shard=telling.index(exchange.rank))
        if exchange.world_size > 1:
            exchange.among(tuple(range(exchange.world_size))).all_reduce(best, telling)
        self._step_on(step, best, inputs)

    def restart(self, rows: Sequence[SamplingRow], steps: int) -> None:
        """Forget the kept draws before so many steps that draw as `rows` say.

        Raises ValueError for more steps than there is room for.
        """
        if steps > MAX_STEPS:
            raise ValueError(f"draws of {MAX_STEPS} steps are kept, not of {steps}")
        self._num_kept[0] = 0
        self._parameters.fill(rows)

    def of_steps(self, steps: int, rows: int) -> StepDraws:
        """Return the draws of so many steps since the restart. Raises RuntimeError if other steps have drawn."""
        if int(self._num_kept[0]) != steps:
            raise RuntimeError(f"{int(self._num_kept[0])} steps have drawn, not {steps}")
        count = steps * rows
        return StepDraws(self._token_ids[:count].reshape(steps, rows), self._scores[:count].reshape(steps, rows))

    def _draw_whole(
        self,
        step: DecoderInput,
        inputs: torch.Tensor,
        logits: torch.Tensor | None,
        best: torch.Tensor,
        *,
        head_ranges: Sequence[UnitRange],
        exchange: Exchange,
    ) -> None:
        """Bring whole rows together, and let rank 0 draw from them."""
        all_ranks, rows = exchange.among(tuple(range(exchange.world_size))), best.shape[1]
        vocabulary = max(others.end for others in head_ranges)
        at_once = min(max(1, WHOLE_LOGITS // vocabulary), self._most_rows)
        if self._shared is None:
            # For all recordings, whose draws follow one another.
            self._shared = torch.empty(2, at_once * vocabulary)
        for first in range(0, rows, at_once):
            some = slice(first, min(first + at_once, rows))
            number = some.stop - first
            whole, parts = self._shared[:, : number * vocabulary]
            whole = whole.view(number, vocabulary)
            for rank, its in enumerate(head_ranges):
                if not its.size:
                    continue
                part = parts[number * its.begin : number * its.end].view(number, its.size)
                if rank == exchange.rank and logits is not None:
                    part = logits[some]
                all_ranks.all_reduce(part, [rank])
                if exchange.rank == 0:
                    self._copy(part, whole[:, its.begin : its.end])
            if exchange.rank == 0:
                self._choose(step, inputs, whole, best[:, some], first_row=first)

    def _choose(
        self,
        step: DecoderInput,
        inputs: torch.Tensor,
        logits: torch.Tensor | None,
        best: torch.Tensor,
        *,
        first: int = 0,
        shard: int = 0,
        first_row: int = 0,
    ) -> None:
        """Draw the step's rows from `first_row` on from their logits, whose first column is vocabulary row `first`."""
        assert logits is not None, "the caller has checked them"
        shards, rows, _ = best.shape
        op = choose_op(rows, logits.shape[1], logits.data_ptr(), first, shards, shard, best.data_ptr())
        self._parameters.set(op, is_whole=shards == 1, first_row=first_row)
        op.scratch = self._op_queue.scratch(op)
        op.positions, op.inputs = step.positions.data_ptr(), inputs[first_row:].data_ptr()
        self._op_queue.submit(op, logits, step, self)

    def _copy(self, part: torch.Tensor, to: torch.Tensor) -> None:
        """Copy rows to columns of a wider tensor."""
        op = pick_op(len(part), part.shape[1] * part.itemsize)
        op.x, op.y, op.y_stride = part.data_ptr(), to.data_ptr(), to.stride(0) * to.itemsize
        self._op_queue.submit(op, part, to)

    def _step_on(self, step: DecoderInput, best: torch.Tensor, inputs: torch.Tensor) -> None:
        shards, rows, _ = best.shape
        decode = step.attention.decode
        op = step_on_op(rows, shards, best.data_ptr(), inputs.data_ptr())
        op.token_ids, op.positions = step.token_ids.data_ptr(), step.positions.data_ptr()
        op.slot_mapping = step.attention.slot_mapping.data_ptr()
        op.lengths, op.tables = decode.lengths.ctypes.data, decode.block_tables.ctypes.data
        op.table_stride, op.block_size = decode.block_tables.shape[1], self._block_size
        op.steps, op.tokens = self._num_kept.ctypes.data, self._token_ids.ctypes.data
        op.scores = self._scores.ctypes.data
        self._op_queue.submit(op, step, self)


def _check_logits(logits: torch.Tensor | None, rows: int, own: UnitRange) -> None:
    if logits is None:
        raise ValueError(f"draws are of logits, and a rank with {own.size} vocabulary rows has made none")
    if logits.dtype != torch.float32 or not logits.is_contiguous() or logits.shape != (rows, own.size):
        raise ValueError(f"draws are of contiguous float32 logits, not of {logits.dtype} {tuple(logits.shape)}")

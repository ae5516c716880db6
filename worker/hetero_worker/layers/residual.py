"""The residual stream on its way through layers.

A half of a layer begins with a norm of the stream and ends with an addition to it. Between two halves both are one step
(`FusedOps.add_rms_norm`): what was added last waits for the next norm, of this layer or the next. Whoever reads the
stream itself gets it with all that was added.
"""

from __future__ import annotations

import torch

from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.norm import RmsNorm


class ResidualStream:
    """`hidden` [tokens, hidden], which is added to in place."""

    def __init__(self, hidden: torch.Tensor, ops: FusedOps = PLAIN_OPS) -> None:
        self._hidden = hidden
        self._ops = ops
        self._waiting: torch.Tensor | None = None

    def add(self, delta: torch.Tensor) -> None:
        """`delta` [tokens, hidden] must not change until the stream is read or normed."""
        self.settle()
        self._waiting = delta

    def normed(self, norm: RmsNorm) -> torch.Tensor:
        """The norm of the stream: [tokens, hidden], new."""
        delta, self._waiting = self._waiting, None
        return norm(self._hidden) if delta is None else norm.after_add(self._hidden, delta)

    def settle(self) -> torch.Tensor:
        """The stream, with all that was added in it."""
        if self._waiting is not None:
            self._ops.add(self._hidden, self._waiting)
            self._waiting = None
        return self._hidden

"""Batch-invariant FusedOps by torch's operators: a row has the same bits in any batch.

A torch operator may compute an element alone or in a vector, depending on its place, and may add up a row in an order
that depends on the number of rows. Additions, products, quotients and roots of elements are rounded alike in either
case, so everything here is made of these; sums halve the row until one column is left. Exponentials and hyperbolic
tangents are left to the library. At construction we try whether it computes them alike at every place; if not, they are
computed row by row.

All arithmetic is in float32 and rounded once. It takes more passes over memory than PlainOps: a sum over n columns is
log₂ n additions, of which the first is half of all the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch

from hetero_api.model_parts import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from hetero_worker.attention.base import StepAttention
from hetero_worker.attention.delta_rule import DeltaInputs, DeltaWeights, gated_delta_rule
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.layers.fused_ops import HeadWeights, RotatedHeads, TorchOps, each_head, kv_heads_of, widened_heads
from hetero_worker.layers.rotary import Rotation

RowFunction = Callable[[torch.Tensor], torch.Tensor]
"""Function of a tensor's elements, or of its rows, each by itself."""

_ROWS_AT_ONCE: Final = 64
"""Rows for which float32 intermediates exist at a time; bounds memory."""
_TRIED_ELEMENTS: Final = 100_003
"""More than torch gives to one thread, and an odd number."""
_TRIED_PIECES: Final = (1, 7, 16, 33, 1000, 40_000)
_MOST_PIECES: Final = 64
_GELU_FACTOR: Final = math.sqrt(2 / math.pi)
_GELU_CUBE: Final = 0.044715


@dataclass(frozen=True, slots=True)
class InvariantOps(TorchOps):
    """FusedOps for host tensors; see the module."""

    exp: RowFunction = field(default_factory=lambda: each_alike(torch.exp))
    tanh: RowFunction = field(default_factory=lambda: each_alike(torch.tanh))

    @property
    def name(self) -> str:
        """See `FusedOps.name`."""
        return "torch-invariant"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `FusedOps.rms_norm`."""
        return in_slices(lambda rows: _normed(x[rows], eps).mul_(weight.float()), x.new_empty(x.shape))

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `FusedOps.add_rms_norm`."""
        return self.rms_norm(residual.add_(delta), weight, eps)

    def gated(self, gate_up: torch.Tensor, activation: Activation, up: torch.Tensor | None = None) -> torch.Tensor:
        """See `FusedOps.gated`."""
        gates, ups = gate_up.chunk(2, dim=1) if up is None else (gate_up, up)
        out = gates.new_empty(gates.shape)
        return in_slices(lambda rows: self._gated(gates[rows].float(), ups[rows].float(), activation), out)

    def opened(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """See `FusedOps.opened`."""
        return in_slices(lambda rows: x[rows].float() / self.exp(-gates[rows].float()).add_(1), x)

    def row_products(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `FusedOps.row_products`."""
        return row_sums(x.float() * weight)

    def delta_rule(
        self, inputs: DeltaInputs, weights: DeltaWeights, cache: LayerCache, attention: StepAttention
    ) -> torch.Tensor:
        """See `FusedOps.delta_rule`."""
        return gated_delta_rule(inputs, weights, cache, attention, by_token=True)

    def mean_squares(self, qkv: torch.Tensor, *, num_heads: int, widths: tuple[int, int]) -> torch.Tensor:
        """See `FusedOps.mean_squares`."""
        return torch.cat([row_sums(heads * heads) for heads in widened_heads(qkv, num_heads, widths)], dim=1)

    def rotate(
        self, qkv: torch.Tensor, rotation: Rotation, *, num_heads: int, norms: HeadWeights | None
    ) -> RotatedHeads:
        """See `FusedOps.rotate`."""
        num_rotating = num_heads + kv_heads_of(qkv, num_heads)
        rotating = qkv[:, :num_rotating]

        def rotated_rows(rows: slice) -> torch.Tensor:
            heads = rotating[rows].float()
            if norms is not None and norms.mean_squares is not None:
                roots = (norms.mean_squares[rows] + norms.eps).sqrt_()
                heads = (heads / each_head(roots, num_heads, num_rotating)).mul_(norms.weight.float())
            elif norms is not None:
                heads = _normed(heads, norms.eps).mul_(norms.weight.float())
            swapped = torch.cat(heads.chunk(2, dim=2)[::-1], dim=2)
            return (heads * rotation.cos[rows]).add_(swapped.mul_(rotation.signed_sin[rows]))

        rotated = in_slices(rotated_rows, rotating.new_empty(rotating.shape))
        values = qkv[:, num_rotating:]
        if norms is not None and norms.with_values:
            stored, eps = values, norms.eps
            values = in_slices(lambda rows: _normed(stored[rows].float(), eps), stored.new_empty(stored.shape))
        return RotatedHeads(rotated[:, :num_heads], rotated[:, num_heads:], values)

    def capped(self, logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
        """See `FusedOps.capped`."""
        return in_slices(lambda rows: self.tanh(logits[rows] / soft_cap).mul_(soft_cap), logits)

    def _gated(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        match activation:
            case "silu":
                return (gate / self.exp(-gate).add_(1)).mul_(up)
            case "gelu_tanh":
                cube = (gate * gate).mul_(gate).mul_(_GELU_CUBE)
                opening = self.tanh(cube.add_(gate).mul_(_GELU_FACTOR)).add_(1).mul_(0.5)
                return opening.mul_(gate).mul_(up)
            case "clamped_swiglu":
                gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
                return (gate / self.exp(gate * -SWIGLU_ALPHA).add_(1)).mul_(up + 1)


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Return sums [..., 1] over the last dimension, adding the second half to the first until one column is left."""
    sums, width = x.clone(), x.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        sums[..., : width - half] += sums[..., half:width]
        width = half
    return sums[..., :1]


def in_slices(compute: Callable[[slice], torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Compute the rows of `out` some at a time, rounded to its type, and return it."""
    for begin in range(0, len(out), _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        out[rows] = compute(rows)
    return out


def by_row(function: RowFunction, x: torch.Tensor) -> torch.Tensor:
    """Return function(x) of x [rows, any], a row at a time, each copied to its own memory."""
    return torch.cat([function(row.clone()) for row in torch.split(x, 1)]) if len(x) else function(x)


def each_alike(function: RowFunction) -> RowFunction:
    """Return the function if it gives elements the same bits at every place on this machine, else apply it by row."""
    values = torch.linspace(-30, 30, _TRIED_ELEMENTS)
    whole = function(values)
    for size in _TRIED_PIECES:
        pieces = torch.cat([function(piece) for piece in torch.split(values[: size * _MOST_PIECES], size)])
        if not torch.equal(pieces, whole[: len(pieces)]):
            return lambda x: by_row(function, x)
    return function


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return √(mean square + eps) over the last dimension, which is kept."""
    return row_sums(x * x).div_(x.shape[-1]).add_(eps).sqrt_()


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) over the last dimension, in float32."""
    exact = x.float()
    return exact / _rms(exact, eps)

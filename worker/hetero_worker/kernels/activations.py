"""Gate of an MLP: activation(gate) · up in one pass over the fused projection.

Elements are computed one by one in float32 and rounded once, so the rest of the batch does not matter.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hetero_api.model_parts import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation

_BLOCK: Final = 1024
"""Most columns of one program."""
_GELU_FACTOR: Final = tl.constexpr(1.5957691216057308)
"""2 · √(2/π)."""
_GELU_CUBE: Final = tl.constexpr(0.044715)
_ALPHA: Final = tl.constexpr(SWIGLU_ALPHA)
_LIMIT: Final = tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def opened(gate, up, activation: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return activation(gate) · up of float32."""
    sharpness = gate
    if activation == "clamped_swiglu":
        gate = tl.minimum(gate, _LIMIT)
        up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT) + 1.0
        sharpness = _ALPHA * gate
    if activation == "gelu_tanh":
        # x · ½ · (1 + tanh(y)) = x · sigmoid(2y)
        sharpness = _GELU_FACTOR * (gate + _GELU_CUBE * gate * gate * gate)
    decay = tl.exp(-tl.abs(sharpness))  # never more than 1
    opening = tl.where(sharpness >= 0, 1.0, decay) / (1.0 + decay)
    return gate * opening * up


@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    gate_up, out, row_stride, columns: tl.constexpr, activation: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    place = gate_up + row * row_stride + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, opened(gate, up, activation), mask=inside)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return activation(gate) · up, new and contiguous [rows, columns].

    `gate_up` is [rows, 2 · columns] with rows at any stride, gates first.
    """
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, columns), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(columns))
        grid = rows, triton.cdiv(columns, block)
        _gated[grid](
            gate_up, out, gate_up.stride(0), columns=columns, activation=activation, block=block, enable_fp_fusion=True
        )
    return out

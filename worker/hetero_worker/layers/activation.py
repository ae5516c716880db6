"""The gate of an MLP."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from hetero_api.model_parts import Activation


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) · up of [rows, gate | up]: [rows, columns]."""
    gate, up = gate_up.chunk(2, dim=1)
    match activation:
        case "silu":
            return F.silu(gate).mul_(up)
        case "gelu_tanh":
            return F.gelu(gate, approximate="tanh").mul_(up)

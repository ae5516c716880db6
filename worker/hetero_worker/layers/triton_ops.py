"""FusedOps by Triton's kernels. Imported only where they are used: it needs Triton."""

from __future__ import annotations

import torch

from hetero_api.model_parts import Activation
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.kernels import activations, rotary
from hetero_worker.kernels.norms import add_rms_norm, rms_norm
from hetero_worker.kernels.routing import router_logits
from hetero_worker.layers.fused_ops import PLAIN_OPS, HeadWeights, RotatedHeads, kv_heads_of
from hetero_worker.layers.invariant_ops import InvariantOps
from hetero_worker.layers.rotary import Rotation


class TritonOps:
    """One kernel each. They compute in float32 and round once, where PlainOps rounds after each operator."""

    name = "triton"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return add_rms_norm(residual, delta, weight, eps)

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> None:
        PLAIN_OPS.add(x, delta)

    def pick(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return PLAIN_OPS.pick(x, index)

    def empty(self, rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return PLAIN_OPS.empty(rows, width, dtype=dtype, device=device)

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        return activations.gated(gate_up, activation)

    def rotate(
        self, qkv: torch.Tensor, rotation: Rotation, *, num_heads: int, norms: HeadWeights | None
    ) -> RotatedHeads:
        rotary.rotate(qkv, rotation.cos, rotation.signed_sin, num_heads=num_heads, norms=norms)
        first_value = num_heads + kv_heads_of(qkv, num_heads)
        return RotatedHeads(qkv[:, :num_heads], qkv[:, num_heads:first_value], qkv[:, first_value:])

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        *,
        num_heads: int,
        norms: HeadWeights | None,
        cache: LayerCache,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        rotary.rotate(
            qkv,
            rotation.cos,
            rotation.signed_sin,
            num_heads=num_heads,
            norms=norms,
            write=rotary.CacheWrite(cache.keys, cache.values, slots),
        )
        return qkv[:, :num_heads]

    def capped(self, logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
        return PLAIN_OPS.capped(logits, soft_cap)

    def router_logits(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return PLAIN_OPS.router_logits(hidden, weight, eps)

    def expert_shares(self, logits: torch.Tensor, chosen: torch.Tensor, *, normalised: bool) -> torch.Tensor:
        return PLAIN_OPS.expert_shares(logits, chosen, normalised=normalised)


class InvariantTritonOps(TritonOps):
    """A row has the same bits whatever other rows there are: of TritonOps' kernels that holds anyhow.

    The rest is made of what a device computes element by element, and of a kernel that takes a router's products.
    """

    name = "triton-invariant"

    def __init__(self) -> None:
        self._by_element = InvariantOps(exp=torch.exp, tanh=torch.tanh)

    def capped(self, logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
        return self._by_element.capped(logits, soft_cap)

    def router_logits(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return router_logits(hidden, weight, eps)

    def expert_shares(self, logits: torch.Tensor, chosen: torch.Tensor, *, normalised: bool) -> torch.Tensor:
        return self._by_element.expert_shares(logits, chosen, normalised=normalised)

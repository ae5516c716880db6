"""FusedOps by our Triton kernels. Import it only where Triton is installed."""

from __future__ import annotations

import torch

from hetero_api.model_parts import Activation
from hetero_worker.attention.base import StepAttention
from hetero_worker.attention.delta_rule import DeltaInputs, DeltaWeights
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.triton_delta import triton_delta_rule
from hetero_worker.kernels import activations
from hetero_worker.kernels.expert_choice import RouterWeights
from hetero_worker.kernels.norms import add_rms_norm, rms_norm
from hetero_worker.kernels.rotary import CacheWrite, HeadNorms, rotate_and_write
from hetero_worker.kernels.routing import choose, router_logits
from hetero_worker.layers.fused_ops import HeadWeights, PlainOps, RotatedHeads, kv_heads_of
from hetero_worker.layers.invariant_ops import InvariantOps
from hetero_worker.layers.rotary import Rotation


class TritonOps(PlainOps):
    """FusedOps by our kernels, which compute in float32 and round once; PlainOps rounds after each operator.

    Operators without a kernel are those of PlainOps.
    """

    name = "triton"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `FusedOps.rms_norm`."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `FusedOps.add_rms_norm`."""
        return add_rms_norm(residual, delta, weight, eps)

    def gated(self, gate_up: torch.Tensor, activation: Activation, up: torch.Tensor | None = None) -> torch.Tensor:
        """See `FusedOps.gated`; there is no kernel for an `up` that lies elsewhere."""
        return activations.gated(gate_up, activation) if up is None else super().gated(gate_up, activation, up)

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
        """See `FusedOps.rotate_and_write`."""
        if norms is not None and norms.with_values:
            values = qkv[:, num_heads + kv_heads_of(qkv, num_heads) :]
            ones = values.new_ones(values.shape[2])
            values.copy_(rms_norm(values.flatten(0, 1), ones, norms.eps).view(values.shape))
        rotate_and_write(
            qkv,
            rotation.cos,
            rotation.signed_sin,
            num_heads=num_heads,
            norms=None if norms is None else HeadNorms(*norms[:3]),
            write=CacheWrite(cache.keys, cache.values, slots),
        )
        return qkv[:, :num_heads]

    def delta_rule(
        self, inputs: DeltaInputs, weights: DeltaWeights, cache: LayerCache, attention: StepAttention
    ) -> torch.Tensor:
        """See `FusedOps.delta_rule`."""
        return triton_delta_rule(inputs, weights, cache, attention, by_token=False)

    def route(
        self, hidden: torch.Tensor, router: RouterWeights, slots: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FusedOps.route`."""
        return choose(router_logits(hidden, router), router, slots)


class InvariantTritonOps(TritonOps):
    """FusedOps that give a row the same bits in any batch, as the kernels of TritonOps do anyway.

    The other operators are made of element-wise operators.
    """

    name = "triton-invariant"

    def __init__(self) -> None:
        super().__init__()
        self._by_element = InvariantOps(exp=torch.exp, tanh=torch.tanh)

    def gated(self, gate_up: torch.Tensor, activation: Activation, up: torch.Tensor | None = None) -> torch.Tensor:
        """See `FusedOps.gated`."""
        if up is None:
            return super().gated(gate_up, activation)
        return self._by_element.gated(gate_up, activation, up)

    def rotate(
        self, qkv: torch.Tensor, rotation: Rotation, *, num_heads: int, norms: HeadWeights | None
    ) -> RotatedHeads:
        """See `FusedOps.rotate`."""
        return self._by_element.rotate(qkv, rotation, num_heads=num_heads, norms=norms)

    def delta_rule(
        self, inputs: DeltaInputs, weights: DeltaWeights, cache: LayerCache, attention: StepAttention
    ) -> torch.Tensor:
        """See `FusedOps.delta_rule`."""
        return triton_delta_rule(inputs, weights, cache, attention, by_token=True)

    def capped(self, logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
        """See `FusedOps.capped`."""
        return self._by_element.capped(logits, soft_cap)

"""What a decoder does beside its linear layers and attention, in steps that one kernel can do in one pass.

On a device each kernel costs a launch and a trip of its tensors to memory and back; `TritonOps` (triton_ops.py) takes
one where torch's operators take several. On host cores `NativeOps` (native_ops.py) gives them to a team of threads
that need not be woken. `PlainOps` is the reference, by torch's operators, and the way of host cores that have no
native kernels. A kernel gives a row the same bits whatever other rows are with it; torch's operators do not promise
that, and `InvariantOps` (invariant_ops.py) takes their place in batch-invariant mode (batch_invariance.py).

Which of them a rank uses is decided when its decoder is built (`fused_ops_of`, `invariant_ops`), and reported.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from hetero_api.model_parts import Activation
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.kernels.availability import triton_problem
from hetero_worker.layers.activation import gated
from hetero_worker.layers.rotary import Rotation
from hetero_worker.native.issuing import Issuer
from hetero_worker.platforms.base import HOST

logger = logging.getLogger(__name__)


class HeadWeights(NamedTuple):
    """Of the norms of query and key heads."""

    weight: torch.Tensor
    """[heads + kv_heads, head_dim], offsets added."""
    eps: float


class RotatedHeads(NamedTuple):
    """Views or new tensors: [tokens, heads or kv_heads, head_dim] each."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class FusedOps(Protocol):
    """Arithmetic may be in a wider type than the tensors'; results are of theirs."""

    @property
    def name(self) -> str:
        """As reported, with the reason where another was wanted."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) · weight of [rows, width]: new. `weight` [width] may be of a wider type than x."""
        ...

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += delta, both [rows, width], in place; then the norm of it: new."""
        ...

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> None:
        """x += delta, both [rows, width], in place."""
        ...

    def pick(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Rows of [rows, width] at int64 [picked]: new."""
        ...

    def empty(self, rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Of no content yet."""
        ...

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(gate) · up of [rows, gate | up]: [rows, columns], new."""
        ...

    def rotate(
        self, qkv: torch.Tensor, rotation: Rotation, *, num_heads: int, norms: HeadWeights | None
    ) -> RotatedHeads:
        """Norm, where there are norms, and rotate the query and key heads of [tokens, heads + 2 · kv_heads, head_dim].

        `qkv` may be overwritten, and what is returned may be views of it.
        """
        ...

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
        """`rotate`, and keys and values into the cache at int64 [tokens] slots; returns the queries."""
        ...

    def capped(self, logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
        """cap · tanh(logits / cap) of float32 [rows, vocabulary rows]; `logits` may be overwritten."""
        ...

    def router_logits(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """hidden / rms(hidden) · weightᵀ in float64, rounded: float32 [tokens, experts].

        hidden [tokens, hidden]; weight float64 [experts, hidden], the norm's multiplied in.
        """
        ...

    def expert_shares(self, logits: torch.Tensor, chosen: torch.Tensor, *, normalised: bool) -> torch.Tensor:
        """The softmax of [tokens, experts] of the chosen experts, int64 [tokens, chosen]; `normalised`: they add up to
        1."""
        ...


class WritesApart(ABC):
    """What FusedOps of torch's operators derive from: they write keys and values in a pass of its own."""

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> None:
        x.add_(delta)

    def pick(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, index)

    def empty(self, rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(rows, width, dtype=dtype, device=device)

    @abstractmethod
    def rotate(
        self, qkv: torch.Tensor, rotation: Rotation, *, num_heads: int, norms: HeadWeights | None
    ) -> RotatedHeads:
        """As FusedOps.rotate."""

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
        query, key, value = self.rotate(qkv, rotation, num_heads=num_heads, norms=norms)
        cache.write(slots, key, value)
        return query


@dataclass(frozen=True, slots=True)
class PlainOps(WritesApart):
    """By torch's operators."""

    reason: str = ""
    """Why, where a device might have had more."""

    @property
    def name(self) -> str:
        return f"torch ({self.reason})" if self.reason else "torch"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dtype == weight.dtype:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self.rms_norm(residual.add_(delta), weight, eps)

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        return gated(gate_up, activation)

    def rotate(
        self, qkv: torch.Tensor, rotation: Rotation, *, num_heads: int, norms: HeadWeights | None
    ) -> RotatedHeads:
        num_rotating = num_heads + kv_heads_of(qkv, num_heads)
        rotating = qkv[:, :num_rotating]
        if norms is not None:
            normed = F.rms_norm(rotating.to(norms.weight.dtype), qkv.shape[2:], eps=norms.eps)
            rotating = normed.mul_(norms.weight).to(qkv.dtype)
        rotated = rotation.apply(rotating)
        return RotatedHeads(rotated[:, :num_heads], rotated[:, num_heads:], qkv[:, num_rotating:])

    def capped(self, logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
        return logits.div_(soft_cap).tanh_().mul_(soft_cap)

    def router_logits(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        exact = hidden.double()
        mean_square: torch.Tensor = torch.linalg.vecdot(exact, exact).unsqueeze(1) / hidden.shape[1]
        return (exact @ weight.t() * (mean_square + eps).rsqrt()).float()

    def expert_shares(self, logits: torch.Tensor, chosen: torch.Tensor, *, normalised: bool) -> torch.Tensor:
        weights = logits.softmax(dim=1).gather(1, chosen)
        return weights / weights.sum(dim=1, keepdim=True) if normalised else weights


PLAIN_OPS: Final = PlainOps()


def empty_like(ops: FusedOps, x: torch.Tensor) -> torch.Tensor:
    """Of [rows, width] as x, of no content yet."""
    return ops.empty(*x.shape, dtype=x.dtype, device=x.device)


def kv_heads_of(qkv: torch.Tensor, num_heads: int) -> int:
    """KV heads in [tokens, heads + 2 · kv_heads, head_dim]."""
    return (qkv.shape[1] - num_heads) // 2


def fused_ops_of(
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    issuer: Issuer | None = None,
    no_issuer: str = "",
) -> FusedOps:
    """Triton's kernels on a CUDA device that runs them; the native ones on host cores that have an issuer, in float32;
    else torch's operators.

    `no_issuer`: why there is none, where there could be. What is slower than it could be tells the reason in its name.
    """
    if device.type == HOST.type:
        return _of_host(dtype, issuer, no_issuer)
    if (problem := triton_problem(device)) is not None:
        logger.warning("fused steps on %s are torch's operators, which are slower: %s", device, problem)
        return PlainOps(problem)
    from hetero_worker.layers.triton_ops import TritonOps

    return TritonOps()


def _of_host(dtype: torch.dtype, issuer: Issuer | None, no_issuer: str) -> FusedOps:
    if issuer is None:
        return PlainOps(no_issuer)
    if dtype != torch.float32:
        return PlainOps(f"the native kernels do not compute in {dtype}")
    from hetero_worker.layers.native_ops import NativeOps

    return NativeOps(issuer)

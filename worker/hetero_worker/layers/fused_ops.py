"""Operators of a decoder between its linear layers and attention, in units that one kernel can compute in one pass.

On a device each kernel costs a launch, and a trip of its tensors to memory and back. `TritonOps` uses one kernel where
torch's operators use several. On host cores `NativeOps` runs them on a team of threads that need not be woken.
`PlainOps` uses torch's operators: it is the reference, and what hosts without native kernels compute with. Our kernels
give a row the same bits in any step. Torch's operators do not promise that; `InvariantOps`
replaces them in batch-invariant mode. `selection` chooses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from hetero_api.model_parts import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from hetero_worker.attention.base import StepAttention
from hetero_worker.attention.delta_rule import DeltaInputs, DeltaWeights, gated_delta_rule
from hetero_worker.attention.kv_cache import LayerCache, as_cached
from hetero_worker.distributed.exchange import sum_in_order
from hetero_worker.kernels.expert_choice import RouterWeights, choose, router_logits
from hetero_worker.layers.rotary import Rotation


class HeadWeights(NamedTuple):
    """Weights of the norms of query and key heads."""

    weight: torch.Tensor
    """[heads + kv_heads, head_dim], with the offset added."""
    eps: float
    mean_squares: torch.Tensor | None = None
    """float32 [tokens, 2]: of all query heads and of all key heads, over all ranks; None: each head has its own."""
    with_values: bool = False
    """Whether value heads are normed as well, without a weight."""


class LatentNorm(NamedTuple):
    """Norm of what latent attention caches."""

    weight: torch.Tensor
    """[rank]."""
    eps: float


class LatentWrite(NamedTuple):
    """Destination of what latent attention caches."""

    keys: torch.Tensor
    """[cache slots, 1, rank + rotated elements]."""
    slots: torch.Tensor
    """int64 [tokens]."""


class RotatedHeads(NamedTuple):
    """Views or new tensors, [tokens, heads or kv_heads, head_dim] each."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class FusedOps(Protocol):
    """The operators. They may compute in a wider type than the tensors'; results have the tensors' type."""

    @property
    def name(self) -> str:
        """The name that is reported, with a reason if faster operators are missing."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / rms(x) · weight, new [rows, width]; `weight` [width] may be of a wider type than x."""
        ...

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add delta to residual in place, both [rows, width], and return the norm of the sum, new."""
        ...

    def add(self, x: torch.Tensor, *deltas: torch.Tensor, factor: float = 1.0) -> None:
        """Replace x by factor · (x + deltas), all [rows, width]: in their order, in float32, rounded once."""
        ...

    def pick(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the rows of [rows, width] at int64 [picked], new."""
        ...

    def empty(self, rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor [rows, width]."""
        ...

    def gated(self, gate_up: torch.Tensor, activation: Activation, up: torch.Tensor | None = None) -> torch.Tensor:
        """Return activation(gate) · up, new [rows, columns], of [rows, gate | up].

        If `up` [rows, columns] is given, whose rows may have any stride, it is of gates [rows, columns] and of it.
        """
        ...

    def beside(self, first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor:
        """Return [rows, first | second], new, of two [rows, width]; one may be None, for zeros."""
        ...

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both halves of the columns of [rows, 2 · width], new and contiguous [rows, width] each."""
        ...

    def opened(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Multiply x [rows, width] in place by the sigmoid of gates [rows, width or 1], and return it."""
        ...

    def row_products(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return float32 [rows, 1] of x [rows, width] and a row of weights, float32 [1, width]."""
        ...

    def delta_rule(
        self, inputs: DeltaInputs, weights: DeltaWeights, cache: LayerCache, attention: StepAttention
    ) -> torch.Tensor:
        """Return [tokens, value heads · value_dim] of the gated delta rule, and take states on (`delta_rule`)."""
        ...

    def mean_squares(self, qkv: torch.Tensor, *, num_heads: int, widths: tuple[int, int]) -> torch.Tensor:
        """Return this rank's part of `HeadWeights.mean_squares`, new float32 [tokens, 2]; ranks' parts add up.

        `qkv` is that of `rotate_and_write`; `widths` are the elements of all ranks' query and key heads.
        """
        ...

    def rotate(
        self, qkv: torch.Tensor, rotation: Rotation, *, num_heads: int, norms: HeadWeights | None
    ) -> RotatedHeads:
        """Norm (if `norms` is given) and rotate query and key heads; `qkv`, which may change, as `rotate_and_write`."""
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
        """Norm (if `norms` is given) and rotate query and key heads of [tokens, heads + 2 · kv_heads, head_dim].

        Writes keys and values to the cache at int64 [tokens] slots. Returns queries [tokens, heads, head_dim], which
        may be a view of `qkv`.
        """
        ...

    def rotate_latent(
        self, query: torch.Tensor, compressed: torch.Tensor, rotation: Rotation, norm: LatentNorm, write: LatentWrite
    ) -> torch.Tensor:
        """Norm the first elements of `compressed` [tokens, rank + rope], rotate the others, and write all to the cache.

        Returns new queries [tokens, heads, rank + rope]: the last `rope` elements are those of `query`
        [tokens, heads, any + rope], rotated; the caller writes the first ones.
        """
        ...

    def capped(self, logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
        """Return cap · tanh(logits / cap) of float32 [rows, vocabulary rows]; `logits` may be overwritten."""
        ...

    def route(
        self, hidden: torch.Tensor, router: RouterWeights, slots: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts for rows of the residual stream [tokens, hidden] by the rule of `kernels.expert_choice`.

        Returns their numbers, best first, int64 [tokens, chosen], and their shares, float32 of the same shape.
        `slots`, int64 [tokens]: the rows' places in the cache, on devices that pad steps: a row in slot 0 is padding,
        and chooses the number of experts, which is no expert's.
        """
        ...


class TorchOps(ABC):
    """Base of FusedOps by torch's operators, which write keys and values in a separate pass."""

    def add(self, x: torch.Tensor, *deltas: torch.Tensor, factor: float = 1.0) -> None:
        """See `FusedOps.add`."""
        if factor == 1.0:
            sum_in_order([x, *deltas], x)
            return
        total = x.float()
        for delta in deltas:
            total = total + delta
        x.copy_(total * factor)

    def pick(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """See `FusedOps.pick`."""
        return x.index_select(0, index)

    def empty(self, rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `FusedOps.empty`."""
        return torch.empty(rows, width, dtype=dtype, device=device)

    def route(
        self,
        hidden: torch.Tensor,
        router: RouterWeights,
        slots: torch.Tensor | None = None,  # noqa: ARG002 - these operators are not recorded, so nothing is padded
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FusedOps.route`."""
        return choose(router_logits(hidden, router), router)

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `FusedOps.rms_norm`."""

    def beside(self, first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor:
        """See `FusedOps.beside`."""
        nothing = torch.zeros_like(either(first, second))
        return torch.cat([nothing if part is None else part for part in (first, second)], dim=1)

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FusedOps.halves`."""
        first, second = x.chunk(2, dim=1)
        return first.contiguous(), second.contiguous()

    def delta_rule(
        self, inputs: DeltaInputs, weights: DeltaWeights, cache: LayerCache, attention: StepAttention
    ) -> torch.Tensor:
        """See `FusedOps.delta_rule`."""
        return gated_delta_rule(inputs, weights, cache, attention)

    def rotate_latent(
        self, query: torch.Tensor, compressed: torch.Tensor, rotation: Rotation, norm: LatentNorm, write: LatentWrite
    ) -> torch.Tensor:
        """See `FusedOps.rotate_latent`."""
        (tokens, heads, query_dim), rank = query.shape, len(norm.weight)
        rope = compressed.shape[1] - rank
        key = compressed[:, None, rank:]
        # Keys stand for values, which are not rotated.
        by_head = torch.cat([query[:, :, query_dim - rope :], key, key], dim=1)
        rotated = self.rotate(by_head, rotation, num_heads=heads, norms=None)
        latent = self.rms_norm(compressed[:, :rank].contiguous(), norm.weight, norm.eps)
        keys = torch.cat([latent.unsqueeze(1), rotated.key], dim=2)
        write.keys.index_copy_(0, write.slots, as_cached(keys, write.keys.dtype))
        out = query.new_empty(tokens, heads, rank + rope)
        out[:, :, rank:] = rotated.query
        return out

    @abstractmethod
    def rotate(
        self, qkv: torch.Tensor, rotation: Rotation, *, num_heads: int, norms: HeadWeights | None
    ) -> RotatedHeads:
        """See `FusedOps.rotate`."""

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
        query, key, value = self.rotate(qkv, rotation, num_heads=num_heads, norms=norms)
        cache.write(slots, key, value)
        return query


@dataclass(frozen=True)
class PlainOps(TorchOps):
    """FusedOps by torch's operators, for any device and dtype."""

    reason: str = ""
    """Why nothing faster serves, for reports; empty if there is none."""

    @property
    def name(self) -> str:
        """See `FusedOps.name`."""
        return f"torch ({self.reason})" if self.reason else "torch"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `FusedOps.rms_norm`."""
        if x.dtype == weight.dtype:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `FusedOps.add_rms_norm`."""
        return self.rms_norm(residual.add_(delta), weight, eps)

    def gated(self, gate_up: torch.Tensor, activation: Activation, up: torch.Tensor | None = None) -> torch.Tensor:
        """See `FusedOps.gated`."""
        gate, up = gate_up.chunk(2, dim=1) if up is None else (gate_up, up)
        match activation:
            case "silu":
                return F.silu(gate).mul_(up)
            case "gelu_tanh":
                return F.gelu(gate, approximate="tanh").mul_(up)
            case "clamped_swiglu":
                gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
                return gate.mul(SWIGLU_ALPHA).sigmoid_().mul_(gate).mul_(up + 1)

    def opened(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """See `FusedOps.opened`."""
        return x.mul_(gates.sigmoid())

    def row_products(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `FusedOps.row_products`."""
        return F.linear(x.float(), weight)

    def mean_squares(self, qkv: torch.Tensor, *, num_heads: int, widths: tuple[int, int]) -> torch.Tensor:
        """See `FusedOps.mean_squares`."""
        return torch.stack([heads.square().sum(1) for heads in widened_heads(qkv, num_heads, widths)], dim=1)

    def rotate(
        self, qkv: torch.Tensor, rotation: Rotation, *, num_heads: int, norms: HeadWeights | None
    ) -> RotatedHeads:
        """See `FusedOps.rotate`."""
        num_rotating = num_heads + kv_heads_of(qkv, num_heads)
        rotating = qkv[:, :num_rotating]
        if norms is not None:
            exact = rotating.to(norms.weight.dtype)
            if norms.mean_squares is None:
                normed = F.rms_norm(exact, qkv.shape[2:], eps=norms.eps)
            else:
                factors = (norms.mean_squares + norms.eps).rsqrt_()
                normed = (exact * each_head(factors, num_heads, num_rotating)).to(exact.dtype)
            rotating = normed.mul_(norms.weight).to(qkv.dtype)
        rotated = rotation.apply(rotating)
        values = qkv[:, num_rotating:]
        if norms is not None and norms.with_values:
            values = F.rms_norm(values.to(norms.weight.dtype), values.shape[2:], eps=norms.eps).to(qkv.dtype)
        return RotatedHeads(rotated[:, :num_heads], rotated[:, num_heads:], values)

    def capped(self, logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
        """See `FusedOps.capped`."""
        return logits.div_(soft_cap).tanh_().mul_(soft_cap)


def widened_heads(qkv: torch.Tensor, num_heads: int, widths: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and key heads of `qkv`, float32 [tokens, elements] each, divided by the roots of widths."""
    first_value = num_heads + kv_heads_of(qkv, num_heads)
    query, key = (part.flatten(1).float() for part in (qkv[:, :num_heads], qkv[:, num_heads:first_value]))
    return query / widths[0] ** 0.5, key / widths[1] ** 0.5


def each_head(factors: torch.Tensor, num_heads: int, num_rotating: int) -> torch.Tensor:
    """Return [tokens, num_rotating, 1]: the first of [tokens, 2] for query heads, the second for key heads."""
    is_key = torch.arange(num_rotating, device=factors.device) >= num_heads
    return factors[:, is_key.long()].unsqueeze(2)


def either(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor:
    """Return the first tensor, or the second if it is None. Raises ValueError if both are."""
    given = first if first is not None else second
    if given is None:
        raise ValueError("one of two tensors that are to stand side by side must be given")
    return given


PLAIN_OPS: Final = PlainOps()


def empty_like(ops: FusedOps, x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor like x [rows, width]."""
    return ops.empty(*x.shape, dtype=x.dtype, device=x.device)


def kv_heads_of(qkv: torch.Tensor, num_heads: int) -> int:
    """Return the number of KV heads in [tokens, heads + 2 · kv_heads, head_dim]."""
    return (qkv.shape[1] - num_heads) // 2

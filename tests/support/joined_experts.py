"""Experts that torch's operators compute together, as Triton's kernels do: without the host, and for all rows alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hetero_api.model_parts import Activation, ExpertsConfig
from hetero_worker.kernels.expert_choice import RouterWeights
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps, PlainOps
from hetero_worker.layers.linear_kernels import (
    ExpertFactors,
    LateSum,
    LinearKernel,
    PackedExperts,
    PackedMlp,
    PlainKernel,
)
from tests.support.pseudo_gpu import PseudoGpu


class JoinedGpu(PseudoGpu):
    """A pseudo GPU whose kernels compute a layer's experts together."""

    _triton_problem = None

    def linear(self, dtype: torch.dtype, *, batch_invariant: bool) -> LinearKernel:
        return JoiningKernel()

    def fused_ops(self, *, batch_invariant: bool) -> FusedOps:
        return PaddingOps()


class PaddingOps(PlainOps):
    """Rows that are padding choose no expert."""

    def route(
        self, hidden: torch.Tensor, router: RouterWeights, slots: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, shares = super().route(hidden, router)
        if slots is not None:
            chosen = torch.where((slots == 0).unsqueeze(1), router.experts.number, chosen)
        return chosen, shares


class JoiningKernel(PlainKernel):
    def join_experts(
        self,
        experts: ExpertsConfig,
        activation: Activation,
        *,
        shared: PackedMlp | None,
        counts: torch.Tensor,
        loaded: Sequence[PackedMlp],
    ) -> PackedExperts:
        return JoinedExperts(activation, shared, counts)


class JoinedExperts(PackedExperts):
    """Each held expert computes every row; those that did not choose it have a share of 0."""

    def __init__(self, activation: Activation, shared: PackedMlp | None, counts: torch.Tensor) -> None:
        self._activation = activation
        self._shared = shared
        self._counts = counts
        self._held: Mapping[int, PackedMlp] = {}

    def hold(self, experts: Mapping[int, PackedMlp]) -> None:
        self._held = dict(experts)

    def __call__(
        self, normed: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, /, numbers: torch.Tensor | None = None
    ) -> torch.Tensor:
        total = torch.zeros_like(normed) if self._shared is None else self._of(self._shared, normed)
        for number, expert in self._held.items():
            is_chosen = chosen == number
            self._counts[number] += is_chosen.sum()
            total += self._of(expert, normed) * torch.where(is_chosen, shares, 0.0).sum(1, keepdim=True)
        return total

    def _of(self, expert: PackedMlp, normed: torch.Tensor) -> torch.Tensor:
        hidden = PLAIN_OPS.gated(expert.gate_up(normed, expert.gate_up_bias), self._activation)
        return expert.down(hidden, expert.down_bias)

    def hold_adapter(
        self, number: int, factors: Mapping[int, ExpertFactors], dtype: torch.dtype, *, max_rank: int
    ) -> None:
        raise NotImplementedError

    def in_two(
        self,
        normed: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        /,
        *,
        late: int,
        numbers: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, LateSum]:
        raise NotImplementedError

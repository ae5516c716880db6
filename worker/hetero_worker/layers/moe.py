"""An MLP of experts on one rank: it computes its own experts for the tokens that are routed to them.

Every rank that owns experts of the layer routes all tokens by itself, so that no round is needed for it. The choice
must be the same on all of them: a token whose second-best expert is one on this rank and another on that rank would
get both, or neither. So the router is computed in float64 from the residual stream, which is the same everywhere to
the last bit, and its result rounded to float32: ranks whose kernels or cores add in another order still agree, and
experts that tie do so on every rank, where the lower number wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.model_parts import ExpertsConfig
from hetero_api.sharding import UnitRange
from hetero_worker.layers.activation import gated
from hetero_worker.layers.linear import expert_down_linear, expert_gate_up_linear
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.layers.norm import RmsNorm
from hetero_worker.memory.budget import EXPERT_ROWS
from hetero_worker.memory.loader import Checkpoint, TensorSlice


class ExpertMlp:
    """norm → router → each own expert's gated MLP on its tokens → their sum, weighted by the router."""

    def __init__(self, config: ModelConfig, layer: int, own: UnitRange, *, norm: RmsNorm) -> None:
        if config.experts is None or layer not in config.experts.layers:
            raise PlanError(f"the plan deals experts of layer {layer}, which is dense")
        prefix = f"model.layers.{layer}.{config.experts.names.block}"
        self._norm = norm
        self._router = _Router(config.experts, f"{prefix}.gate.weight", config.hidden_size, norm)
        self._begin = own.begin
        self._experts = [_Expert(config, config.experts, f"{prefix}.experts.{i}") for i in range(own.begin, own.end)]

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """An expert's; all are alike."""
        return self._experts[0].linear_shapes

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Once loaded."""
        experts = sum(expert.weight_bytes(dtype) for expert in self._experts)
        return self._norm.weight_bytes(dtype) + self._router.weight_bytes + experts

    def load(self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel) -> None:
        self._norm.load(checkpoint, dtype=dtype)
        self._router.load(checkpoint)
        for expert in self._experts:
            expert.load(checkpoint, dtype=dtype, kernel=kernel)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [tokens, hidden] → partial [tokens, hidden]; zero for tokens that have no expert on this rank."""
        chosen, weights = self._router(hidden)
        normed = self._norm(hidden)
        partial = torch.zeros_like(hidden)
        for expert, rows, shares in self._assignments(chosen, weights):
            result = expert(normed.index_select(0, rows))
            partial.index_add_(0, rows, result.mul_(shares.to(result.dtype)))
        return partial

    def _assignments(self, chosen: torch.Tensor, weights: torch.Tensor) -> Iterator[_Assignment]:
        """What this rank's experts have to do, in their order; nothing of those that no token wants."""
        order = chosen.reshape(-1).argsort(stable=True)
        rows, shares = order // chosen.shape[1], weights.reshape(-1, 1)[order]
        bounds = torch.arange(self._begin, self._begin + len(self._experts) + 1)
        starts = torch.searchsorted(chosen.reshape(-1)[order], bounds).tolist()
        for expert, start, end in zip(self._experts, starts, starts[1:], strict=False):
            for begin in range(start, end, EXPERT_ROWS):
                part = slice(begin, min(begin + EXPERT_ROWS, end))
                yield _Assignment(expert, rows[part], shares[part])


class _Expert:
    """One expert, whole."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, prefix: str) -> None:
        self._activation = config.activation
        self._gate_up = expert_gate_up_linear(config, experts, prefix)
        self._down = expert_down_linear(config, experts, prefix)

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        return self._gate_up.shape, self._down.shape

    def weight_bytes(self, dtype: torch.dtype) -> int:
        return self._gate_up.weight_bytes(dtype) + self._down.weight_bytes(dtype)

    def load(self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel) -> None:
        self._gate_up.load(checkpoint, dtype=dtype, kernel=kernel)
        self._down.load(checkpoint, dtype=dtype, kernel=kernel)

    def __call__(self, normed: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, hidden]."""
        return self._down(gated(self._gate_up(normed), self._activation))


class _Assignment(NamedTuple):
    """Rows that an expert computes."""

    expert: _Expert
    rows: torch.Tensor
    """int64 [rows]."""
    shares: torch.Tensor
    """float32 [rows, 1]: what the expert's result is multiplied by."""


class _Router:
    """Chooses each token's experts. It holds the router's weight and the norm's, multiplied, in float64."""

    def __init__(self, experts: ExpertsConfig, name: str, hidden_size: int, norm: RmsNorm) -> None:
        self._experts = experts
        self._source = TensorSlice(name, (experts.number, hidden_size))
        self._norm = norm
        self._weight = torch.empty(0)

    @property
    def weight_bytes(self) -> int:
        """Once loaded."""
        return self._source.shape[0] * self._source.shape[1] * torch.float64.itemsize

    def load(self, checkpoint: Checkpoint) -> None:
        """After the norm."""
        self._weight = torch.empty(self._source.shape, dtype=torch.float64)
        checkpoint.read(self._source, self._weight)
        self._weight.mul_(self._norm.weight)

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [tokens, hidden] → numbers of the chosen experts, best first, and their weights: [tokens, chosen]."""
        exact = hidden.double()
        mean_square = torch.linalg.vecdot(exact, exact).unsqueeze(1) / hidden.shape[1]
        logits = (exact @ self._weight.t() * (mean_square + self._norm.eps).rsqrt()).float()
        # Not topk: which of two that tie it takes is not said.
        chosen = logits.argsort(dim=1, descending=True, stable=True)[:, : self._experts.per_token]
        weights = logits.softmax(dim=1).gather(1, chosen)
        return chosen, weights / weights.sum(dim=1, keepdim=True) if self._experts.normalised else weights

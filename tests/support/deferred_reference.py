"""transformers' models with results of experts that come a layer late: the reference of expert deferral."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

Forward = Callable[..., torch.Tensor]


@dataclass(slots=True)
class _Owed:
    """Sum of experts that the next layer adds, [tokens, hidden]; None: nothing is owed."""

    late: torch.Tensor | None = field(default=None)


@contextmanager
def deferring(model: Any, late_experts: Mapping[int, Set[int]], number: int) -> Iterator[None]:
    """Have results of some experts of a model added a layer late, within this context.

    `late_experts`: by layer. Late are those of them that are among a token's `number` chosen ones with the least
    weights. The MLP of the layer behind adds them to its own result.
    """
    owed, changed = _Owed(), []
    for i, layer in enumerate(model.model.layers):
        if i in late_experts:
            experts = layer.mlp.experts
            changed.append((experts, experts.forward))
            experts.forward = _late(experts.forward, torch.tensor(sorted(late_experts[i])), number, owed)
        changed.append((layer.mlp, layer.mlp.forward))
        layer.mlp.forward = _with_owed(layer.mlp.forward, owed)
    try:
        yield
    finally:
        for module, forward in reversed(changed):
            module.forward = forward


def _late(forward: Forward, late_experts: torch.Tensor, number: int, owed: _Owed) -> Forward:
    def compute(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        places = weights.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        is_late = (places >= chosen.shape[1] - number) & torch.isin(chosen, late_experts)
        owed.late = forward(hidden, chosen, weights * is_late)
        return forward(hidden, chosen, weights * ~is_late)

    return compute


def _with_owed(forward: Forward, owed: _Owed) -> Forward:
    def compute(hidden: torch.Tensor) -> torch.Tensor:
        late, owed.late = owed.late, None
        total = forward(hidden)
        return total if late is None else total + late.view_as(total)

    return compute

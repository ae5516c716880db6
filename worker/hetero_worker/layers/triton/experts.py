"""PackedExperts of GPUs: a layer's experts in two kernels, without a word from the host.

The kernels are grouped products (`kernels.grouped_matmul`), or for few rows and floats products row by row
(`kernels.row_product`).

Addresses of weights lie in a table on the device. It is written in place, so
recorded steps find experts that were exchanged. Weights that slept lie elsewhere and have to be held again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

import torch

from hetero_api.model_parts import Activation, ExpertsConfig
from hetero_api.rank_memory import CHOICES_AT_ONCE
from hetero_worker.adapters.low_rank import MAX_ADAPTERS
from hetero_worker.kernels.activations import gated
from hetero_worker.kernels.grouped_matmul import (
    ADDRESSES,
    ExpertKind,
    SortedChoices,
    add_choices,
    float_kind,
    grouped_linear,
)
from hetero_worker.kernels.low_rank import FACTORS, add_low_rank, column_blocks, place_factors
from hetero_worker.kernels.quantized_matmul import constants_of
from hetero_worker.kernels.row_product import add_experts
from hetero_worker.layers.linear_kernels import ExpertFactors, LateSum, PackedExperts, PackedMlp, PackedWeight
from hetero_worker.layers.triton.weights import DeviceWeight

_ADDRESSES: Final = int(ADDRESSES.value)
_FEW_CHOICES: Final = 32
"""As many choices are mostly of different experts, so each may read its expert's weights by itself."""
_ROW_BITS: Final = 16
"""Of weights that have a kernel for single rows."""


class DeviceExperts(PackedExperts):
    """PackedExperts by our kernels, all of whose experts have weights of one kind."""

    def __init__(
        self,
        experts: ExpertsConfig,
        activation: Activation,
        *,
        shared: PackedMlp | None,
        counts: torch.Tensor,
        batch_invariant: bool,
    ) -> None:
        """`shared` and `counts` as for `LinearKernel.join_experts`; both lie on the device."""
        self._activation: Activation = activation
        self._shared = shared
        self._counts = counts
        self._batch_invariant = batch_invariant
        device, number = counts.device, experts.number
        self._numbers = torch.arange(number + 1, device=device)
        self._tables = torch.zeros(2, number + 1, _ADDRESSES, dtype=torch.int64, device=device)
        """The last of a row of experts is the one that padding chooses, which is never held."""
        self._adapters: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of both products, once an adapter came: the table of all adapters' factors of all experts, and blocks of
        columns, as `kernels.low_rank` has them."""
        self._most_rank = 0
        self._kept: dict[int, object] = {}
        """Factors by the adapters' numbers."""
        self._kinds: tuple[ExpertKind, ExpertKind] | None = None
        self._held: Mapping[int, PackedMlp] = {}

    def hold(self, experts: Mapping[int, PackedMlp]) -> None:
        """See `PackedExperts.hold`. Raises ValueError for weights of another kind than those before."""
        kinds = kinds_of(experts.values())
        if kinds is None or self._kinds not in (None, kinds):
            raise ValueError("experts that are computed together are to have weights of one kind")
        self._kinds, self._held = kinds, dict(experts)
        tables = torch.zeros(self._tables.shape, dtype=torch.int64)
        for number, mlp in experts.items():
            tables[0, number] = torch.tensor(_addresses(mlp.gate_up, mlp.gate_up_bias))
            tables[1, number] = torch.tensor(_addresses(mlp.down, mlp.down_bias))
        self._tables.copy_(tables)

    def hold_adapter(
        self, number: int, factors: Mapping[int, ExpertFactors], dtype: torch.dtype, *, max_rank: int
    ) -> None:
        """See `PackedExperts.hold_adapter`."""
        assert self._kinds is not None, "experts are held before what adapters add to them"
        device, rows = self._counts.device, len(self._numbers)
        if not self._adapters:
            self._most_rank = max_rank
            half, hidden = self._kinds[1].inputs, self._kinds[1].outputs
            for bounds in ([(0, half), (half, 2 * half)], [(0, hidden)]):
                shape = (MAX_ADAPTERS + 1) * rows, len(bounds), int(FACTORS.value)
                table = torch.zeros(shape, dtype=torch.int64, device=device)
                self._adapters.append((table, column_blocks(bounds, device)))
        (first, _), (second, _) = self._adapters
        for table in (first, second):
            table[number * rows : (number + 1) * rows].zero_()
        self._kept[number] = [
            (place_factors((gate, up), first[at], dtype), place_factors((down,), second[at], dtype))
            for at, (gate, up, down) in ((number * rows + expert, each) for expert, each in factors.items())
        ]

    def __call__(
        self, normed: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, /, numbers: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `PackedExperts.__call__`. Raises RuntimeError before experts are held."""
        return self._sum(normed, chosen, shares, numbers, self._shared)

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
        """See `PackedExperts.in_two`. The late choices are computed when they are asked for."""
        early = self._sum(normed, chosen[:, :-late], shares[:, :-late], numbers, self._shared)
        return early, partial(self._sum, normed, chosen[:, -late:], shares[:, -late:], numbers, None)

    def _sum(
        self,
        normed: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        numbers: torch.Tensor | None,
        shared: PackedMlp | None,
    ) -> torch.Tensor:
        if self._kinds is None:
            raise RuntimeError("experts were computed before any were held")
        normed, chosen, shares = normed.contiguous(), chosen.contiguous(), shares.contiguous()
        total = torch.empty_like(normed) if shared is None else _product(shared, normed, self._activation)
        first, second = self._kinds
        by_row = first.bits == _ROW_BITS and not self._batch_invariant and numbers is None
        if by_row and 0 < chosen.numel() <= _FEW_CHOICES:
            add_experts(
                *(normed, chosen, shares, self._tables, total),
                width=second.inputs,
                activation=self._activation,
                counts=self._counts,
                has_bias=(first.has_bias, second.has_bias),
                adds=shared is not None,
            )
            return total
        at_once = max(1, CHOICES_AT_ONCE // chosen.shape[1])
        for begin in range(0, len(normed), at_once):
            rows = slice(begin, begin + at_once)
            adapters = None if numbers is None else self._adapters_of(chosen[rows], numbers[rows])
            results = self._results(normed[rows], chosen[rows], self._kinds, adapters)
            add_choices(results, chosen[rows], shares[rows], self._tables[1], total[rows], adds=shared is not None)
        return total

    def _adapters_of(self, chosen: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return the place in a table of adapters of each choice [tokens · choices], of tokens with these adapters."""
        return (numbers[:, None] * len(self._numbers) + chosen).view(-1)

    def _results(
        self,
        normed: torch.Tensor,
        chosen: torch.Tensor,
        kinds: tuple[ExpertKind, ExpertKind],
        adapters: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return float32 results of choices [tokens · choices, hidden]; `adapters`: see `_adapters_of`."""
        choices = SortedChoices.of(chosen, self._numbers)
        invariant = self._batch_invariant
        first, second = self._tables
        inner = grouped_linear(normed, choices, first, kinds[0], counts=self._counts, batch_invariant=invariant)
        if adapters is not None:
            tokens = normed.index_select(0, choices.order // choices.per_token)
            self._add_adapters(tokens, inner, adapters.index_select(0, choices.order), 0)
        inner = gated(inner, self._activation)
        results = grouped_linear(inner, choices, second, kinds[1], dtype=torch.float32, batch_invariant=invariant)
        if adapters is not None:
            self._add_adapters(torch.empty_like(inner).index_copy_(0, choices.order, inner), results, adapters, 1)
        return results

    def _add_adapters(self, x: torch.Tensor, y: torch.Tensor, places: torch.Tensor, product: int) -> None:
        """Add low-rank products to one of the two products of choices."""
        table, blocks = self._adapters[product]
        add_low_rank(x, y, places, table, blocks, most_rank=self._most_rank)


def kinds_of(experts: Iterable[PackedMlp]) -> tuple[ExpertKind, ExpertKind] | None:
    """Return the kinds of both products' weights; None if experts differ, or our kernels do not take them."""
    found = {(_kind(mlp.gate_up, mlp.gate_up_bias), _kind(mlp.down, mlp.down_bias)) for mlp in experts}
    if len(found) != 1:
        return None
    ((first, second),) = found
    return None if first is None or second is None else (first, second)


def _kind(weight: PackedWeight, bias: torch.Tensor | None) -> ExpertKind | None:
    if isinstance(weight, DeviceWeight):
        kept = weight.weight
        return ExpertKind(kept.layout.outputs, kept.layout.inputs, **constants_of(kept), has_bias=bias is not None)
    if len(weight.parts) == 1 and len(weight.tensors) == 1:
        (tensor,) = weight.tensors
        outputs, inputs = tensor.shape
        return float_kind((outputs, inputs), tensor.dtype, has_bias=bias is not None)
    return None


def _addresses(weight: PackedWeight, bias: torch.Tensor | None) -> list[int]:
    """Return a row of the table."""
    found = [tensor.data_ptr() for tensor in weight.tensors]
    return [*found, *[0] * (_ADDRESSES - 1 - len(found)), 0 if bias is None else bias.data_ptr()]


def _product(mlp: PackedMlp, normed: torch.Tensor, activation: Activation) -> torch.Tensor:
    return mlp.down(gated(mlp.gate_up(normed, mlp.gate_up_bias), activation), mlp.down_bias)

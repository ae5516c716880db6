"""PackedExperts of GPUs: a layer's experts in two kernels, without a word from the host.

The kernels are grouped products (`kernels.grouped_matmul`), or for few rows and floats products row by row
(`kernels.row_product`).

Addresses of weights lie in a table on the device. It is written in place, so
recorded steps find experts that were exchanged. Weights that slept lie elsewhere and have to be held again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import gcd
from typing import Final, NamedTuple

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
from hetero_worker.kernels.quantized_matmul import CHUNK, constants_of
from hetero_worker.kernels.row_product import add_experts
from hetero_worker.layers.linear_kernels import (
    ExpertFactors,
    LateSum,
    PackedExperts,
    PackedMlp,
    PackedWeight,
    PanelExperts,
)
from hetero_worker.layers.triton.weights import DeviceWeight
from hetero_worker.memory.panels import PanelLayer, PanelWeight

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
        products = _Products(
            self._numbers, self._tables, self._kinds, self._counts, self._activation, self._batch_invariant
        )
        adapters = None
        if numbers is not None:
            adapters = _Adapters(numbers, self._adapters, self._most_rank, len(self._numbers))
        products.add(total, normed, chosen, shares, adds=shared is not None, adapters=adapters)
        return total


class _Adapters(NamedTuple):
    """Low-rank products of tokens with adapters, beside the products of a layer's experts."""

    numbers: torch.Tensor
    """int64 [tokens]"""
    products: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Tables and blocks of columns of both products, see `DeviceExperts`."""
    most_rank: int
    num_places: int
    """Places of an adapter in a table."""

    def places(self, chosen: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the place in a table of each choice [tokens · choices] of some tokens."""
        return (self.numbers[rows, None] * self.num_places + chosen).view(-1)

    def add(self, x: torch.Tensor, y: torch.Tensor, places: torch.Tensor, product: int) -> None:
        """Add low-rank products to one of the two products of choices."""
        table, blocks = self.products[product]
        add_low_rank(x, y, places, table, blocks, most_rank=self.most_rank)


class _Products(NamedTuple):
    """Grouped products of a layer's experts."""

    numbers: torch.Tensor
    """0, 1, 2 and so on to the number of experts."""
    tables: torch.Tensor
    """int64 [2, experts + 1, addresses]."""
    kinds: tuple[ExpertKind, ExpertKind]
    counts: torch.Tensor
    activation: Activation
    batch_invariant: bool = False

    def add(
        self,
        total: torch.Tensor,
        normed: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        *,
        adds: bool,
        adapters: _Adapters | None = None,
    ) -> None:
        """Write the experts' sums to `total`, or add them to it; some rows at a time."""
        at_once = max(1, CHOICES_AT_ONCE // chosen.shape[1])
        for begin in range(0, len(normed), at_once):
            rows = slice(begin, begin + at_once)
            results = self._results(normed[rows], chosen[rows], rows, adapters)
            add_choices(results, chosen[rows], shares[rows], self.tables[1], total[rows], adds=adds)

    def _results(
        self, normed: torch.Tensor, chosen: torch.Tensor, rows: slice, adapters: _Adapters | None
    ) -> torch.Tensor:
        """Return float32 results of choices [tokens · choices, hidden]; the tokens are these rows of a step."""
        choices = SortedChoices.of(chosen, self.numbers)
        invariant, (first, second) = self.batch_invariant, self.tables
        inner = grouped_linear(normed, choices, first, self.kinds[0], counts=self.counts, batch_invariant=invariant)
        if adapters is None:
            inner = gated(inner, self.activation)
            return grouped_linear(inner, choices, second, self.kinds[1], dtype=torch.float32, batch_invariant=invariant)
        places, tokens = adapters.places(chosen, rows), normed.index_select(0, choices.order // choices.per_token)
        adapters.add(tokens, inner, places.index_select(0, choices.order), 0)
        inner = gated(inner, self.activation)
        results = grouped_linear(inner, choices, second, self.kinds[1], dtype=torch.float32, batch_invariant=invariant)
        adapters.add(torch.empty_like(inner).index_copy_(0, choices.order, inner), results, places, 1)
        return results


class DevicePanelExperts(PanelExperts):
    """PanelExperts by our kernels, which read the layout of host cores."""

    def __init__(self, layer: PanelLayer, buffer: torch.Tensor, activation: Activation, *, num_experts: int) -> None:
        """`buffer`: uint8 on the device, what the layer's places are counted from."""
        tables = torch.zeros(2, num_experts + 1, _ADDRESSES, dtype=torch.int64)
        for number, pair in layer.places.items():
            for table, weight, place in zip(tables, (layer.gate_up, layer.down), pair, strict=True):
                present = (True, weight.format.bits <= 8, weight.has_minima)
                for part, begin in enumerate(place):
                    table[number, part] = (buffer.data_ptr() + begin) * present[part]
        self._buffer = buffer
        device = buffer.device
        self._products = _Products(
            torch.arange(num_experts + 1, device=device),
            tables.to(device),
            (_panel_kind(layer.gate_up), _panel_kind(layer.down)),
            torch.zeros(num_experts, dtype=torch.int64, device=device),
            activation,
        )

    def add(self, total: torch.Tensor, normed: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, /) -> None:
        """See `PanelExperts.add`."""
        self._products.add(total, normed.contiguous(), chosen.contiguous(), shares.contiguous(), adds=True)

    def rename(self, leaving: int, arriving: int) -> None:
        """See `PanelExperts.rename`."""
        tables = self._products.tables
        tables[:, arriving] = tables[:, leaving]
        tables[:, leaving] = 0


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


def _panel_kind(weight: PanelWeight) -> ExpertKind:
    """Return the kind of weights that lie as host cores have them."""
    kind = weight.format
    quantized = kind.bits <= 8
    chunk = gcd(weight.group, CHUNK) if quantized else CHUNK
    middle = 0 if not quantized or (kind.bits == 4 and weight.has_minima) else 1 << (kind.bits - 1)
    floats = (kind.is_float, weight.has_minima, False)
    shape = weight.outputs, weight.inputs, weight.group
    return ExpertKind(*shape, chunk, kind.bits, middle, *floats, lane=kind.lane, panel_size=weight.panel_size)


def _addresses(weight: PackedWeight, bias: torch.Tensor | None) -> list[int]:
    """Return a row of the table."""
    found = [tensor.data_ptr() for tensor in weight.tensors]
    return [*found, *[0] * (_ADDRESSES - 1 - len(found)), 0 if bias is None else bias.data_ptr()]


def _product(mlp: PackedMlp, normed: torch.Tensor, activation: Activation) -> torch.Tensor:
    return mlp.down(gated(mlp.gate_up(normed, mlp.gate_up_bias), activation), mlp.down_bias)

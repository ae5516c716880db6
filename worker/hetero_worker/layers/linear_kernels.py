"""Interface of kernels that compute x · Wᵀ + b, torch's implementations, and the width in which a kernel keeps weights.

A kernel packs a weight once, at load time, and then multiplies with it. Packing may copy: the caller then drops the
unpacked weight. A kernel that can multiply with narrower weights than its inputs says so (`LinearKernel.storage`,
`takes`); otherwise weights are widened to the arithmetic type. The numbers are the same on both kinds of rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch.nn import functional as F

from hetero_api.model_config import ModelConfig
from hetero_api.model_parts import Activation, ExpertsConfig
from hetero_api.weight_format import COLUMN_UNIT, WeightFormat
from hetero_worker.adapters.low_rank import AdapterRows, LowRank, PackedLowRank
from hetero_worker.adapters.peft_files import LowRankFactors
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.memory.panels import PANEL_ROWS, PanelLayer, PanelWeight, Place

FLOAT_TYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Types by their names in config.json."""


class PackedWeight(ABC):
    """A weight [out, in] in a kernel's layout."""

    memory: tuple[torch.Tensor, ...] = ()
    """All of the weight's bytes as uint8, if its kernel has a `layout`."""

    @property
    def panels(self) -> PanelWeight | None:
        """Kind of the matrix, if its memory is laid out as host cores have it; else None."""
        return None

    def take_place_of(self, other: PackedWeight, /) -> None:
        """Move to the memory of another weight, which is not used any more; both have `panels`.

        Raises ValueError if that is of another kind.
        """
        raise ValueError(f"{type(self).__name__} cannot take the place of {type(other).__name__}")

    @property
    def parts(self) -> Sequence[PackedWeight]:
        """Weights that it is made of, in the order of their rows."""
        return (self,)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Tensors that hold the weight; none of them if its kernel keeps it in memory that does not sleep."""
        return ()

    @abstractmethod
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        """Return x · Wᵀ + b, contiguous [rows, out], of x [rows, in]."""

    def gated(
        self, x: torch.Tensor, bias: torch.Tensor | None, /, activation: Activation, ops: FusedOps
    ) -> torch.Tensor:
        """Return activation(gate) · up, new [rows, out / 2], of [gate | up] = x · Wᵀ + b and x [rows, in]."""
        return ops.gated(self(x, bias), activation)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ, float32 [rows, out], of x [rows, in]. A kernel may omit the rounding to its inputs' type."""
        return self(x, None).float()

    def embed(self, ids: torch.Tensor, *, first: int = 0, scale: float = 1.0) -> torch.Tensor:
        """Return rows `ids - first` of the weight, times `scale`, for int64 [n] ids; zeros where no such row exists.

        The result [n, in] has the type of the kernel's inputs, and may be changed. Only for kernels that `embed`.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot look up rows")


class PackedHeads(ABC):
    """A weight [heads, out, in] in a kernel's layout, each of whose matrices is multiplied with rows of its own."""

    @abstractmethod
    def __call__(self, x: torch.Tensor, out: torch.Tensor, /) -> None:
        """Write x · Wᵀ of each head to `out` [rows, heads, out], of x [rows, heads, in]; elements lie side by side."""


LateSum = Callable[[], torch.Tensor]
"""Returns a sum of experts, [tokens, hidden], which may be computed by then or not; called once."""


class PackedMlp(NamedTuple):
    """Packed weights of a gated MLP, with their biases if it has them."""

    gate_up: PackedWeight
    gate_up_bias: torch.Tensor | None
    down: PackedWeight
    down_bias: torch.Tensor | None


ExpertFactors = Sequence[LowRankFactors | None]
"""An adapter's factors of an expert's gate, up and down projection; None: it leaves that as it is."""


class PackedExperts(ABC):
    """A rank's experts of one layer, in a kernel's layout, which are computed together."""

    @abstractmethod
    def hold(self, experts: Mapping[int, PackedMlp]) -> None:
        """Compute with these experts from now on, by their numbers; steps that were recorded before do, too."""

    @abstractmethod
    def hold_adapter(
        self, number: int, factors: Mapping[int, ExpertFactors], dtype: torch.dtype, *, max_rank: int
    ) -> None:
        """Keep an adapter's factors of held experts in a type, in place of those that its number had; {}: of none.

        `max_rank`: the largest of any adapter, always the same.
        """

    @abstractmethod
    def __call__(
        self, normed: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, /, numbers: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of the experts' outputs, weighted by their shares, [tokens, hidden] of `normed`, as `chosen`.

        `chosen` is int64 and `shares` float32 [tokens, experts a token]. Experts that are not held add nothing.
        `numbers`, int64 [tokens], are of the tokens' adapters, 0: none; None: no token has one that changes experts.
        """

    @abstractmethod
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
        """Return the sum without each token's last `late` choices, and a function that returns the sum of these.

        A row's bits do not depend on the other rows. The tensors must not change until the function was called.
        """


class PanelExperts(ABC):
    """Experts of a layer that one rank on host cores holds, computed on another device from a copy of its memory."""

    @abstractmethod
    def add(self, total: torch.Tensor, normed: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, /) -> None:
        """Add the experts' weighted outputs to `total` [tokens, hidden]; arguments as of `PackedExperts.__call__`."""

    @abstractmethod
    def rename(self, leaving: int, arriving: int) -> None:
        """Take an expert to be in the place of another from now on."""


class LinearKernel(ABC):
    """A way to multiply with a weight. The defaults describe a kernel that wants weights of its inputs' type."""

    copies_weight: bool = False
    """True if packing copies, so that the caller can drop the given weight."""
    embeds: bool = False
    """True if packed weights can look up rows: an embedding and a tied output head then share their memory."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that `Loaded.kernels` reports."""

    @property
    def layout(self) -> str:
        """Everything but the matrix that the bytes of a packed quantised weight depend on; "": they cannot be kept."""
        return ""

    def beside_steps(self) -> LinearKernel:
        """Return a kernel that packs the same on another thread, while this one multiplies."""
        return self

    @abstractmethod
    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Pack a weight [out, in] of floats."""

    def pack_heads(self, weight: torch.Tensor) -> PackedHeads:
        """Pack a weight [heads, out, in] of floats, of the type that `storage` returns."""
        return _TorchHeads(weight)

    def storage(self, stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:  # noqa: ARG002 - for overrides
        """Return the type in which `pack` wants a weight that is `stored` in the checkpoint, for inputs of `dtype`.

        It is one of the two, and the stored one only if widening it to `dtype` loses nothing.
        """
        return dtype

    def join_experts(
        self,
        experts: ExpertsConfig,  # noqa: ARG002 - for overrides
        activation: Activation,  # noqa: ARG002
        *,
        shared: PackedMlp | None,  # noqa: ARG002
        counts: torch.Tensor,  # noqa: ARG002
        loaded: Sequence[PackedMlp],  # noqa: ARG002
    ) -> PackedExperts | None:
        """Return a layer's experts, none of them held yet, or None if they are computed one by one.

        `shared` is added for all tokens. `counts`, int64 [experts] on the weights' device, grow by the tokens that
        choose held experts. `loaded`: all that are to be held first.
        """
        return None

    def sharing(self, allocate: Callable[[int], torch.Tensor]) -> LinearKernel | None:  # noqa: ARG002 - for overrides
        """Return a kernel that packs the same into memory that `allocate` returns; None if this one packs no panels."""
        return None

    def panel_experts(
        self,
        experts: ExpertsConfig,  # noqa: ARG002 - for overrides
        activation: Activation,
        layer: PanelLayer,
        buffer: torch.Tensor,
    ) -> PanelExperts:
        """Return a layer's experts as a rank on host cores packed them, in `buffer` on this kernel's device."""
        return TorchPanelExperts(layer, buffer, activation)

    def low_rank(self, heights: Sequence[int], rows: AdapterRows, *, device: torch.device) -> LowRank:
        """Return the adapters' products, none held yet, of a layer whose parts have so many output rows."""
        return PackedLowRank(heights, rows, pack=self.pack, device=device)

    def takes(self, weights: WeightFormat) -> bool:  # noqa: ARG002 - for overrides
        """Return whether the kernel multiplies with quantised weights of this format."""
        return False

    def pack_quantized(self, matrix: QuantizedMatrix) -> PackedWeight:
        """Pack a copy of the matrix. Raises ValueError for a format that the kernel does not take."""
        raise ValueError(f"linear kernel {self.name} takes no weights quantised to {matrix.format}")

    def blank_quantized(self, shape: tuple[int, int], weights: WeightFormat) -> PackedWeight:  # noqa: ARG002
        """Return a packed weight (out, in) whose `memory` the caller fills. Raises ValueError as `pack_quantized`."""
        raise ValueError(f"linear kernel {self.name} takes no weights quantised to {weights}")


class PlainKernel(LinearKernel):
    """LinearKernel by torch.nn.functional.linear: the reference, and the kernel of machines without a compiler."""

    name = "torch"

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Return a product with the weight [out, in] as it is."""
        return TorchWeight(weight)


class RowKernel(LinearKernel):
    """LinearKernel by torch, one row at a time: slow, but a row's bits never depend on the rows beside it."""

    name = "torch-invariant (row by row)"

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Return a product with the weight [out, in] as it is."""
        return _WeightByRow(weight)

    def pack_heads(self, weight: torch.Tensor) -> PackedHeads:
        """Return products with the weight [heads, out, in] as it is."""
        return HeadsByRow(weight)


class TorchWeight(PackedWeight):
    """A weight [out, in] of floats as it is, multiplied by torch."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """See `PackedWeight.tensors`."""
        return (self._weight,)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        """Return x · Wᵀ + b, contiguous [rows, out], of x [rows, in]."""
        return F.linear(x, self._weight, bias)

    def embed(self, ids: torch.Tensor, *, first: int = 0, scale: float = 1.0) -> torch.Tensor:
        """See `PackedWeight.embed`."""
        local = ids - first
        foreign = (local < 0) | (local >= len(self._weight))
        found = F.embedding(local.masked_fill_(foreign, 0), self._weight)
        found.masked_fill_(foreign.unsqueeze(1), 0.0)
        return found if scale == 1.0 else found.mul_(scale)


class _WeightByRow(TorchWeight):
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        out = x.new_empty(len(x), len(self._weight))
        for row, result in zip(x, out, strict=True):
            result.copy_(F.linear(row, self._weight, bias))
        return out


class TorchPanelExperts(PanelExperts):
    """PanelExperts by torch, which widens an expert when it is computed."""

    def __init__(self, layer: PanelLayer, buffer: torch.Tensor, activation: Activation) -> None:
        """`buffer`: uint8, what the layer's places are counted from."""
        self._layer = layer
        self._buffer = buffer
        self._activation: Activation = activation

    def add(self, total: torch.Tensor, normed: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, /) -> None:
        """See `PanelExperts.add`."""
        for number, (first, second) in self._layer.places.items():
            tokens, choices = (chosen == number).nonzero(as_tuple=True)
            if len(tokens):
                gate_up = _panel_floats(self._layer.gate_up, self._buffer, first).to(normed.dtype)
                down = _panel_floats(self._layer.down, self._buffer, second).to(normed.dtype)
                inner = PLAIN_OPS.gated(F.linear(normed[tokens], gate_up), self._activation)
                result = F.linear(inner, down).mul_(shares[tokens, choices, None].to(normed.dtype))
                total.index_add_(0, tokens, result)

    def rename(self, leaving: int, arriving: int) -> None:
        """See `PanelExperts.rename`."""
        self._layer = self._layer.renamed(leaving, arriving)


def _panel_floats(weight: PanelWeight, memory: torch.Tensor, place: Place) -> torch.Tensor:
    """Return float32 [out, in] of a packed matrix in uint8 memory that its place is counted from."""
    kind = weight.format
    size = weight.panels * weight.panel_size * kind.dtype.itemsize
    stored = memory[place.values : place.values + size].view(kind.dtype)
    stored = stored.view(weight.panels, -1, PANEL_ROWS, kind.lane).transpose(1, 2)
    if kind.bits == 4:
        stored = torch.cat((stored & 15, stored >> 4), dim=3)
    elif kind.dtype == torch.bfloat16:
        stored = stored.flip(3)
    values = stored.reshape(weight.panels * PANEL_ROWS, -1)[: weight.outputs, : weight.inputs]
    if kind.bits > 8:
        return values.float()
    if kind.bits == 8 and not kind.is_float:
        values = (values ^ 0x80).view(torch.int8)
    weights = WeightFormat(kind.bits, weight.group, has_minimum=weight.has_minima, is_float=kind.is_float)
    minima = _panel_numbers(weight, memory, place.minima) if weight.has_minima else None
    return QuantizedMatrix(weights, values, _panel_numbers(weight, memory, place.scales), minima).dequantized()


def _panel_numbers(weight: PanelWeight, memory: torch.Tensor, begin: int) -> torch.Tensor:
    """Return float32 [out, groups] of scales or minima."""
    size = weight.panels * weight.num_groups * PANEL_ROWS * torch.float16.itemsize
    packed = memory[begin : begin + size].view(torch.float16).view(weight.panels, weight.num_groups, PANEL_ROWS)
    return packed.transpose(1, 2).reshape(-1, weight.num_groups)[: weight.outputs].float()


class _TorchHeads(PackedHeads):
    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor, out: torch.Tensor, /) -> None:
        out.copy_(torch.bmm(x.transpose(0, 1), self._weight.transpose(1, 2)).transpose(0, 1))


class HeadsByRow(_TorchHeads):
    """PackedHeads by torch, one row at a time: a row's bits do not depend on the others."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor, /) -> None:
        """See `PackedHeads.__call__`."""
        for row, result in zip(x, out, strict=True):
            result.copy_(torch.bmm(self._weight, row.unsqueeze(2).contiguous()).squeeze(2))


def kept_format(weights: WeightFormat | None, kernel: LinearKernel | None) -> WeightFormat | None:
    """Return the format of a weight in memory; None: floats. Without a kernel, weights are floats."""
    return weights if weights is not None and kernel is not None and kernel.takes(weights) else None


def kept_dtype(stored: torch.dtype, dtype: torch.dtype, kernel: LinearKernel | None) -> torch.dtype:
    """Return the type in memory of a weight that is stored as floats."""
    return dtype if kernel is None else kernel.storage(stored, dtype)


def matrix_bytes(
    shape: tuple[int, int], bound: WeightFormat | None, floats: str, *, dtype: torch.dtype, kernel: LinearKernel | None
) -> int:
    """Return the most bytes that a matrix takes in memory.

    `bound` is the widest format in which it may be stored; None: it is floats of the type that config.json calls
    `floats`.
    """
    weights = kept_format(bound, kernel)
    if weights is not None:
        return weights.matrix_bytes(*shape)
    stored = FLOAT_TYPES.get(floats) if bound is None else None
    kept = dtype if stored is None else kept_dtype(stored, dtype, kernel)
    return math.prod(shape) * kept.itemsize


def kept_bits(kernel: LinearKernel, dtype: torch.dtype, config: ModelConfig) -> frozenset[int]:
    """Return the widths below the arithmetic type's in which a rank with this kernel keeps any part of a model.

    A width of 16, 8 or 4 counts only if the kernel keeps all of the model's formats of that width.
    """
    stored = config.weights
    units = {0, COLUMN_UNIT, *(config.of_layer(i).output_unit for i in range(config.num_layers))}
    formats = {*(stored.within(unit).layers for unit in units), stored.of_experts.layers, stored.vocabulary} - {None}
    widened = {weights.bits for weights in formats if weights and kept_format(weights, kernel) is None}
    kept = {weights.bits for weights in formats if weights} - widened
    floats = FLOAT_TYPES.get(stored.floats, dtype)
    if kept_dtype(floats, dtype, kernel).itemsize < dtype.itemsize:
        kept.add(8 * floats.itemsize)
    return frozenset(kept)

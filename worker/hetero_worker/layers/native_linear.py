"""LinearKernel by the native kernels: weights as narrow as they are stored, widened or multiplied as whole numbers.

A packed weight is in memory once, in the order in which it is read, and serves one row as well as many; its rows can
be looked up, so an embedding needs no memory beside a tied output head. Weights are written by the threads that will
read them. Sums are of float32: weights of 16 bits lose nothing by that. With whole-number weights rows are made whole
numbers as well, on the fly, in groups of up to 32 inputs.

A row's bits depend on that row alone: not on others, on how many there are, nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

import torch

from hetero_api.model_parts import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, ExpertsConfig
from hetero_api.weight_format import WeightFormat
from hetero_worker.adapters.low_rank import MAX_ADAPTERS, AdapterRows, LowRank
from hetero_worker.adapters.native_low_rank import NativeFactors, NativeLowRank
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.layers.fused_ops import FusedOps
from hetero_worker.layers.linear_kernels import (
    ExpertFactors,
    LateSum,
    LinearKernel,
    PackedExperts,
    PackedHeads,
    PackedMlp,
    PackedWeight,
)
from hetero_worker.layers.native_ops import NativeOps
from hetero_worker.memory.huge_pages import empty_on_huge_pages
from hetero_worker.memory.panels import PanelWeight
from hetero_worker.native.compute_library import (
    ACTIVATIONS,
    F4,
    F8,
    FORMATS,
    I4,
    I8,
    embed_op,
    experts_op,
    ffi,
    heads_op,
    linear_op,
    pack_op,
)
from hetero_worker.native.loading import address_of
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.native.team import NativeTeam

_EXACT: Final[dict[torch.dtype, tuple[torch.dtype, ...]]] = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}
"""Types of weights that are numbers of the inputs' type, by that type."""
_KINDS: Final = {(8, False): I8, (4, False): I4, (8, True): F8, (4, True): F4}
"""Kernels' formats by bits and whether values are floats."""
_GROUP_UNIT: Final = 16
"""Inputs; groups are multiples of it."""
_EXPERT_PARTS: Final = 3
"""Of an expert that adapters change: gate, up and down projection."""
_PRESENT: Final = 1
"""Stands for an address that is not known yet."""

Allocate = Callable[[int], torch.Tensor]
"""Returns so many bytes, uint8 and aligned to 64."""


class NativeLinear(LinearKernel):
    """LinearKernel on an op queue's team."""

    copies_weight = True
    embeds = True

    def __init__(
        self, op_queue: OpQueue, dtype: torch.dtype = torch.float32, *, allocate: Allocate | None = None
    ) -> None:
        """`dtype`: of inputs and outputs. `allocate`: returns the memory of packed weights; None: huge pages."""
        self._op_queue = op_queue
        self._dtype = dtype
        self._allocate = allocate or _on_huge_pages

    @property
    def name(self) -> str:
        """The name that `Loaded.kernels` reports."""
        return f"native ({self._op_queue.team.library.isa})"

    def beside_steps(self) -> LinearKernel:
        """Return a kernel on the calling thread alone: a team computes for one thread at a time."""
        return NativeLinear(OpQueue(NativeTeam(self._op_queue.team.library, 1)), self._dtype)

    def sharing(self, allocate: Allocate) -> LinearKernel:
        """See `LinearKernel.sharing`."""
        return NativeLinear(self._op_queue, self._dtype, allocate=allocate)

    def storage(self, stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        """Return the stored type if all of its numbers are numbers of `dtype`, else `dtype`."""
        return stored if stored in _EXACT[dtype] else dtype

    def takes(self, weights: WeightFormat) -> bool:
        """Return True for formats whose groups have a multiple of 16 inputs."""
        return weights.group % _GROUP_UNIT == 0 and not (weights.is_float and weights.has_minimum)

    def pack_heads(self, weight: torch.Tensor) -> PackedHeads:
        """Pack a copy of the weight."""
        return NativeHeads(self._op_queue, [self.pack(head) for head in weight], self._dtype)

    def join_experts(
        self,
        experts: ExpertsConfig,
        activation: Activation,
        *,
        shared: PackedMlp | None,
        counts: torch.Tensor,
        loaded: Sequence[PackedMlp],  # noqa: ARG002 - all of its weights are of one kind
    ) -> PackedExperts | None:
        """See `LinearKernel.join_experts`."""
        return NativeExperts(self._op_queue, experts, activation, shared=shared, counts=counts)

    def pack(self, weight: torch.Tensor) -> NativeWeight:
        """Return the packed weight [out, in], which is float32, bfloat16 or float16."""
        outputs, inputs = weight.shape
        kind = FORMATS[weight.dtype]
        packed = NativeWeight(self._op_queue, self._dtype, kind, (outputs, inputs), allocate=self._allocate)
        packed.write(weight)
        return packed

    def pack_quantized(self, matrix: QuantizedMatrix) -> NativeWeight:
        """Return the packed matrix. Raises ValueError for a format that the kernel does not take."""
        packed = self.blank_quantized(matrix.shape, matrix.format)
        packed.write(matrix.values, matrix.scales, matrix.minima)
        return packed

    def low_rank(self, heights: Sequence[int], rows: AdapterRows, *, device: torch.device) -> LowRank:  # noqa: ARG002
        """See `LinearKernel.low_rank`."""
        return NativeLowRank(self._op_queue, heights, rows)

    @property
    def layout(self) -> str:
        """Name of the layout that packed weights have: their bytes depend on it and the matrix only."""
        library = self._op_queue.team.library
        return f"native {library.source} {library.isa}"

    def blank_quantized(self, shape: tuple[int, int], weights: WeightFormat) -> NativeWeight:
        """Return a packed weight whose memory the caller fills with a matrix of this shape and format.

        Raises ValueError for a format that the kernel does not take.
        """
        if not self.takes(weights):
            raise ValueError(f"native kernels take groups of a multiple of {_GROUP_UNIT} inputs, not {weights}")
        return NativeWeight(
            self._op_queue,
            self._dtype,
            _KINDS[weights.bits, weights.is_float],
            shape,
            group=weights.group,
            has_scales=True,
            has_minima=weights.has_minimum,
            allocate=self._allocate,
        )


class NativeHeads(PackedHeads):
    """PackedHeads of the native kernels."""

    def __init__(self, op_queue: OpQueue, weights: Sequence[NativeWeight], dtype: torch.dtype) -> None:
        """`weights`: one of each head; `dtype`: of inputs and outputs."""
        self._op_queue = op_queue
        self._weights = tuple(weights)
        self._dtype = dtype
        self._table = ffi.new("uintptr_t[]", [weight.address for weight in weights])

    def __call__(self, x: torch.Tensor, out: torch.Tensor, /) -> None:
        """See `PackedHeads.__call__`. Raises ValueError for other types, and for rows that are not contiguous."""
        if not x.dtype == out.dtype == self._dtype or x.stride(2) != 1 or out.stride(2) != 1:
            raise ValueError(f"heads are multiplied with contiguous rows of {self._dtype}, not of {x.dtype}")
        op = heads_op(len(x), address_of(self._table), len(self._weights), FORMATS[self._dtype])
        op.x, op.x_stride, op.x_head_stride = x.data_ptr(), x.stride(0), x.stride(1)
        op.y, op.y_stride, op.y_head_stride = out.data_ptr(), out.stride(0), out.stride(1)
        op.scratch = self._op_queue.scratch(op)
        self._op_queue.submit(op, self)


class NativeExperts(PackedExperts):
    """PackedExperts of the native kernels: one operation, which finds experts in a table whenever it runs."""

    def __init__(
        self,
        op_queue: OpQueue,
        experts: ExpertsConfig,
        activation: Activation,
        *,
        shared: PackedMlp | None,
        counts: torch.Tensor,
    ) -> None:
        self._op_queue = op_queue
        self._shape = experts
        self._activation = ACTIVATIONS[activation]
        self._shared = shared
        self._counts = counts
        self._table = ffi.new("hc_expert[]", experts.number + 1)
        self._held: Mapping[int, PackedMlp] = {}
        self._factors = ffi.new("uintptr_t[]", MAX_ADAPTERS + 1)
        self._adapters: dict[int, NativeFactors] = {}
        self._columns = 0
        if shared is not None:
            _fill(self._table[experts.number], shared)
        self._shared_columns = int(self._table[experts.number].columns)

    def hold(self, experts: Mapping[int, PackedMlp]) -> None:
        """See `PackedExperts.hold`."""
        for number in self._held.keys() - experts.keys():
            self._table[number].columns = 0
        for number, expert in experts.items():
            _fill(self._table[number], expert)
        self._held = dict(experts)
        self._columns = max((int(self._table[number].columns) for number in experts), default=0)

    def hold_adapter(
        self,
        number: int,
        factors: Mapping[int, ExpertFactors],
        dtype: torch.dtype,
        *,
        max_rank: int,  # noqa: ARG002
    ) -> None:
        """See `PackedExperts.hold_adapter`."""
        none = (None,) * _EXPERT_PARTS
        each = chain.from_iterable(factors.get(expert, none) for expert in range(self._shape.number))
        held = NativeFactors(list(each), dtype)
        self._factors[number] = held.address
        self._adapters[number] = held

    def __call__(
        self, normed: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, /, numbers: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `PackedExperts.__call__`. Raises ValueError for tensors that are not contiguous or of other types."""
        return self._submit(normed, chosen, shares, numbers, shared_columns=self._shared_columns)

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
        """See `PackedExperts.in_two`. Raises as a call does.

        Few rows choose different experts: the late ones are computed when they are asked for. Of many rows, each expert
        is chosen early by some and late by others. Its weights are read only once: both sums are computed at once.
        """
        (rows, width), per_token = normed.shape, self._shape.per_token
        submit = partial(self._submit, normed, chosen, shares, numbers)
        early = partial(submit, shared_columns=self._shared_columns, late=late)
        if rows * per_token > self._shape.number:
            late_sum = self._op_queue.empty(rows, width, dtype=normed.dtype)
            return early(late_sum=late_sum), lambda: late_sum
        return early(), partial(submit, shared_columns=0, skipped=per_token - late)

    def _submit(
        self,
        normed: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        numbers: torch.Tensor | None,
        *,
        shared_columns: int,
        skipped: int = 0,
        late: int = 0,
        late_sum: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not all(x.is_contiguous() for x in (normed, chosen, shares)) or chosen.dtype != torch.int64:
            raise ValueError(f"experts take contiguous tensors, and numbers of torch.int64; these are {chosen.dtype}")
        (rows, width), dtype, shape = normed.shape, normed.dtype, self._shape
        y = self._op_queue.empty(rows, width, dtype=dtype)
        given = (FORMATS[dtype], self._activation, SWIGLU_ALPHA, SWIGLU_LIMIT, width)
        op = experts_op(rows, *given, self._columns, shared_columns, shape.number, shape.per_token)
        op.table, op.x, op.y = address_of(self._table), normed.data_ptr(), y.data_ptr()
        op.chosen, op.shares, op.counts = chosen.data_ptr(), shares.data_ptr(), self._counts.data_ptr()
        op.skipped, op.late, op.late_y = skipped, late, _address(late_sum)
        op.numbers, op.adapters, op.factors = _address(numbers), MAX_ADAPTERS + 1, address_of(self._factors)
        op.scratch = self._op_queue.scratch(op)
        self._op_queue.submit(op, self, chosen, numbers)
        return y


def _fill(entry: Any, mlp: PackedMlp) -> None:
    """Write an hc_expert. Raises TypeError for weights of another kernel."""
    gate_up, (down,) = [_native(part) for part in mlp.gate_up.parts], [_native(part) for part in mlp.down.parts]
    entry.gate_up = [weight.address for weight in gate_up] + [0] * (2 - len(gate_up))
    entry.gate_up_bias, entry.down_bias = _address(mlp.gate_up_bias), _address(mlp.down_bias)
    entry.down, entry.columns = down.address, down.shape[1]


def _with_rows_together(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy if the elements of its rows lie apart."""
    return x if x.stride(1) == 1 else x.contiguous()


def _native(weight: PackedWeight) -> NativeWeight:
    if not isinstance(weight, NativeWeight):
        raise TypeError(f"native experts are made of native weights, not of {type(weight).__name__}")
    return weight


class NativeWeight(PackedWeight):
    """PackedWeight of the native kernels."""

    def __init__(
        self,
        op_queue: OpQueue,
        dtype: torch.dtype,
        kind: int,
        shape: tuple[int, int],
        *,
        group: int = 0,
        has_scales: bool = False,
        has_minima: bool = False,
        allocate: Allocate | None = None,
    ) -> None:
        """`shape`: (out, in); not usable before `write`, or before its memory is filled."""
        self._op_queue = op_queue
        self._dtype = dtype
        self.shape: Final = shape
        """(out, in) features."""
        present = (0, _PRESENT if has_scales else 0, _PRESENT if has_minima else 0)
        self._weight = ffi.new("hc_weight *", (kind, *shape, group, *present))
        self.address: Final = address_of(self._weight)
        """Address of the hc_weight."""
        packed_bytes = op_queue.team.library.functions.hc_packed_bytes
        allocate = allocate or _on_huge_pages
        self._lie_in(tuple(allocate(packed_bytes(self.address, which)) for which in range(3)))

    def _lie_in(self, memory: tuple[torch.Tensor, ...]) -> None:
        self.memory = memory
        self._weight.values = memory[0].data_ptr()
        self._weight.scales = memory[1].data_ptr() if self._weight.scales else 0
        self._weight.minima = memory[2].data_ptr() if self._weight.minima else 0

    @property
    def panels(self) -> PanelWeight:
        """See `PackedWeight.panels`."""
        own = self._weight
        return PanelWeight(int(own.format), *self.shape, int(own.group), has_minima=bool(own.minima))

    def take_place_of(self, other: PackedWeight, /) -> None:
        """See `PackedWeight.take_place_of`."""
        if self.panels != other.panels:
            raise ValueError(f"a weight {self.panels} cannot take the place of {other.panels}")
        for own, place in zip(self.memory, other.memory, strict=True):
            place.copy_(own)
        self._lie_in(other.memory)

    @property
    def num_bytes(self) -> int:
        """Bytes of its memory."""
        return sum(part.nbytes for part in self.memory)

    def write(
        self, values: torch.Tensor, scales: torch.Tensor | None = None, minima: torch.Tensor | None = None
    ) -> None:
        """Pack `values` [out, in], with scales and minima, float32 [out, groups]."""
        values = values if values.stride(1) == 1 or values.shape[1] == 1 else values.contiguous()
        scales = None if scales is None else scales.contiguous()
        minima = None if minima is None else minima.contiguous()
        op = pack_op(len(values), self.address, values.data_ptr(), values.stride(0), _address(scales), _address(minima))
        self._op_queue.team.run_one(op)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        """Return x · Wᵀ + bias: [rows, in] → [rows, out], both of the arithmetic type, each row of x contiguous."""
        return self._multiply(x, bias, self._dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ as it was summed: [rows, in] of the arithmetic type → float32 [rows, out]."""
        return self._multiply(x, None, torch.float32)

    def gated(
        self, x: torch.Tensor, bias: torch.Tensor | None, /, activation: Activation, ops: FusedOps
    ) -> torch.Tensor:
        """See `PackedWeight.gated`: one operation, if both are native."""
        if not isinstance(ops, NativeOps):
            return super().gated(x, bias, activation, ops)
        x = _with_rows_together(x)
        product, gate_up = self._product(x, bias, self._dtype)
        return ops.gated_product(product, gate_up, activation, self, bias)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, y_type: torch.dtype) -> torch.Tensor:
        x = _with_rows_together(x)
        op, y = self._product(x, bias, y_type)
        self._op_queue.submit(op, self, bias)
        return y

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None, y_type: torch.dtype) -> tuple[Any, torch.Tensor]:
        """Return an operation that computes x · Wᵀ + bias, and what it writes."""
        if not x.dtype == (self._dtype if bias is None else bias.dtype) == self._dtype:
            raise ValueError(f"this weight is multiplied with {self._dtype}, not with {x.dtype}")
        (rows, _), (width, _) = x.shape, self.shape
        y = self._op_queue.empty(rows, width, dtype=y_type)
        given = (FORMATS[x.dtype], FORMATS[y_type], x.data_ptr(), x.stride(0), _address(bias))
        op = linear_op(rows, self.address, *given, y.data_ptr(), width)
        op.scratch = self._op_queue.scratch(op)
        return op, y

    def embed(self, ids: torch.Tensor, *, first: int = 0, scale: float = 1.0) -> torch.Tensor:
        """Return rows `ids - first`, times `scale`, for int64 [n] ids: [n, in]; zeros where no such row exists."""
        y = self._op_queue.empty(len(ids), self.shape[1], dtype=self._dtype)
        op = embed_op(len(ids), self.address, FORMATS[self._dtype], ids.data_ptr(), first, scale, y.data_ptr())
        self._op_queue.submit(op, self, ids)
        return y


def _on_huge_pages(num_bytes: int) -> torch.Tensor:
    return empty_on_huge_pages((num_bytes,), torch.uint8)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()

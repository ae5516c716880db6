"""FusedOps by the native kernels: operations that an OpQueue runs, and keeps while a step is recorded.

They take contiguous host tensors of float32 or bfloat16, and refuse others: a copy that torch made would be missing
when the step is replayed. A recording keeps weights, tables and inputs; activations lie in the queue's memory. The cap
of logits has no kernel: torch computes it, and it is not recorded.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from hetero_api.model_parts import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from hetero_worker.attention.base import StepAttention
from hetero_worker.attention.delta_rule import DeltaInputs, DeltaWeights, StateRows, state_rows
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.kernels.expert_choice import RouterWeights
from hetero_worker.layers.fused_ops import (
    PLAIN_OPS,
    FusedOps,
    HeadWeights,
    LatentNorm,
    LatentWrite,
    RotatedHeads,
    either,
    kv_heads_of,
)
from hetero_worker.layers.rotary import Rotation
from hetero_worker.native.compute_library import (
    ACTIVATIONS,
    FORMATS,
    SIGMOID,
    SOFTMAX,
    add_op,
    delta_op,
    ffi,
    gated_op,
    latent_op,
    norm_op,
    open_op,
    pick_op,
    products_op,
    rotate_op,
    route_op,
    squares_op,
)
from hetero_worker.native.loading import address_of
from hetero_worker.native.op_queue import OpQueue

_SCORES: Final = {"softmax": SOFTMAX, "sigmoid": SIGMOID}


class NativeOps:
    """A row's bits depend on that row alone, if those of `others` do."""

    def __init__(self, op_queue: OpQueue, *, others: FusedOps = PLAIN_OPS) -> None:
        """`others`: what computes the steps that there are no kernels for."""
        self._op_queue = op_queue
        self._others = others

    @property
    def name(self) -> str:
        """See `FusedOps.name`."""
        return f"native ({self._op_queue.team.library.isa})"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `FusedOps.rms_norm`."""
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `FusedOps.add_rms_norm`."""
        return self._norm(residual, delta, weight, eps)

    def add(self, x: torch.Tensor, *deltas: torch.Tensor, factor: float = 1.0) -> None:
        """See `FusedOps.add`."""
        (rows, width), dtype = x.shape, x.dtype
        terms = ffi.new("uintptr_t[]", [_address(delta, dtype) for delta in deltas])
        op = add_op(rows, FORMATS[dtype], width, _address(x, dtype), address_of(terms), len(deltas), factor)
        self._op_queue.submit(op, terms)

    def pick(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """See `FusedOps.pick`."""
        out = self._op_queue.empty(len(index), x.shape[1], dtype=x.dtype)
        rows, row_bytes = len(index), x.shape[1] * x.itemsize
        op = pick_op(rows, row_bytes, _address(x, x.dtype), _address(index, torch.int64), out.data_ptr())
        self._op_queue.submit(op, index)
        return out

    def empty(self, rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:  # noqa: ARG002
        """See `FusedOps.empty`."""
        return self._op_queue.empty(rows, width, dtype=dtype)

    def gated(self, gate_up: torch.Tensor, activation: Activation, up: torch.Tensor | None = None) -> torch.Tensor:
        """See `FusedOps.gated`. Raises ValueError for an `up` of another type, or whose elements lie apart."""
        op, out = self._gated_op(gate_up, activation, gate_up.shape[1] // 2 if up is None else gate_up.shape[1])
        if up is not None:
            op.up, op.up_stride = _address_of_rows(up, gate_up.dtype), up.stride(0)
        self._op_queue.submit(op)
        return out

    def gated_product(self, product: Any, gate_up: torch.Tensor, activation: Activation, *kept: object) -> torch.Tensor:
        """Return `gated` of what an hc_linear_op that was not submitted writes to `gate_up` [rows, gate | up].

        The product may leave `gate_up` as it was. `kept`: everything that it points at, as in `OpQueue.submit`.
        """
        op, out = self._gated_op(gate_up, activation, gate_up.shape[1] // 2)
        op.product = address_of(product)
        self._op_queue.submit(op, product, *kept)
        return out

    def _gated_op(self, gate_up: torch.Tensor, activation: Activation, columns: int) -> tuple[Any, torch.Tensor]:
        """Return an operation, and the tensor [rows, columns] that it writes."""
        rows, dtype = len(gate_up), gate_up.dtype
        out = self._op_queue.empty(rows, columns, dtype=dtype)
        given = (FORMATS[dtype], ACTIVATIONS[activation], columns, _address(gate_up, dtype))
        return gated_op(rows, *given, out.data_ptr(), SWIGLU_ALPHA, SWIGLU_LIMIT), out

    def beside(self, first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor:
        """See `FusedOps.beside`. Raises ValueError if both are None."""
        given = either(first, second)
        (rows, width), dtype = given.shape, given.dtype
        out = self._op_queue.empty(rows, 2 * width, dtype=dtype)
        for part, half in zip((first, second), out.chunk(2, dim=1), strict=True):
            self._copy(0 if part is None else _address(part, dtype), half, to_stride=2 * width)
        return out

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FusedOps.halves`."""
        (rows, width), dtype = x.shape, x.dtype
        given = _address(x, dtype)
        first, second = (self._op_queue.empty(rows, width // 2, dtype=dtype) for _ in range(2))
        self._copy(given, first, from_stride=width)
        self._copy(given + width // 2 * x.itemsize, second, from_stride=width)
        return first, second

    def _copy(self, x: int, y: torch.Tensor, *, from_stride: int = 0, to_stride: int = 0) -> None:
        """Copy rows at an address, or zeros if it is 0, to those of `y`; strides are in elements, 0: y's width."""
        op = pick_op(len(y), y.shape[1] * y.itemsize)
        op.x, op.y = x, y.data_ptr()
        op.x_stride, op.y_stride = from_stride * y.itemsize, to_stride * y.itemsize
        self._op_queue.submit(op)

    def opened(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """See `FusedOps.opened`."""
        (rows, columns), dtype = x.shape, x.dtype
        given = (FORMATS[dtype], FORMATS[gates.dtype], columns, gates.shape[1] != columns)
        self._op_queue.submit(open_op(rows, *given, _address(x, dtype), _address(gates, gates.dtype)))
        return x

    def row_products(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `FusedOps.row_products`."""
        (rows, width), dtype = x.shape, x.dtype
        out = self._op_queue.empty(rows, 1)
        given = (FORMATS[dtype], width, _address(x, dtype), _address(weight, torch.float32))
        self._op_queue.submit(products_op(rows, *given, out.data_ptr()), weight)
        return out

    def delta_rule(
        self, inputs: DeltaInputs, weights: DeltaWeights, cache: LayerCache, attention: StepAttention
    ) -> torch.Tensor:
        """See `FusedOps.delta_rule`."""
        values = len(weights.decay) * len(weights.norm)
        out = self._op_queue.empty(len(inputs.mixed), values, dtype=inputs.mixed.dtype)
        for rows in attention.once(state_rows):
            rows.before(cache)
            self._submit_delta(rows, inputs, weights, cache, out)
            rows.behind(cache)
        return out

    def mean_squares(self, qkv: torch.Tensor, *, num_heads: int, widths: tuple[int, int]) -> torch.Tensor:
        """See `FusedOps.mean_squares`."""
        (rows, _, head_dim), dtype = qkv.shape, qkv.dtype
        out = self._op_queue.empty(rows, 2)
        given = (FORMATS[dtype], num_heads, kv_heads_of(qkv, num_heads), head_dim, _address(qkv, dtype))
        self._op_queue.submit(squares_op(rows, *given, *widths, out.data_ptr()))
        return out

    def rotate_latent(
        self, query: torch.Tensor, compressed: torch.Tensor, rotation: Rotation, norm: LatentNorm, write: LatentWrite
    ) -> torch.Tensor:
        """See `FusedOps.rotate_latent`."""
        (rows, heads, query_dim), dtype, rank = query.shape, query.dtype, norm.weight.shape[0]
        rope = compressed.shape[1] - rank
        out = self._op_queue.empty(rows, heads, rank + rope, dtype=dtype)
        op = latent_op(rows, FORMATS[dtype])
        op.heads, op.nope, op.rope, op.rank = heads, query_dim - rope, rope, rank
        op.query, op.compressed = _address(query, dtype), _address(compressed, dtype)
        op.cos, op.signed_sin = _address(rotation.cos_table, dtype), _address(rotation.signed_sin_table, dtype)
        op.positions, op.slots = _address(rotation.positions, torch.int64), _address(write.slots, torch.int64)
        op.norm_weight, op.eps = _address(norm.weight, dtype), norm.eps
        op.cache_type = FORMATS[write.keys.dtype]
        op.out, op.keys = out.data_ptr(), _address(write.keys, write.keys.dtype)
        self._op_queue.submit(op, rotation, norm, write)
        return out

    def rotate(
        self, qkv: torch.Tensor, rotation: Rotation, *, num_heads: int, norms: HeadWeights | None
    ) -> RotatedHeads:
        """See `FusedOps.rotate`."""
        self._rotate(qkv, rotation, num_heads=num_heads, norms=norms)
        first_value = num_heads + kv_heads_of(qkv, num_heads)
        return RotatedHeads(qkv[:, :num_heads], qkv[:, num_heads:first_value], qkv[:, first_value:])

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
        self._rotate(qkv, rotation, num_heads=num_heads, norms=norms, cache=cache, slots=slots)
        return qkv[:, :num_heads]

    def capped(self, logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
        """See `FusedOps.capped`."""
        return self._others.capped(logits, soft_cap)

    def route(
        self,
        hidden: torch.Tensor,
        router: RouterWeights,
        slots: torch.Tensor | None = None,  # noqa: ARG002 - steps of host cores are not padded
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FusedOps.route`."""
        (rows, width), shape, weight, norm = hidden.shape, router.experts, router.weight, router.norm
        chosen = self._op_queue.empty(rows, shape.per_token, dtype=torch.int64)
        shares = self._op_queue.empty(rows, shape.per_token)
        op = route_op(rows, FORMATS[hidden.dtype], FORMATS[norm.dtype], FORMATS[weight.dtype], width)
        op.hidden, op.norm_weight, op.eps = _address(hidden, hidden.dtype), _address(norm, norm.dtype), router.eps
        op.weight = _address(weight, weight.dtype)
        if router.bias is not None:
            op.bias = _address(router.bias, torch.float32)
        if router.correction is not None:
            op.correction = _address(router.correction, torch.float32)
        if router.factors is not None:
            op.factors = _address(router.factors, torch.float32)
        op.experts, op.per_token, routing = shape.number, shape.per_token, shape.routing
        op.score, op.is_normalised, op.scale = _SCORES[routing.score], routing.normalised, routing.scale
        op.groups, op.kept_groups, op.by_share = routing.groups, routing.kept_groups, router.by_share
        op.chosen, op.shares = chosen.data_ptr(), shares.data_ptr()
        op.scratch = self._op_queue.scratch(op)
        self._op_queue.submit(op, router)
        return chosen, shares

    def _submit_delta(
        self, rows: StateRows, inputs: DeltaInputs, weights: DeltaWeights, cache: LayerCache, out: torch.Tensor
    ) -> None:
        """Compute rows of a step. Slots and lengths are read where they are, whenever the operation runs."""
        (mixed, gates), dtype, part = inputs, out.dtype, slice(rows.begin, rows.end)
        op = delta_op(len(rows.slots), FORMATS[dtype], rows.num_tokens)
        op.key_heads, op.value_heads = weights.key_heads, len(weights.decay)
        op.key_dim, op.value_dim, op.taps = weights.key_dim, len(weights.norm), len(weights.convolution)
        op.mixed, op.gates, op.y = _address(mixed[part], dtype), _address(gates[part], dtype), out[part].data_ptr()
        op.convolution, op.norm = _address(weights.convolution, torch.float32), _address(weights.norm, torch.float32)
        op.decay, op.decay_bias = _address(weights.decay, torch.float32), _address(weights.decay_bias, torch.float32)
        op.eps = weights.eps
        op.matrices, op.windows = _address(cache.keys, torch.float32), _address(cache.values, torch.float32)
        op.slots, op.lengths = rows.slots.ctypes.data, rows.lengths.ctypes.data
        op.scratch = self._op_queue.scratch(op)
        self._op_queue.submit(op, rows, weights, cache)

    def _norm(self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        (rows, width), dtype = x.shape, x.dtype
        out = self._op_queue.empty(rows, width, dtype=dtype)
        added = 0 if delta is None else _address(delta, dtype)
        given = (width, _address(x, dtype), added, _address(weight, weight.dtype), eps)
        op = norm_op(rows, FORMATS[dtype], FORMATS[weight.dtype], *given, out.data_ptr())
        self._op_queue.submit(op, weight)
        return out

    def _rotate(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        *,
        num_heads: int,
        norms: HeadWeights | None,
        cache: LayerCache | None = None,
        slots: torch.Tensor | None = None,
    ) -> None:
        (rows, _, head_dim), dtype = qkv.shape, qkv.dtype
        op = rotate_op(rows, FORMATS[dtype])
        op.heads, op.kv_heads, op.head_dim = num_heads, kv_heads_of(qkv, num_heads), head_dim
        op.qkv, op.positions = _address(qkv, dtype), _address(rotation.positions, torch.int64)
        op.cos, op.signed_sin = _address(rotation.cos_table, dtype), _address(rotation.signed_sin_table, dtype)
        if norms is not None:
            op.norm_type, op.norm_weights = FORMATS[norms.weight.dtype], _address(norms.weight, norms.weight.dtype)
            op.eps, op.norms_values = norms.eps, norms.with_values
            if norms.mean_squares is not None:
                op.mean_squares = _address(norms.mean_squares, torch.float32)
        if cache is not None and slots is not None:
            cached = cache.keys.dtype
            op.cache_type = FORMATS[cached]
            op.keys, op.values = _address(cache.keys, cached), _address(cache.values, cached)
            op.slots = _address(slots, torch.int64)
        self._op_queue.submit(op, rotation, norms, cache, slots)


def _address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return where the elements lie. Raises ValueError for a tensor that the kernels cannot read as it is."""
    if tensor.dtype != dtype or not tensor.is_contiguous():
        contiguity = "contiguous" if tensor.is_contiguous() else "not contiguous"
        raise ValueError(f"native kernels take contiguous tensors of {dtype}, not one of {tensor.dtype}, {contiguity}")
    return tensor.data_ptr()


def _address_of_rows(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return where the rows lie. Raises ValueError if they are of another type, or their elements lie apart."""
    if tensor.dtype != dtype or tensor.stride(1) != 1:
        raise ValueError(f"native kernels take rows of {dtype} side by side, not {tensor.dtype}, {tensor.stride()}")
    return tensor.data_ptr()

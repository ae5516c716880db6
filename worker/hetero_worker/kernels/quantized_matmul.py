"""Products with quantised weights y = x · Wᵀ + b, which are widened in registers only (`hetero_api.weight_format`).

A program multiplies a tile of W's rows with a tile of x's rows, chunk after chunk: some inputs that share a scale.
Whole numbers and small floats are exact in 16 bits, so products are of the values themselves; a chunk's sum is
multiplied by its scale in float32. Minima are multiplied with the sum of the chunk's inputs. W is the left operand:
tensor cores want more rows there than x may have.

Few rows are bound by memory: their programs also share the inner dimension, and a second kernel adds up the parts in
their order. The number of parts follows from the weight's shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from hetero_api.weight_format import WeightFormat

CHUNK: Final = 64
"""Inputs of a chunk, at most."""
_FEW_ROWS: Final = 16
_ROWS: Final = 64
_COLUMNS: Final = 64
_PROGRAMS: Final = 512
"""Programs that keep a large GPU's memory busy: about four a multiprocessor."""
_LEAST_CHUNKS: Final = 4
"""Chunks of a program, at least, where programs share the inner dimension."""
_ALIGNMENT: Final = 16
_BLOCK: Final = 1024
_LOOKED_UP: Final = 256
"""Columns that a program looks up."""
_PANEL: Final = tl.constexpr(32)
"""Rows of a panel of the layout of host cores (`memory.panels`)."""
_WHOLE: Final = tl.constexpr(0x4B000000)
"""Bits of the float32 2^23, whose last bits count in ones."""
_WHOLE_ZERO: Final = tl.constexpr(8388608.0)


class QuantizedLayout(NamedTuple):
    """Layout of a matrix's values: chunk after chunk, and in each row after row.

    Two 4-bit values are in a byte: the first half of a chunk's inputs in the lower four bits, the others in the upper.
    """

    outputs: int
    inputs: int
    chunk: int
    bits: int

    @classmethod
    def of(cls, shape: tuple[int, int], weights: WeightFormat) -> QuantizedLayout:
        """Return the layout of a matrix (out, in) of a format whose groups are of a multiple of 16 inputs."""
        return cls(*shape, gcd(weights.group, CHUNK), weights.bits)

    @property
    def chunks(self) -> int:
        """Number of chunks of a row; the last one may be short."""
        return -(-self.inputs // self.chunk)

    def stored(self, inputs: int) -> int:
        """Return the bytes of so many inputs of a chunk."""
        return (inputs + 1) // 2 if self.bits == 4 else inputs

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        full, rest = divmod(self.inputs, self.chunk)
        return self.outputs * (full * self.stored(self.chunk) + self.stored(rest))


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [out, in] on the device. Values are unsigned: 8-bit whole numbers are stored 128 higher."""

    format: WeightFormat
    layout: QuantizedLayout
    values: torch.Tensor
    """uint8, see QuantizedLayout."""
    scales: torch.Tensor
    """float16 [groups, out]."""
    minima: torch.Tensor | None
    """float16 [groups, out], if the format has minima."""

    @property
    def middle(self) -> int:
        """Stored value that stands for zero, of whole numbers."""
        return 128 if self.format.bits == 8 else 0 if self.format.has_minimum else 8


@dataclass(frozen=True, slots=True)
class QuantizedTile:
    """A program's share of the product."""

    rows: int
    columns: int
    parts: int
    """Programs that share the inner dimension."""
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, layout: QuantizedLayout, element_bytes: int, *, batch_invariant: bool) -> QuantizedTile:
        """Return a tile that fits in the 99 KiB of shared memory that small GPUs have.

        `batch_invariant`: it must not depend on the rows, so that each is summed in the same order in any batch.
        """
        tile = cls.of_rows(rows, element_bytes, batch_invariant=batch_invariant)
        if tile.rows > _FEW_ROWS:
            return tile
        tiles = -(-layout.outputs // tile.columns)
        return replace(tile, parts=max(1, min(_PROGRAMS // tiles, layout.chunks // _LEAST_CHUNKS)))

    @classmethod
    def of_rows(cls, rows: int, element_bytes: int, *, batch_invariant: bool) -> QuantizedTile:
        """Return the tile of programs that do not share the inner dimension."""
        if batch_invariant or _FEW_ROWS < rows <= _ROWS or element_bytes > 2:
            return cls(_ROWS, _COLUMNS, 1, 4, 3 if element_bytes == 2 else 2)
        if rows > _ROWS:
            return cls(_ROWS, 2 * _COLUMNS, 1, 8, 3)
        return cls(_FEW_ROWS, _COLUMNS, 1, 4, 4)


@triton.jit
def _numbers(stored, bits: tl.constexpr, middle: tl.constexpr, is_float: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return float32 numbers of stored values; those of 4-bit floats are 2^-15 of what the format counts."""
    if is_float:
        wide = stored.to(tl.uint16)
        half = (wide & 0x80) << 8 | (wide & 0x7F) << 7 if bits == 8 else (wide & 8) << 12 | (wide & 7) << 9
        numbers = half.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        numbers = (stored.to(tl.uint32) | _WHOLE).to(tl.float32, bitcast=True) - (_WHOLE_ZERO + middle)
    return numbers


@triton.jit
def _add_product(sums, stored, right, bits: tl.constexpr, middle: tl.constexpr, is_float: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `sums` [columns, rows] and the product of stored values [columns, inputs] with [inputs, rows]."""
    left = _numbers(stored, bits, middle, is_float).to(right.dtype)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def _chunk_sums(  # type: ignore[no-untyped-def]
    place,
    inputs,
    width,
    chunk: tl.constexpr,
    bits: tl.constexpr,
    middle: tl.constexpr,
    is_float: tl.constexpr,
    has_minima: tl.constexpr,
    has_tail: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_rows: tl.constexpr,
    lane: tl.constexpr,
):
    """Return a chunk's sums of products [columns, rows], and the sums of its inputs [rows] if there are minima.

    `place`: of the first value of each column [columns, 1]; `inputs`: of the first input of each row [1, rows].
    `lane`: as for `tile_sums`.
    """
    sums = tl.zeros([tile_columns, tile_rows], tl.float32)
    totals = tl.zeros([tile_rows], tl.float32)
    if bits >= 8:
        offset = tl.arange(0, chunk)
        at = offset
        if lane == 2:  # pairs, the first in the upper half
            at = offset // 2 * (2 * _PANEL) + (1 - offset % 2)
        elif lane:
            at = offset // lane * (lane * _PANEL) + offset % lane
        if has_tail:
            stored = tl.load(place + at[None, :], mask=(offset < width)[None, :], other=0)
            right = tl.load(inputs + offset[:, None], mask=(offset < width)[:, None], other=0.0)
        else:
            stored = tl.load(place + at[None, :])
            right = tl.load(inputs + offset[:, None])
        if bits == 8:
            sums = _add_product(sums, stored, right, bits, middle, is_float)
        else:
            sums = tl.dot(stored.to(right.dtype), right, sums, input_precision="ieee")
        if has_minima:
            totals = tl.sum(right.to(tl.float32), axis=0)
    else:
        offset = tl.arange(0, chunk // 2)
        half = (width + 1) // 2
        at, first, second = offset, offset, half + offset
        if lane:
            at = offset // lane * (lane * _PANEL) + offset % lane
            first = offset // lane * (2 * lane) + offset % lane
            second = first + lane
            half = width  # a byte is there if its first input is
        if has_tail:
            stored = tl.load(place + at[None, :], mask=(first < half)[None, :], other=0)
            low = tl.load(inputs + first[:, None], mask=(first < half)[:, None], other=0.0)
            high = tl.load(inputs + second[:, None], mask=(second < width)[:, None], other=0.0)
        else:
            stored = tl.load(place + at[None, :])
            low = tl.load(inputs + first[:, None])
            high = tl.load(inputs + second[:, None])
        if chunk >= 32:
            sums = _add_product(sums, stored & 15, low, bits, middle, is_float)
            sums = _add_product(sums, stored >> 4, high, bits, middle, is_float)
        else:  # Tensor cores want 16 inputs at a time.
            both = tl.reshape(tl.permute(tl.join(stored & 15, stored >> 4), (0, 2, 1)), [tile_columns, chunk])
            right = tl.reshape(tl.permute(tl.join(low, high), (2, 0, 1)), [chunk, tile_rows])
            sums = _add_product(sums, both, right, bits, middle, is_float)
        if has_minima:
            totals = tl.sum(low.to(tl.float32), axis=0) + tl.sum(high.to(tl.float32), axis=0)
    return sums, totals


@triton.jit
def tile_sums(  # type: ignore[no-untyped-def]
    inputs,
    values,
    scales,
    minima,
    column,
    out_features,
    in_features,
    first,
    end,
    group: tl.constexpr,
    chunk: tl.constexpr,
    bits: tl.constexpr,
    middle: tl.constexpr,
    is_float: tl.constexpr,
    has_minima: tl.constexpr,
    has_tail: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_rows: tl.constexpr,
    lane: tl.constexpr = 0,
    panel_size: tl.constexpr = 0,
):
    """Return float32 sums [columns, rows] over chunks [first, end).

    `inputs`: of the first input of each row [rows]; `column`: int64 [columns], each of which is there. Of more than 8
    `bits`, values are floats, row by row, without scales. With a `lane`, all lies as host cores have it, in panels of
    `panel_size` (`memory.panels`).
    """
    sums = tl.zeros([tile_columns, tile_rows], tl.float32)
    scaled, stride = column, out_features
    if lane:
        groups = (in_features + group - 1) // group if group else 1
        scaled, stride = column // _PANEL * (groups * _PANEL) + column % _PANEL, _PANEL
        column = column // _PANEL * panel_size + column % _PANEL * lane
    for number in range(first, end):
        begin = number * chunk
        width = tl.minimum(in_features - begin, chunk) if has_tail else chunk
        if lane:
            place = values + (begin * (_PANEL // 2 if bits == 4 else _PANEL) + column)
        elif bits == 4:
            place = values + (begin // 2 * out_features.to(tl.int64) + column * ((width + 1) // 2))
        elif bits > 8:
            place = values + (column * in_features + begin)
        else:
            place = values + (begin * out_features.to(tl.int64) + column * width)
        added, totals = _chunk_sums(
            place[:, None],
            (inputs + begin)[None, :],
            width,
            chunk,
            bits,
            middle,
            is_float,
            has_minima,
            has_tail,
            tile_columns,
            tile_rows,
            lane,
        )
        if bits > 8:
            sums += added
        else:
            at = begin // group * stride + scaled if group else scaled
            scale = tl.load(scales + at).to(tl.float32)
            if is_float and bits == 4:
                scale *= 32768.0
            sums += added * scale[:, None]
            if has_minima:
                sums += tl.load(minima + at).to(tl.float32)[:, None] * totals[None, :]
    return sums


@triton.jit(do_not_specialize=["rows", "each", "out_features"])
def _product(  # type: ignore[no-untyped-def]
    x,
    values,
    scales,
    minima,
    bias,
    out,
    rows,
    out_features,
    in_features,
    each,
    group: tl.constexpr,
    chunk: tl.constexpr,
    bits: tl.constexpr,
    middle: tl.constexpr,
    is_float: tl.constexpr,
    has_minima: tl.constexpr,
    has_tail: tl.constexpr,
    has_bias: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_rows: tl.constexpr,
):
    """Compute tile (rows, columns) in programs (0, 1), over part (2) of the inner dimension, of `each` chunks."""
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    part = tl.program_id(2)
    # Surplus rows and columns are read from the last ones, and not stored.
    own = tl.minimum(column, out_features - 1)
    sums = tile_sums(
        x + tl.minimum(row, rows - 1) * in_features,
        values,
        scales,
        minima,
        own,
        out_features,
        in_features,
        part * each,
        tl.minimum((part + 1) * each, tl.cdiv(in_features, chunk)),
        group,
        chunk,
        bits,
        middle,
        is_float,
        has_minima,
        has_tail,
        tile_columns,
        tile_rows,
    )
    if has_bias:
        sums += tl.load(bias + own).to(tl.float32)[:, None]
    place = part.to(tl.int64) * rows * out_features + row[None, :] * out_features + column[:, None]
    inside = (row < rows)[None, :] & (column < out_features)[:, None]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["size", "out_features", "parts"])
def _add_parts(partial, bias, out, size, out_features, parts, has_bias: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up float32 parts [parts, size] in their order."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < size
    sums = tl.zeros([block], tl.float32)
    for part in range(parts):
        sums += tl.load(partial + part * size + place, mask=inside, other=0.0)
    if has_bias:
        sums += tl.load(bias + place % out_features, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "factor", "out_features", "in_features"])
def _look_up(  # type: ignore[no-untyped-def]
    ids,
    values,
    scales,
    minima,
    out,
    first,
    factor,
    out_features,
    in_features,
    group: tl.constexpr,
    chunk: tl.constexpr,
    bits: tl.constexpr,
    middle: tl.constexpr,
    is_float: tl.constexpr,
    has_minima: tl.constexpr,
    block: tl.constexpr,
):
    """Widen a block of columns (program 1) of one row (program 0); zeros for a row that is not there."""
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + number) - first + tl.zeros([block], tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = (column < in_features) & (row >= 0) & (row < out_features)
    begin = column // chunk * chunk
    width = tl.minimum(in_features - begin, chunk)
    place = column - begin
    if bits == 4:
        half = (width + 1) // 2
        is_high = place >= half
        at = begin // 2 * out_features.to(tl.int64) + row * half + tl.where(is_high, place - half, place)
        both = tl.load(values + at, mask=inside, other=0)
        stored = tl.where(is_high, both >> 4, both & 15)
    else:
        at = begin * out_features.to(tl.int64) + row * width + place
        stored = tl.load(values + at, mask=inside, other=0)
    own = column // group * out_features + row if group else row
    scale = tl.load(scales + own, mask=inside, other=0.0).to(tl.float32)
    if is_float and bits == 4:
        scale *= 32768.0
    found = _numbers(stored, bits, middle, is_float) * scale
    if has_minima:
        found += tl.load(minima + own, mask=inside, other=0.0).to(tl.float32)
    rounded = found.to(out.dtype.element_ty).to(tl.float32) * factor
    tl.store(out + number * in_features + column, rounded.to(out.dtype.element_ty), mask=column < in_features)


def quantized_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return x · Wᵀ + bias, new and contiguous [rows, out], of x [rows, in].

    Sums are of float32 and rounded once, to `dtype` (None: x's type, which is also the bias's). An x that is not
    contiguous or not aligned to 16 bytes is copied. `batch_invariant`: a row has the same bits however many there are.
    """
    rows, layout = len(x), weight.layout
    out = torch.empty((rows, layout.outputs), dtype=dtype or x.dtype, device=x.device)
    if not out.numel():
        return out
    if not x.is_contiguous() or x.data_ptr() % _ALIGNMENT:
        x = x.clone(memory_format=torch.contiguous_format)
    tile = QuantizedTile.of(rows, layout, x.element_size(), batch_invariant=batch_invariant)
    is_whole = tile.parts == 1
    target = out if is_whole else torch.empty((tile.parts, *out.shape), dtype=torch.float32, device=x.device)
    _product[(triton.cdiv(rows, tile.rows), triton.cdiv(layout.outputs, tile.columns), tile.parts)](
        x,
        weight.values,
        weight.scales,
        weight.minima,
        bias if is_whole else None,
        target,
        rows,
        layout.outputs,
        layout.inputs,
        triton.cdiv(layout.chunks, tile.parts),
        **constants_of(weight),
        has_tail=layout.inputs % layout.chunk != 0,
        has_bias=is_whole and bias is not None,
        tile_columns=tile.columns,
        tile_rows=tile.rows,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )
    if not is_whole:
        _add_parts[(triton.cdiv(out.numel(), _BLOCK),)](
            target,
            bias,
            out,
            out.numel(),
            layout.outputs,
            tile.parts,
            has_bias=bias is not None,
            block=_BLOCK,
            enable_fp_fusion=True,
        )
    return out


def quantized_rows(
    ids: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype, *, first: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """Return rows `ids - first` of the weight, rounded to `dtype`, times `scale`: [n, in] for int64 [n] ids.

    Rows that do not exist are zeros.
    """
    inputs = weight.layout.inputs
    out = torch.empty((len(ids), inputs), dtype=dtype, device=ids.device)
    if out.numel():
        _look_up[(len(ids), triton.cdiv(inputs, _LOOKED_UP))](
            ids,
            weight.values,
            weight.scales,
            weight.minima,
            out,
            first,
            float(scale),
            weight.layout.outputs,
            inputs,
            **constants_of(weight),
            block=_LOOKED_UP,
            enable_fp_fusion=False,
        )
    return out


def constants_of(weight: QuantizedWeight) -> dict[str, Any]:
    """Return the arguments of a kernel that follow from the weight's shape and format."""
    layout, weights = weight.layout, weight.format
    return {
        "group": weights.group,
        "chunk": layout.chunk,
        "bits": weights.bits,
        "middle": weight.middle,
        "is_float": weights.is_float,
        "has_minima": weights.has_minimum,
    }

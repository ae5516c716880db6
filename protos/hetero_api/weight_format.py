"""Formats that a model's matrices are stored in: the one home of this arithmetic.

A quantised matrix [out, in] has small numbers v, most often whole ones, and a float16 scale for each group of inputs of
a row; a group is some numbers of one row, or the whole row. A weight is

    8 bits                v · scale             v in -128…127
    4 bits                (v - 8) · scale       v in 0…15
    with minima           v · scale + minimum   of either width; a float16 minimum a group
    8-bit floats          v / 256 · scale       v an E4M3 number; published scales are then well within float16
    4-bit floats          2 · v · scale         v an E2M1 number; twice that is a whole number up to 12

A row's last group may be short: its values are padded, with zeros, to a whole group. Where the inputs are dealt to
ranks, no group reaches over the seam (`group_within`). So a reader of a slice has whole groups, and a weight is the
same number on every rank.

Linear layers and vocabulary matrices (embedding and output head) are quantised. Norms, biases and routers stay floats,
and so do matrices of a model that is not quantised: these may be kept as they are stored (16 bits beside float32
arithmetic), which loses nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from hetero_api.errors import ModelError

SCALE_BYTES: Final = 2
"""Bytes of a scale or a minimum: float16."""
COLUMN_UNIT: Final = 64
"""MLP columns are dealt to ranks in such units, the last one excepted."""
INT4_GROUPS: Final = (32, 64, 128)
"""Sizes of groups that int4 may be asked for."""
INT4_GROUP: Final = 32
"""Group size of int4 unless another is asked for."""
WIDTH_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by the name of its type."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a quantised matrix is stored: see the module."""

    bits: int
    """8 or 4."""
    group: int = 0
    """Inputs of a row that share a scale; 0: all."""
    has_minimum: bool = False
    is_float: bool = False

    def __str__(self) -> str:
        groups = f"groups of {self.group}" if self.group else "rows"
        kind = f"{self.bits}-bit floats" if self.is_float else f"{self.bits} bits"
        return f"{kind} in {groups}{' with minima' if self.has_minimum else ''}"

    @property
    def is_wide(self) -> bool:
        """True for 8-bit floats: they are quantised again where that is asked for."""
        return self.is_float and self.bits == 8

    def groups(self, inputs: int) -> int:
        """Return the bytes of a row of so many inputs."""
        return -(-inputs // self.group) if self.group else int(inputs > 0)

    def padded(self, inputs: int) -> int:
        """Values that are stored of a row of so many inputs."""
        return self.groups(inputs) * self.group if self.group else inputs

    def row_bytes(self, inputs: int) -> int:
        """Return the bytes of a row of so many inputs: packed values, scales and minima."""
        numbers = 2 if self.has_minimum else 1
        return -(-self.padded(inputs) * self.bits // 8) + self.groups(inputs) * numbers * SCALE_BYTES

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a matrix [outputs, inputs]."""
        return outputs * self.row_bytes(inputs)

    def within(self, unit: int) -> WeightFormat:
        """With groups that do not reach over a multiple of `unit` inputs; 0: inputs are never dealt."""
        return replace(self, group=group_within(self.group, unit))

    def joins(self, other: WeightFormat) -> bool:
        """Return whether one format holds matrices of both: 8-bit floats are held by themselves only."""
        return self.is_wide == other.is_wide

    def joined(self, other: WeightFormat) -> WeightFormat:
        """Return the narrowest that holds matrices of both formats without a loss. Raises ValueError if none does."""
        if not self.joins(other):
            raise ValueError(f"no format holds both {self} and {other}")
        group = math.gcd(self.group, other.group)  # 0, of one scale a row, gives way to groups
        has_minimum, are_floats = self.has_minimum or other.has_minimum, self.is_float and other.is_float
        bits = max(self.bits, other.bits) if self.is_float == other.is_float else 8
        return WeightFormat(bits, group, has_minimum, are_floats)

    def cut(self, begin: int, end: int, inputs: int) -> WeightFormat:
        """Return the bytes of columns [begin, end) of rows of so many inputs: with groups so small that none is cut
        in two.
        """
        # A row's last group may be short, so that the end of the row cuts none.
        return replace(self, group=math.gcd(self.group, begin, 0 if end == inputs else end)) if self.group else self


def group_within(group: int, unit: int) -> int:
    """Return the largest group that divides both. 0 (a row has one scale, whoever holds it) stays, and so does unit
    0.
    """
    return math.gcd(group, unit) if group and unit else group


FP8: Final = WeightFormat(8, is_float=True)
"""Format of 8-bit floats with a scale for each row."""
INT8: Final = WeightFormat(8, 64)
"""Format of int8. One scale a row loses 1.6 % of SmolLM2's perplexity, this a tenth of that or less."""


def int4(group: int = INT4_GROUP) -> WeightFormat:
    """Return the format of int4."""
    return WeightFormat(4, group, has_minimum=True)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Formats of a model's matrices. A bound where its matrices differ: none takes more."""

    layers: WeightFormat | None = None
    """Format of linear layers; None: floats."""
    vocabulary: WeightFormat | None = None
    """Format of the embedding and the output head."""
    floats: str = ""
    """Type of weights that are floats in the checkpoint, as config.json writes it; "" where it does not say."""
    method: str = ""
    """Method that quantised the checkpoint, for a person, e.g. "awq"; "": none did, formats are made at load."""
    experts: WeightFormat | None = None
    """Format of experts, where it is not that of other linear layers; None: it is."""
    is_wide: bool = False
    """True if all that is quantised in the checkpoint is in 8-bit floats, which may be quantised again."""

    @property
    def of_experts(self) -> StoredWeights:
        """Formats of experts' linear layers."""
        return self if self.experts is None else replace(self, layers=self.experts)

    @property
    def at_load(self) -> StoredWeights:
        """Formats that a rank has to make itself."""
        return FLOAT_WEIGHTS if self.method else self

    @property
    def made_at_load(self) -> StoredWeights:
        """Return the same formats, of a checkpoint that is not quantised."""
        return replace(self, method="", is_wide=False)

    def within(self, unit: int) -> StoredWeights:
        """Return the bytes of a layer whose inputs are dealt to ranks, `unit` of them together; 0: not dealt."""
        return self if self.layers is None else replace(self, layers=self.layers.within(unit))

    def quantized(self, quantization: str, group: int | None = None) -> StoredWeights:
        """With `quantization` ("none", "int8" or "int4") done at load. Raises ModelError where that has no sense."""
        formats = _formats_of(quantization, group)
        if formats is None:
            return self
        if self.method and not self.is_wide:
            raise ModelError(
                f"{quantization} is asked for, and the checkpoint is quantised already ({self.method}); use none, "
                "which serves it as it is stored, or a checkpoint in 16 bits"
            )
        return StoredWeights(formats[0], formats[1], self.floats)


FLOAT_WEIGHTS: Final = StoredWeights()


def _formats_of(quantization: str, group: int | None) -> tuple[WeightFormat, WeightFormat] | None:
    """Return the bytes of layers and of vocabulary, which is never narrower than 8 bits: its loss costs more than
    that saves.
    """
    match quantization:
        case "none" | "":
            return None
        case "int8":
            return INT8, INT8
        case "int4":
            return int4(group or INT4_GROUP), INT8
    raise ModelError(f"quantization {quantization!r} is not known; known: none, int8, int4")

"""Orders in which GGUF files store the rows and columns of matrices that Hugging Face has in another one.

For the Llama family, rows of q and k have the two halves of a head interleaved. Of the gated delta rule, Qwen3-Next's
`in_proj_qkvz` is divided between two tensors: queries, keys and values of all heads, and gates. Qwen3.5's value heads
stand in the order of their numbers within their key heads: the first of each key head, then the second of each.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import torch

from hetero_api.errors import ModelError
from hetero_api.gguf_file import GgufHeader
from hetero_api.gguf_model import GgufDelta, architecture_of, gguf_delta
from hetero_api.gguf_names import GGUF_ARCHITECTURES
from hetero_api.sharding import UnitRange

_HEAD_COUNTS: Final = {"q_proj.": "attention.head_count", "k_proj.": "attention.head_count_kv"}
_DIVIDED: Final = ".in_proj_qkvz."
_BY_VALUE_HEAD: Final = (".in_proj_z.", ".in_proj_a.", ".in_proj_b.", ".A_log", ".dt_bias")
_AFTER_KEYS: Final = (".in_proj_qkv.", ".conv1d.")
_ELEMENTS: Final = (".in_proj_qkv.", ".conv1d.", ".in_proj_z.")
"""Tensors with `value_dim` rows for each value head; others have one."""
_COLUMNS_BY_VALUE_HEAD: Final = ".linear_attn.out_proj."


class StoredRows(NamedTuple):
    """Consecutive rows of a tensor of Hugging Face's that lie in one stored tensor."""

    part: int
    """Which one, of those that the tensor is divided between."""
    rows: torch.Tensor
    """int64: their numbers there."""


class GgufOrder:
    """Order of one model's files."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self._architecture = architecture_of(header)
        self._traits = GGUF_ARCHITECTURES[self._architecture]

    def rows(self, name: str, rows: UnitRange, *, height: int, parts: int) -> list[StoredRows]:
        """Return where rows of a tensor of `height` rows lie, which is divided between so many. Raises ModelError."""
        numbers = torch.arange(*rows)
        if parts > 1:
            return _runs(*self._divided(name, numbers, height))
        if self._traits.interleaved_heads and any(module in name for module in _HEAD_COUNTS):
            numbers = self._interleaved(name, numbers, height)
        elif self._traits.tiled_values and ".linear_attn." in name:
            numbers = self._tiled_rows(name, numbers, height)
        return [StoredRows(0, numbers)]

    def columns(self, name: str, columns: UnitRange, *, width: int) -> list[UnitRange]:
        """Return where columns of a matrix of `width` columns lie, in their order. Raises ModelError."""
        unit = self.column_unit(name)
        if not unit:
            return [columns]
        heads = gguf_delta(self._header)
        if heads.value_heads * unit != width:
            raise self._error(name, width, "columns")
        own = torch.arange(columns.begin // unit, -(-columns.end // unit))
        found = []
        for head, place in zip(own.tolist(), _tiles(own, heads).tolist(), strict=True):
            begin, end = max(columns.begin, head * unit), min(columns.end, (head + 1) * unit)
            found.append(UnitRange(begin + (place - head) * unit, end + (place - head) * unit))
        return found

    def column_unit(self, name: str) -> int:
        """Return how many columns of a matrix stay together; 0: all do."""
        is_tiled = self._traits.tiled_values and _COLUMNS_BY_VALUE_HEAD in name
        heads = gguf_delta(self._header) if is_tiled else None
        return heads.value_dim if heads is not None and heads.group > 1 and heads.key_heads > 1 else 0

    def _interleaved(self, name: str, numbers: torch.Tensor, height: int) -> torch.Tensor:
        field = next(count for module, count in _HEAD_COUNTS.items() if module in name)
        heads = self._header.metadata.get(f"{self._architecture}.{field}")
        if not isinstance(heads, int) or heads < 1 or height % (2 * heads):
            problem = f"must be a number of heads of {height} rows together, not {heads!r}"
            raise ModelError(f"{self._header.path}: {self._architecture}.{field} {problem}")
        dim = height // heads
        within = torch.arange(dim).view(-1, 2).T.flatten()
        return numbers // dim * dim + within[numbers % dim]

    def _tiled_rows(self, name: str, numbers: torch.Tensor, height: int) -> torch.Tensor:
        heads = gguf_delta(self._header)
        if not any(part in name for part in (*_AFTER_KEYS, *_BY_VALUE_HEAD)):
            return numbers
        first = 2 * heads.key_heads * heads.key_dim if any(part in name for part in _AFTER_KEYS) else 0
        unit = heads.value_dim if any(part in name for part in _ELEMENTS) else 1
        if first + heads.value_heads * unit != height:
            raise self._error(name, height, "rows")
        at = numbers - first
        stored = first + _tiles(at // unit, heads) * unit + at % unit
        return torch.where(at < 0, numbers, stored)

    def _divided(self, name: str, numbers: torch.Tensor, height: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the part and the row of each row of projections that Hugging Face has by key heads."""
        heads = gguf_delta(self._header)
        key, value = heads.key_dim, heads.group * heads.value_dim
        unit = 2 * (key + value)
        if _DIVIDED not in name or heads.key_heads * unit != height:
            raise self._error(name, height, "rows")
        head, at = numbers // unit, numbers % unit
        stored, begin = torch.empty_like(numbers), 0
        for first, width in ((0, key), (heads.key_heads * key, key), (2 * heads.key_heads * key, value), (0, value)):
            stored = torch.where(at >= begin, first + head * width + at - begin, stored)
            begin += width
        return (at >= unit - value).long(), stored

    def _error(self, name: str, number: int, kind: str) -> ModelError:
        return ModelError(
            f"{self._header.path}: {self._architecture}.ssm.*: do not fit the {number} {kind} of {name}; "
            "is config.json beside it of the same model?"
        )


def _tiles(numbers: torch.Tensor, heads: GgufDelta) -> torch.Tensor:
    """Return the places of value heads."""
    return numbers % heads.group * heads.key_heads + numbers // heads.group


def _runs(parts: torch.Tensor, rows: torch.Tensor) -> list[StoredRows]:
    """Return rows with the same part together."""
    changes = (torch.nonzero(parts.diff()).flatten() + 1).tolist()
    return [
        StoredRows(int(parts[begin]), rows[begin:end])
        for begin, end in pairwise([0, *changes, len(rows)])
        if end > begin
    ]

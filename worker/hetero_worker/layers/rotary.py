"""Rotary position embedding, in Hugging Face's half-split layout.

x · cos + rotate_half(x) · sin, with rotate_half(x) = (-x₂, x₁). The sine table contains the sign, so rotate_half
becomes a swap of the halves. Where only a part of a head is rotated, or none of it, the other angles are 0; weights of
models with other pairs are loaded in an order that makes them these (`RowOrder`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from hetero_api.model_config import RopeConfig
from hetero_worker.memory.streams import HOST


class Rotation:
    """Angles of one step's tokens: rows of tables, gathered once, by the first caller that needs them.

    A kernel that reads the tables in place takes them and the positions instead.
    """

    __slots__ = ("_gathered", "_positions", "cos_table", "signed_sin_table")

    def __init__(self, cos: torch.Tensor, signed_sin: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        """Take tables [positions, 1, head_dim] and each token's row, int64 [tokens]; None: row i is token i's."""
        self.cos_table = cos
        self.signed_sin_table = signed_sin
        self._positions = positions
        self._gathered = (cos, signed_sin) if positions is None else None

    @property
    def positions(self) -> torch.Tensor:
        """The tokens' rows of the tables, int64 [tokens]."""
        if self._positions is None:
            self._positions = torch.arange(len(self.cos_table), device=self.cos_table.device)
        return self._positions

    @property
    def cos(self) -> torch.Tensor:
        """The tokens' cosines, [tokens, 1, head_dim]."""
        return self._gather()[0]

    @property
    def signed_sin(self) -> torch.Tensor:
        """The tokens' sines, negative in the first half: [tokens, 1, head_dim]."""
        return self._gather()[1]

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the rotation of [tokens, heads, head_dim], new and contiguous."""
        tokens, num_heads, head_dim = heads.shape
        swapped = heads.view(tokens, num_heads, 2, head_dim // 2).flip(2).view(tokens, num_heads, head_dim)
        return torch.mul(heads, self.cos).addcmul_(swapped, self.signed_sin)

    def _gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._gathered is None:
            cos, signed_sin = (
                table.index_select(0, self.positions) for table in (self.cos_table, self.signed_sin_table)
            )
            self._gathered = cos, signed_sin
        return self._gathered


class RotaryTables:
    """Cosines and sines of every position up to the longest sequence; layers may have different tables."""

    def __init__(
        self,
        ropes: Sequence[RopeConfig],
        *,
        head_dims: Sequence[int],
        max_length: int,
        dtype: torch.dtype,
        device: torch.device = HOST,
    ) -> None:
        """`head_dims`: rotated elements of each layer's heads, in the order of `ropes`."""
        layers = list(zip(ropes, head_dims, strict=True))
        distinct = list(dict.fromkeys(layers))
        self._of_layer = [distinct.index(layer) for layer in layers]
        self._tables = [_RotaryTable(rope, dim, max_length, dtype, device) for rope, dim in distinct]

    @property
    def num_bytes(self) -> int:
        """Size of all tables."""
        return sum(table.num_bytes for table in self._tables)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tables."""
        return tuple(tensor for table in self._tables for tensor in table.tensors)

    def at(self, positions: torch.Tensor) -> list[Rotation]:
        """Return one rotation per layer for int64 [tokens] positions on the tables' device. Equal layers share one."""
        rotations = [table.at(positions) for table in self._tables]
        return [rotations[table] for table in self._of_layer]


class _RotaryTable:
    """Tables of one kind of rotation."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        frequencies = torch.tensor(rope.inverse_frequencies(head_dim), dtype=torch.float32)
        # Computed on the host for every device, so that all ranks rotate by the same bits.
        angles = torch.outer(torch.arange(max_length, dtype=torch.float32), frequencies)
        still = head_dim // 2 - len(frequencies)
        cos = F.pad(angles.cos() * rope.amplitude, (0, still), value=1.0)
        sin = F.pad(angles.sin() * rope.amplitude, (0, still))
        self._cos = torch.cat([cos, cos], dim=-1).to(dtype).unsqueeze(1).to(device)
        self._signed_sin = torch.cat([-sin, sin], dim=-1).to(dtype).unsqueeze(1).to(device)

    @property
    def num_bytes(self) -> int:
        return self._cos.nbytes + self._signed_sin.nbytes

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self._cos, self._signed_sin

    def at(self, positions: torch.Tensor) -> Rotation:
        """Return the angles of int64 [tokens] positions."""
        return Rotation(self._cos, self._signed_sin, positions)

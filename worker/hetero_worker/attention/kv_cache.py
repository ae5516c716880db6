"""A paged KV cache of one layer on one rank.

Token-major: position `slot = block id · block size + offset` holds the keys (values) of all this rank's heads of
one token, so that a step's tokens are written with one indexed copy and a block is one contiguous piece.
On the host, memory is touched when it is written, by the bound rank itself: the first touch places it on the rank's
node. To be given a page takes longer than to compute what is written to it: so a beginning is touched ahead.
Block 0 is the null block: padded reads end there, so it holds zeros and never a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetero_worker.platforms.base import HOST
from hetero_worker.platforms.huge_pages import empty_on_huge_pages


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values: [num_blocks · block_size, kv_heads, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor
    block_size: int

    @classmethod
    def allocate(
        cls,
        *,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device = HOST,
    ) -> LayerCache:
        shape = (num_blocks * block_size, num_kv_heads, head_dim)
        return cls(_zeros(shape, dtype, device), _zeros(shape, dtype, device), block_size)

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def touch(self, num_bytes: int) -> None:
        """Have memory given for the first blocks, so many bytes of keys and of values each. Of an empty cache."""
        for rows in (self.keys, self.values):
            rows.view(-1)[: num_bytes // rows.itemsize].zero_()

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put [tokens, kv_heads, head_dim] at int64 [tokens] slots."""
        self.keys.index_copy_(0, slots, key)
        self.values.index_copy_(0, slots, value)

    def read_blocks(self, block_ids: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the first `length` tokens' keys and values in the blocks (integer ids [blocks])."""
        return _read(self.keys, block_ids, self.block_size)[:length], _read(self.values, block_ids, self.block_size)[
            :length
        ]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == HOST.type:
        return empty_on_huge_pages(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def _read(rows: torch.Tensor, block_ids: torch.Tensor, block_size: int) -> torch.Tensor:
    blocks = rows.view(-1, block_size, *rows.shape[1:])
    return blocks.index_select(0, block_ids).flatten(0, 1)

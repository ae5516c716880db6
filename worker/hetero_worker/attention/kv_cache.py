"""Paged KV cache of one layer on one rank.

The cache is token-major: slot `block id · block size + offset` holds the keys (values) of all this rank's heads of one
token. A step's tokens are then written with one indexed copy, and a block is one contiguous piece.
On the host, memory is first touched by the bound rank that writes it, which places it on the rank's NUMA node.
Block 0 is the null block: padded reads end there, so it holds zeros and never a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hetero_worker.memory.huge_pages import empty_on_huge_pages

Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Returns zeros of a shape and type."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values: [num_blocks · block_size, kv_heads, head_dim] each; they may be one tensor.

    A layer of the gated delta rule has states of sequences in their place, a row for each slot of the batch
    (`models.delta_attention`).
    """

    keys: torch.Tensor
    values: torch.Tensor
    block_size: int
    has_states: bool = False

    @classmethod
    def allocate(
        cls,
        *,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        zeros: Zeros = empty_on_huge_pages,
        keys_only: bool = False,
    ) -> LayerCache:
        """Return an empty cache of zeros; with `keys_only`, keys are the values, too.

        `zeros`: allocates on the rank's device, like `MemoryPool.zeros`.
        """
        shape = (num_blocks * block_size, num_kv_heads, head_dim)
        keys = zeros(shape, dtype)
        return cls(keys, keys if keys_only else zeros(shape, dtype), block_size)

    @property
    def num_kv_heads(self) -> int:
        """KV heads on this rank."""
        return self.keys.shape[1]

    @property
    def num_bytes(self) -> int:
        """Size of keys and values."""
        return self.keys.nbytes + (0 if self.values is self.keys else self.values.nbytes)

    def copy_states(self, source: int, target: int) -> None:
        """Copy the states of one row to another one; for a layer that has states."""
        for states in (self.keys, self.values):
            states[target].copy_(states[source])

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put [tokens, kv_heads, head_dim] at int64 [tokens] slots, in the cache's type."""
        self.keys.index_copy_(0, slots, as_cached(key, self.keys.dtype))
        self.values.index_copy_(0, slots, as_cached(value, self.values.dtype))


def as_cached(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers in the cache's type. float16 becomes its largest number, not infinite: tokens that a row does not
    see are multiplied by 0.
    """
    most = torch.finfo(torch.float16).max
    return x.to(dtype).clamp(-most, most) if dtype == torch.float16 else x.to(dtype)

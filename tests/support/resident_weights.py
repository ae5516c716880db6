"""Memory that weights of a rank take, beside what the arithmetic says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import pytest
import torch

from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.layers import native_linear
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.shard import load_shard, memory_of

_WIDTHS: Final = frozenset({16, 8, 4})


class Resident(NamedTuple):
    """Bytes of one rank."""

    resident: int
    counted: int
    """By ModelMemory."""


def resident_weights(request: LoadRequest) -> Resident:
    """Load a rank's weights with the native kernels once more, and add up what is allocated for them."""
    packed: list[int] = []
    allocate = native_linear._on_huge_pages

    def counting(num_bytes: int) -> torch.Tensor:
        memory = allocate(num_bytes)
        packed.append(memory.nbytes)
        return memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_linear, "_on_huge_pages", counting)
        decoder = load_shard(request, cpu_backend()).decoder
    others = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in decoder.tensors}
    memory = replace(memory_of(request), weight_bits=_WIDTHS)
    counted = memory.weight_bytes(request.shard_plan.ranks[request.rank], packs_head=True)
    return Resident(sum(packed) + sum(others.values()), counted)

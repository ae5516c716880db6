"""To how many rows a step that only decodes is padded: the same on all GPU ranks of a group.

Everything here follows from the plan and the limits, which all ranks know, for GPU ranks sum padded rows among
themselves. Ranks on host cores are not padded: what crosses the host are the step's own rows (`breaking_exchange`).
Therefore a padded step must be cut no finer than the step itself, into micro-batches or into slices that are lent.

Sizes lie close enough together that padding costs little: powers of two where a row more is much, then every eighth
(`hetero_api.graph_memory`, which says what their graphs take).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from hetero_api.graph_memory import MAX_MIXED_ROWS, MAX_ROWS, graph_sizes
from hetero_api.sharding import RankShard
from hetero_worker.models.lending import row_slices
from hetero_worker.models.micro_batches import best_number
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.shard import DTYPES

HOST_CHOOSES: Final = "the host of a GPU chooses which rows an expert computes"
LINK_BYTES: Final = 2 * 1024**2
"""No exchange's links hold less; see Exchange.link_bytes."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Sizes that steps are padded to, ascending; or why there are none."""

    sizes: tuple[int, ...]
    reason: str = ""

    @classmethod
    def of(cls, request: LoadRequest, *, joins_experts: bool) -> Padding:
        """Return the padding of a GPU rank. `joins_experts`: kernels of all GPU ranks compute experts together."""
        if request.enforce_eager:
            return cls((), "enforceEager")
        if request.config.delta is not None:
            return cls((), "states of the gated delta rule are not padded")
        gpus = request.shard_plan.ranks[: request.num_gpu_ranks]
        if not joins_experts and any(map(_has_experts, gpus)):
            return cls((), HOST_CHOOSES)
        limit = min(request.max_num_seqs, request.max_num_batched_tokens)
        most = MAX_MIXED_ROWS if request.num_host_ranks else MAX_ROWS
        sizes = tuple(size for size in graph_sizes(limit, most=most) if _is_uncut(size, request))
        return cls(sizes, "" if sizes else "single rows are cut already")

    def padded(self, rows: int) -> int:
        """Return the next size; `rows` itself where there is none."""
        place = bisect_left(self.sizes, rows)
        return self.sizes[place] if place < len(self.sizes) else rows

    def __str__(self) -> str:
        return f"{len(self.sizes)} sizes up to {self.sizes[-1]}" if self.sizes else f"off ({self.reason})"


def has_experts(request: LoadRequest) -> bool:
    """Return whether the rank has experts."""
    return _has_experts(request.shard_plan.ranks[request.rank])


def _has_experts(rank: RankShard) -> bool:
    return any(layer.experts.size for layer in rank.layers)


def _is_uncut(size: int, request: LoadRequest) -> bool:
    stages = request.shard_plan.stages()
    if best_number(size, len(stages)) > 1:
        return False
    row_bytes = request.config.hidden_size * DTYPES[request.dtype].itemsize
    slices = row_slices(size, row_bytes=row_bytes, link_bytes=LINK_BYTES)
    return len(slices.bounds) == 1 or not any(stage.helpers for stage in stages)

"""A rank's body that does nothing but decode, and tells what that takes from the system."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from hetero_worker.host.process_memory import keep_freed_memory
from hetero_worker.memory.memory_pool import MemorySnapshot
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.rank_processes import RankContext

SEQUENCES = 8
_PROMPT = 100
_WARM_UP = 80


@dataclass(frozen=True, slots=True)
class Taken:
    """By so many steps, after a warm-up."""

    page_faults: int
    resident_bytes: int
    kv_bytes: int
    """Of the tokens of these steps, whose memory is given as they are written."""


def decode_steadily(ranks: RankContext, directory: Path, shares: Shares, steps: int) -> Taken:
    """As a rank process does: malloc keeps what is freed."""
    keep_freed_memory()
    group = RankGroup(
        directory, shares, num_blocks=SEQUENCES * 32 + 1, block_size=32, max_num_batched_tokens=SEQUENCES * _PROMPT
    )
    builder = PlanBuilder(group)
    for slot in range(SEQUENCES):
        builder.start(slot, list(range(slot, slot + _PROMPT)))
    _decode(builder, _WARM_UP)
    before, faults = MemorySnapshot.take().resident_bytes, _faults()
    _decode(builder, steps)
    return Taken(
        page_faults=_faults() - faults,
        resident_bytes=MemorySnapshot.take().resident_bytes - before,
        kv_bytes=steps * SEQUENCES * sum(report.kv_bytes_per_token for report in group.reports),
    )


def _decode(builder: PlanBuilder, steps: int) -> None:
    for _ in range(steps):
        for slot in range(SEQUENCES):
            builder.schedule(slot)
        builder.run()


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

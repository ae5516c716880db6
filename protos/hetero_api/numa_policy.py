"""The words of spec.pools[].cpu.numa.policy: no pydantic: a rank, which reads no manifest, starts without."""

from __future__ import annotations

from enum import StrEnum


class NumaPolicy(StrEnum):
    """Strictness with which a rank is bound to a NUMA node."""

    REQUIRED = "Required"
    BEST_EFFORT = "BestEffort"
    NONE = "None"

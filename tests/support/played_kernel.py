"""A kernel that obeys, except for what the test says it does not."""

from __future__ import annotations

import errno
from collections.abc import Iterable

from hetero_worker.host.numa import MemoryPolicy


class PlayedKernel:
    """`pages` is where fresh memory lies, `memory` where all of it does; each None where it does not tell."""

    def __init__(
        self,
        allowed: Iterable[int],
        *,
        pages: dict[int, int] | None = None,
        memory: dict[int, int] | None = None,
        memory_nodes: Iterable[int] | None = None,
        forbids_policy: bool = False,
        ignores_affinity: bool = False,
        ignores_policy: bool = False,
        has_numa: bool = True,
    ) -> None:
        self.mask = frozenset(allowed)
        self.pages = pages
        self.memory = memory
        self.mems = None if memory_nodes is None else frozenset(memory_nodes)
        self.forbids_policy = forbids_policy
        self.ignores_affinity = ignores_affinity
        self.ignores_policy = ignores_policy
        self.has_numa = has_numa
        self.policy = MemoryPolicy(0, ())

    def affinity(self) -> frozenset[int]:
        return self.mask

    def set_affinity(self, cpus: Iterable[int]) -> None:
        if not self.ignores_affinity:
            self.mask = frozenset(cpus)

    def knows_numa(self) -> bool:
        return self.has_numa

    def memory_nodes(self) -> frozenset[int] | None:
        return self.mems

    def memory_policy(self) -> MemoryPolicy | None:
        return None if self.forbids_policy else self.policy

    def set_memory_policy(self, mode: int, nodes: Iterable[int]) -> None:
        if self.forbids_policy:
            raise OSError(errno.EPERM, "Operation not permitted")
        if not self.ignores_policy:
            self.policy = MemoryPolicy(mode, tuple(nodes))

    def probe_pages(self) -> dict[int, int] | None:
        return self.pages

    def memory_by_node(self) -> dict[int, int] | None:
        return self.memory

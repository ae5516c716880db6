"""A rank's binding over its life: made once, before torch, and looked at again when it may have changed.

What may happen after a rank was bound:
- Its cpuset changes: the kubelet's CPU manager gives a container's cores to another one, or an administrator does. The
  kernel then moves threads off what they lost, or (before Linux 6.2) back to all that the cpuset has. So affinity,
  memory policy and memory's nodes are read again when an epoch begins, which takes microseconds.
- Memory did not go where it should: the node was full, or the policy was forbidden and a page was touched first from
  elsewhere. So once the weights are there it is counted where all memory lies that came since the rank was bound. What
  was there before, e.g. in a process forked from one that ran anywhere, is no fault of the binding.

Either way the report says so, and policy Required fails closed with a PinningError. Nothing is bound again:
threads that compute would have to be kept apart from those that do not, and a container that restarts picks among its
cores.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

from hetero_api.contract import LEAST_LOCAL_MEMORY_PERCENT
from hetero_api.cpu_list import format_cpu_list
from hetero_api.host.topology import CpuTopology
from hetero_worker.errors import PinningError
from hetero_worker.host.numa import Kernel, MemoryPolicy, local_percent, threads_started_on
from hetero_worker.host.pinning import PinningReport, PinningRequest, pin, require, told_nodes

_log = logging.getLogger(__name__)


class Binding(Protocol):
    """Binding of a rank, for its state machine. All calls are for the thread that was bound."""

    def recheck(self) -> PinningReport | None:
        """Look again, cheaply; None when nothing was ever to be bound."""
        ...

    def require(self) -> None:
        """Require the binding. Raises PinningError when the policy is Required and the last look found something
        missing.
        """
        ...

    def check_memory(self) -> int | None:
        """Share of the memory since the binding that lies on the rank's node, in percent; None: unknown.

        Raises PinningError when the policy is Required and it is too little. About a second for 128 GiB.
        """
        ...

    def communicating(self) -> AbstractContextManager[None]:
        """Threads that start within are kept off the cores that compute, if there are others for them."""
        ...


class Unbound:
    """Binding of a process that nobody bound."""

    def recheck(self) -> PinningReport | None:
        """Return None."""
        return None

    def require(self) -> None:
        """Accept: nothing is required of an unbound process."""

    def check_memory(self) -> int | None:
        """Return None."""
        return None

    def communicating(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()


class CoreBinding:
    """See the module. `report` is what the last look found; `memory_before` bytes by node when it was made."""

    def __init__(
        self,
        request: PinningRequest,
        report: PinningReport,
        *,
        topology: CpuTopology,
        kernel: Kernel,
        memory_before: Mapping[int, int],
    ) -> None:
        self.report = report
        self._request = request
        self._made = report
        self._policy = kernel.memory_policy()
        self._topology = topology
        self._kernel = kernel
        self._memory_before = memory_before

    @classmethod
    def make(cls, request: PinningRequest, *, topology: CpuTopology, kernel: Kernel) -> CoreBinding:
        """Bind the calling thread, as `pin` does. Raises PinningError."""
        before = kernel.memory_by_node() or {}
        report = pin(request, topology=topology, kernel=kernel)
        return cls(request, report, topology=topology, kernel=kernel, memory_before=before)

    def recheck(self) -> PinningReport:
        """See `Binding.recheck`."""
        if self._made.cpus:
            problems = [*self._changes_of_cores(), *self._changes_of_memory()]
            self.report = self._as_seen(problems) if problems else self._made
            if problems:
                _log.warning("%s", "; ".join(problems))
        return self.report

    def require(self) -> None:
        """See `Binding.require`."""
        require(self._request, self.report)

    def check_memory(self) -> int | None:
        """See `Binding.check_memory`."""
        by_node = self._kernel.memory_by_node()
        nodes = self._made.numa_nodes
        percent = None if by_node is None else local_percent(nodes, by_node, before=self._memory_before)
        if self._request.required and percent is not None and percent < LEAST_LOCAL_MEMORY_PERCENT:
            raise PinningError(self._too_little(percent))
        return percent

    def communicating(self) -> AbstractContextManager[None]:
        """See `Binding.communicating`."""
        given = frozenset(self._made.communication) & frozenset(self._request.communication)
        return threads_started_on(given if self._made.cpus else (), self._kernel)

    def _changes_of_cores(self) -> list[str]:
        now, made = self._kernel.affinity(), self._made.cpus
        if now == frozenset(made):
            return []
        return [
            f"the cpuset changed after the rank was bound: it runs on CPUs {format_cpu_list(now)}, "
            f"not {format_cpu_list(made)}; restart the pod"
        ]

    def _changes_of_memory(self) -> list[str]:
        policy, allowed, nodes = self._kernel.memory_policy(), self._kernel.memory_nodes(), self._made.numa_nodes
        if allowed is not None and self._topology.tells_nodes and not allowed >= frozenset(nodes):
            return [
                f"the cpuset changed: it allows memory of NUMA nodes {format_cpu_list(allowed)} only; restart the pod"
            ]
        if policy != self._policy:
            return [f"the memory policy changed from {_describe(self._policy)} to {_describe(policy)}"]
        return []

    def _as_seen(self, problems: list[str]) -> PinningReport:
        now = self._kernel.affinity()
        cpus = tuple(sorted(now)) if now <= frozenset(self._made.cpus) else ()
        online = [cpu for cpu in cpus if cpu in self._topology.cpus]
        reason = "; ".join(filter(None, [self._made.reason, *problems]))
        return replace(
            self._made, pinned=False, cpus=cpus, numa_nodes=told_nodes(self._topology, online), reason=reason
        )

    def _too_little(self, percent: int) -> str:
        nodes = format_cpu_list(self._made.numa_nodes)
        others = format_cpu_list(self._topology.memory_only_nodes)
        hint = f" NUMA nodes {others} have memory and no cores: Required does not use them." if others else ""
        return (
            f"numa policy is Required, but only {percent} % of the rank's memory lies on its cores' NUMA node {nodes} "
            f"(memory: {self._made.memory}), less than {LEAST_LOCAL_MEMORY_PERCENT} %: the node is full, or its memory "
            f"is not kept for this pod.{hint} Lower {self._request.path}.memoryPerRank or ranks so that they fit the "
            "node, run the kubelet's Memory Manager with policy Static, or set numa.policy to BestEffort"
        )


def _describe(policy: MemoryPolicy | None) -> str:
    return "an unknown one" if policy is None else f"{policy.mode} of nodes {format_cpu_list(policy.nodes)!r}"

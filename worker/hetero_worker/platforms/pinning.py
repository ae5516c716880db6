"""Binds a rank's process to cores and memory of one NUMA node, and proves it.

Runs before torch is imported: OpenMP and the allocator take what they find then. Cores are used one thread a
physical core, within what affinity and cpuset allow. Memory: set_mempolicy where it is permitted, else the
kernel's own rule that memory lies where it is touched first. Either way the result is read back from the kernel,
and only what was seen is reported.

Policy Required: anything short of what was asked raises PinningError. BestEffort: it goes on with what it got
and says what is missing. None: nothing is bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero_api.cpu_list import format_cpu_list
from hetero_api.spec import NumaPolicy
from hetero_worker.errors import PinningError
from hetero_worker.platforms.numa import MPOL_BIND, MPOL_PREFERRED, Kernel
from hetero_worker.platforms.topology import CpuTopology


@dataclass(frozen=True, slots=True)
class PinningRequest:
    """What the rank was told: CPU numbers (empty: not bound), compute threads, how strictly."""

    cores: tuple[int, ...]
    num_threads: int
    policy: NumaPolicy


@dataclass(frozen=True, slots=True)
class PinningReport:
    """What the kernel confirmed."""

    pinned: bool
    """Whether cores and memory are exactly as asked."""
    cpus: tuple[int, ...]
    """CPUs that the process is bound to, ascending; empty when it is not bound."""
    numa_nodes: tuple[int, ...]
    """Nodes of these CPUs, ascending."""
    num_threads: int
    """Compute threads to use: as asked, or one a core where there are fewer."""
    memory: str
    """How memory is placed: "bound", "preferred", "first touch" (and why) or "default"."""
    reason: str
    """What is missing, for a person; empty when pinned."""


def pin(request: PinningRequest, *, topology: CpuTopology, kernel: Kernel) -> PinningReport:
    """Bind the calling thread, and so all threads it starts from now on. Raises PinningError; see the module."""
    required = request.policy == NumaPolicy.REQUIRED
    if request.policy == NumaPolicy.NONE:
        return _unbound(request, "numa policy is None")
    cpus, problems = _choose(request, topology, kernel)
    if not cpus or (required and problems):
        report = _unbound(request, "; ".join(problems))
    else:
        report = _bind(request, cpus, problems, topology=topology, kernel=kernel)
    if required and not report.pinned:
        raise PinningError(f"numa policy is Required, but {report.reason}")
    return report


def _unbound(request: PinningRequest, reason: str) -> PinningReport:
    return PinningReport(
        pinned=False, cpus=(), numa_nodes=(), num_threads=request.num_threads, memory="default", reason=reason
    )


def _choose(request: PinningRequest, topology: CpuTopology, kernel: Kernel) -> tuple[tuple[int, ...], list[str]]:
    """CPUs to bind to, and what is wrong with what was asked."""
    if not request.cores:
        return (), ["no cores were given (--cores)"]
    wanted = frozenset(request.cores)
    problems = []
    if offline := wanted - topology.cpus.keys():
        problems.append(f"CPUs {format_cpu_list(offline)} are not online")
    allowed = kernel.affinity()
    if forbidden := wanted - offline - allowed:
        problems.append(
            f"CPUs {format_cpu_list(forbidden)} are outside this process's cpuset or affinity "
            f"({format_cpu_list(allowed)})"
        )
    usable = wanted - offline - forbidden
    cpus = topology.one_per_core(usable)
    if len(cpus) < request.num_threads:
        problems.append(
            f"{request.num_threads} threads need as many physical cores, and CPUs "
            f"{format_cpu_list(usable) or '(none)'} are on {len(cpus)}"
        )
    nodes = topology.nodes_of(cpus)
    if len(nodes) > 1:
        problems.append(f"CPUs {format_cpu_list(cpus)} are on NUMA nodes {format_cpu_list(nodes)}, not on one")
    return cpus, problems


def _bind(
    request: PinningRequest,
    cpus: tuple[int, ...],
    problems: list[str],
    *,
    topology: CpuTopology,
    kernel: Kernel,
) -> PinningReport:
    problems = [*problems, *_bind_cores(cpus, kernel)]
    nodes = topology.nodes_of(cpus)
    memory = _place_memory(request.policy, nodes, kernel)
    problems += _check_memory(nodes, topology, kernel)
    bound = tuple(sorted(kernel.affinity())) if kernel.affinity() <= frozenset(cpus) else ()
    return PinningReport(
        pinned=not problems,
        cpus=bound,
        numa_nodes=topology.nodes_of(bound),
        num_threads=min(request.num_threads, len(cpus)),
        memory=memory,
        reason="; ".join(problems),
    )


def _bind_cores(cpus: tuple[int, ...], kernel: Kernel) -> list[str]:
    try:
        kernel.set_affinity(cpus)
    except OSError as error:
        return [f"CPUs {format_cpu_list(cpus)} cannot be bound to: {error.strerror}"]
    if kernel.affinity() != frozenset(cpus):
        return [f"the kernel bound to CPUs {format_cpu_list(kernel.affinity())}, not {format_cpu_list(cpus)}"]
    return []


def _place_memory(policy: NumaPolicy, nodes: tuple[int, ...], kernel: Kernel) -> str:
    if len(nodes) != 1:
        return "first touch"
    required = policy == NumaPolicy.REQUIRED
    try:
        kernel.set_memory_policy(MPOL_BIND if required else MPOL_PREFERRED, nodes)
    except OSError as error:
        return f"first touch (set_mempolicy: {error.strerror or error})"
    return "bound" if required else "preferred"


def _check_memory(nodes: tuple[int, ...], topology: CpuTopology, kernel: Kernel) -> list[str]:
    if len(topology.nodes) == 1:
        return []  # there is no other memory
    pages = kernel.probe_pages()
    if not pages:
        return ["the kernel does not tell where memory lies (/proc/self/numa_maps), so nothing is proven"]
    if strays := {node: count for node, count in pages.items() if node not in nodes}:
        return [f"fresh memory lies on NUMA nodes {format_cpu_list(strays)}, not {format_cpu_list(nodes)}"]
    return []

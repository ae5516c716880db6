"""Binds a rank's process to cores and memory of one NUMA node, and proves it.

Runs before torch is imported: OpenMP and the allocator take what they find then. Cores are used one thread a
physical core, within what affinity and cpuset allow. Memory: set_mempolicy where it is permitted, else the
kernel's own rule that memory lies where it is touched first. Either way the result is read back from the kernel,
and only what was seen is reported. `binding` looks again later.

Policy Required: anything short of what was asked raises PinningError. BestEffort: it goes on with what it got
and says what is missing. None: nothing is bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetero_api.cpu_list import format_cpu_list
from hetero_api.host.topology import UNKNOWN_NODE, CpuTopology, NumaPolicy
from hetero_worker.errors import PinningError
from hetero_worker.host.numa import MPOL_BIND, MPOL_PREFERRED, Kernel, MemoryPolicy

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class PinningRequest:
    """Binding that the rank was asked for."""

    cores: tuple[int, ...]
    """CPUs to compute on; empty: not bound."""
    num_threads: int
    """Compute threads."""
    policy: NumaPolicy
    """How strictly."""
    communication: tuple[int, ...] = ()
    """CPUs for all other threads; empty: all that the process may use."""
    memory_bytes: int = 0
    """Memory that the rank may take, all of it on the node of its cores if that is Required; 0: not stated."""
    pool: str = ""
    """Name of the rank's pool in the resource."""

    @property
    def required(self) -> bool:
        """True if the policy is Required."""
        return self.policy == NumaPolicy.REQUIRED

    @property
    def path(self) -> str:
        """Path of the fields that this comes from."""
        return f"spec.pools[{self.pool}].cpu"


@dataclass(frozen=True, slots=True)
class PinningReport:
    """Binding that the kernel confirmed."""

    pinned: bool
    """Whether cores and memory are exactly as asked."""
    cpus: tuple[int, ...]
    """CPUs that the process is bound to, ascending; empty when it is not bound."""
    numa_nodes: tuple[int, ...]
    """Nodes of these CPUs that the machine tells, ascending."""
    num_threads: int
    """Compute threads to use: as asked, or one a core where there are fewer."""
    memory: str
    """How memory is placed: "bound", "preferred", "first touch" (and why) or "default"."""
    reason: str
    """Missing parts, for a person; empty when pinned."""
    communication: tuple[int, ...] = ()
    """CPUs where threads that do not compute belong, ascending; those of before where none were given."""
    allowed: int = 0
    """CPUs that the process could use before it was bound: all of its node, in a container without CPUs of its own."""


def pin(request: PinningRequest, *, topology: CpuTopology, kernel: Kernel) -> PinningReport:
    """Bind the calling thread, and so all threads it starts from now on. Raises PinningError; see the module."""
    if request.policy == NumaPolicy.NONE:
        return _unbound(request, "numa policy is None", kernel)
    cpus, problems = _choose(request, topology, kernel)
    if not cpus or (request.required and problems):
        report = _unbound(request, "; ".join(problems), kernel)
    else:
        report = _bind(request, cpus, problems, topology=topology, kernel=kernel)
    require(request, report)
    return report


def require(request: PinningRequest, report: PinningReport) -> None:
    """Require the binding. Raises PinningError when the policy is Required and something is missing."""
    if request.required and not report.pinned:
        raise PinningError(f"numa policy is Required, but {report.reason}")


def told_nodes(topology: CpuTopology, cpus: Iterable[int]) -> tuple[int, ...]:
    """NUMA nodes of these CPUs as far as the machine tells them, ascending."""
    return tuple(node for node in topology.nodes_of(cpus) if node != UNKNOWN_NODE)


def _unbound(request: PinningRequest, reason: str, kernel: Kernel) -> PinningReport:
    return PinningReport(
        pinned=False,
        cpus=(),
        numa_nodes=(),
        num_threads=request.num_threads,
        memory="default",
        reason=reason,
        communication=tuple(sorted(kernel.affinity())),
        allowed=len(kernel.affinity()),
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
    return cpus, [*problems, *_check_nodes(request, cpus, topology, kernel)]


def _check_nodes(request: PinningRequest, cpus: tuple[int, ...], topology: CpuTopology, kernel: Kernel) -> list[str]:
    """Return the problems with the NUMA nodes of these CPUs."""
    if not topology.tells_nodes and kernel.knows_numa():
        return ["the machine's NUMA nodes are hidden from this process (/sys/devices/system/node)"]
    nodes = topology.nodes_of(cpus)
    if UNKNOWN_NODE in nodes:
        unknown = format_cpu_list(cpu for cpu in cpus if topology.cpus[cpu].node == UNKNOWN_NODE)
        return [f"the NUMA node of CPUs {unknown} is not known (/sys/devices/system/node)"]
    if len(nodes) > 1:
        return [f"CPUs {format_cpu_list(cpus)} are on NUMA nodes {format_cpu_list(nodes)}, not on one"]
    return [problem for node in nodes for problem in _check_node_memory(request, node, topology, kernel)]


def _check_node_memory(request: PinningRequest, node: int, topology: CpuTopology, kernel: Kernel) -> list[str]:
    """Whether memory can be had where the cores are. BestEffort takes what lies elsewhere when its node is full."""
    allowed = kernel.memory_nodes()
    if topology.tells_nodes and allowed is not None and node not in allowed:
        return [f"this process's cpuset allows memory of NUMA nodes {format_cpu_list(allowed)} only, not of {node}"]
    size = topology.numa[node].memory_bytes
    if size == 0:
        return [f"NUMA node {node} has no memory"]
    if request.required and size is not None and request.memory_bytes > size:
        asked = f"{request.path}.memoryPerRank is {request.memory_bytes / _GIB:.1f} GiB"
        return [f"{asked}, and NUMA node {node} has {size / _GIB:.1f} GiB"]
    return []


def _bind(
    request: PinningRequest, cpus: tuple[int, ...], problems: list[str], *, topology: CpuTopology, kernel: Kernel
) -> PinningReport:
    before = kernel.affinity()
    problems = [*problems, *_bind_cores(cpus, kernel)]
    nodes = told_nodes(topology, cpus)
    memory, unlike = _place_memory(request, nodes, kernel)
    problems += [*unlike, *_check_memory(nodes, topology, kernel)]
    bound = tuple(sorted(kernel.affinity())) if kernel.affinity() <= frozenset(cpus) else ()
    return PinningReport(
        pinned=not problems,
        cpus=bound,
        numa_nodes=told_nodes(topology, bound),
        num_threads=min(request.num_threads, len(cpus)),
        memory=memory,
        reason="; ".join(problems),
        communication=tuple(sorted(before & frozenset(request.communication) or before)),
        allowed=len(before),
    )


def _bind_cores(cpus: tuple[int, ...], kernel: Kernel) -> list[str]:
    try:
        kernel.set_affinity(cpus)
    except OSError as error:
        return [f"CPUs {format_cpu_list(cpus)} cannot be bound to: {error.strerror}"]
    if kernel.affinity() != frozenset(cpus):
        return [f"the kernel bound to CPUs {format_cpu_list(kernel.affinity())}, not {format_cpu_list(cpus)}"]
    return []


def _place_memory(request: PinningRequest, nodes: tuple[int, ...], kernel: Kernel) -> tuple[str, list[str]]:
    """How memory is placed from now on, and what the kernel made of it that was not asked for."""
    if len(nodes) != 1:
        return "first touch", []
    wanted = MemoryPolicy(MPOL_BIND if request.required else MPOL_PREFERRED, nodes)
    try:
        kernel.set_memory_policy(wanted.mode, wanted.nodes)
    except OSError as error:
        return f"first touch (set_mempolicy: {error.strerror or error})", []
    seen = kernel.memory_policy()
    if seen is not None and seen != wanted:
        return "default", [f"the kernel has memory policy {seen.mode} of NUMA nodes {format_cpu_list(seen.nodes)}"]
    return "bound" if request.required else "preferred", []


def _check_memory(nodes: tuple[int, ...], topology: CpuTopology, kernel: Kernel) -> list[str]:
    if len(topology.nodes_of_memory) <= 1:
        return []  # there is no other memory
    pages = kernel.probe_pages()
    if not pages:
        return ["the kernel does not tell where memory lies (/proc/self/numa_maps), so nothing is proven"]
    if strays := {node: count for node, count in pages.items() if node not in nodes}:
        return [f"fresh memory lies on NUMA nodes {format_cpu_list(strays)}, not {format_cpu_list(nodes)}"]
    return []

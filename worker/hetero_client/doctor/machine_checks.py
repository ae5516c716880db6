"""Checks of a machine: cores, memory and limits that ranks depend on.

Each is a pure function of the snapshot. What is not told is no finding of its own: the check is OK and says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from hetero_api.contract import MAX_DOOR_CONNECTIONS
from hetero_api.cpu_list import format_cpu_list
from hetero_api.host.gpus import ENV_VISIBLE_DEVICES
from hetero_api.rank_memory import RUNTIME_BYTES
from hetero_client.doctor.findings import Finding, fail, ok, warn
from hetero_client.doctor.machine import Machine

GIB: Final = 2**30
MIB: Final = 2**20
LEAST_SHM_BYTES: Final = 16 * MIB
"""Less holds the exchange of a few ranks only: 1 MiB a rank, and 4 MiB for each link of a pipeline."""
GOOD_SHM_BYTES: Final = 256 * MIB
"""Room for the exchange of many ranks, and for that of NCCL among GPUs."""
GOOD_OPEN_FILES: Final = 2 * MAX_DOOR_CONNECTIONS
"""Both doors with all the connections that they take."""
WASTE_SHARE: Final = 0.05
"""Share of the memory that may be set aside as huge pages without a warning."""


def check_memory(machine: Machine) -> Finding:
    """Check that there is memory for a rank."""
    seen = f"{machine.usable_bytes / GIB:.1f} GiB"
    if machine.usable_bytes < machine.physical_bytes:
        seen += f" of {machine.physical_bytes / GIB:.1f} GiB, by the limit of a cgroup or reserved huge pages"
    if machine.usable_bytes > RUNTIME_BYTES:
        return ok("memory", seen)
    return fail(
        "memory", seen,
        cost=f"a rank takes {RUNTIME_BYTES / GIB:.2f} GiB before its weights, so none can start",
        fix="raise the limit (systemd: MemoryMax=, a container: --memory), or take a larger machine",
    )  # fmt: skip


def check_cores(machine: Machine) -> Finding:
    """Check that the usable CPUs are whole physical cores."""
    own, whole = frozenset(machine.own.cpus), machine.whole
    kept = {whole.cpus[cpu].physical for cpu in own if cpu in whole.cpus}
    lost = [cpu.number for cpu in whole.cores if cpu.physical in kept and cpu.number not in own]
    seen = f"{len(machine.own.one_per_core(own))} physical cores: CPUs {format_cpu_list(own)} of {len(whole.cpus)}"
    if not lost:
        return ok("cores", seen)
    return warn(
        "cores", f"{seen}; CPUs {format_cpu_list(lost)} are threads of the same cores and belong to others",
        cost="whoever runs there slows these cores, and all ranks wait for the slowest",
        fix="give whole cores (kubelet: cpuManagerPolicyOptions full-pcpus-only; systemd: AllowedCPUs=)",
    )  # fmt: skip


def check_quota(machine: Machine) -> Finding:
    """Check that no quota of CPU time stops threads."""
    quota, count = machine.limits.cpus, len(machine.own.cpus)
    if quota is None or quota >= count:
        return ok("CPU quota", "none" if quota is None else f"{quota:g} CPUs, for {count}")
    return warn(
        "CPU quota", f"{quota:g} CPUs of time, on {count} CPUs",
        cost="the kernel stops a rank's threads within a step once the quota of a period is used up",
        fix=f"give whole CPUs by a cpuset (--cpuset-cpus) in place of a quota, or raise it to {count}",
    )  # fmt: skip


def check_smt(machine: Machine) -> Finding:
    """Check that the threads of a physical core can be told apart."""
    cpus = machine.whole.cpus
    tells_siblings = len(machine.whole.one_per_core(cpus)) < len(cpus)
    if tells_siblings:
        return ok("SMT", "on: ranks compute with one thread a core")
    if not machine.has_smt:
        return ok("SMT", "not told" if machine.has_smt is None else "off")
    return warn(
        "SMT", "on, and the machine does not tell which CPUs are of one core",
        cost="two compute threads may share a core, which slows both, and all ranks wait for them",
        fix="show /sys/devices/system/cpu to the container, give the guest the topology (threads=2), or switch SMT off",
    )  # fmt: skip


def check_governor(machine: Machine) -> Finding:
    """Check that cores run at full clock."""
    others = sorted(machine.governors - {"performance"})
    if not others:
        return ok("governor", "performance" if machine.governors else "not told: the hypervisor or firmware decides")
    return warn(
        "governor", ", ".join(others),
        cost="cores that waited for the exchange begin the next part of a step at a low clock",
        fix="cpupower frequency-set -g performance",
    )  # fmt: skip


def check_numa(machine: Machine) -> Finding:
    """Check that ranks can have memory where their cores are."""
    if not machine.own.tells_nodes and machine.knows_numa:
        return warn(
            "NUMA nodes", "hidden (/sys/devices/system/node)",
            cost="ranks cannot be bound to the memory of their cores; policy Required refuses",
            fix="show /sys/devices/system/node in the container or sandbox",
        )  # fmt: skip
    bare = [node for node in machine.own.nodes if node in machine.own.numa and not _has_memory(machine, node)]
    seen = f"{len(machine.own.nodes)} with CPUs, {len(machine.own.nodes_of_memory)} with memory"
    if not bare:
        return ok("NUMA nodes", seen)
    return warn(
        "NUMA nodes", f"{seen}; no memory for the CPUs of node {format_cpu_list(bare)}",
        cost="ranks there read their weights from another node; policy Required refuses",
        fix="allow the node's memory (cpuset.mems, --cpuset-mems), or CPUs of other nodes only",
    )  # fmt: skip


def _has_memory(machine: Machine, node: int) -> bool:
    return machine.own.numa[node].memory_bytes != 0


def check_balancing(machine: Machine) -> Finding:
    """Check that the kernel does not move memory between nodes by itself."""
    if not machine.numa_balancing or len(machine.whole.numa) < 2:
        return ok("NUMA balancing", "not told" if machine.numa_balancing is None else _on_off(machine.numa_balancing))
    return warn(
        "NUMA balancing", "on",
        cost="the kernel unmaps pages to see who reads them: page faults within steps",
        fix="sysctl kernel.numa_balancing=0",
    )  # fmt: skip


def _on_off(switch: bool) -> str:
    return "on, with one node" if switch else "off"


def check_huge_pages(machine: Machine) -> Finding:
    """Check that ranks get huge pages for their KV cache."""
    if machine.huge_pages != "never":
        return ok("huge pages", machine.huge_pages or "not told")
    return warn(
        "huge pages", "never",
        cost="the KV cache lies on pages of 4 KiB: a page fault for each at first touch, and more misses of the TLB",
        fix="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )  # fmt: skip


def check_reserved_pages(machine: Machine) -> Finding:
    """Check that no memory is set aside that ranks do not use."""
    reserved = machine.reserved_page_bytes
    if reserved <= WASTE_SHARE * machine.physical_bytes:
        return ok("reserved huge pages", f"{reserved / GIB:.1f} GiB" if reserved else "none")
    return warn(
        "reserved huge pages", f"{reserved / GIB:.1f} GiB of {machine.physical_bytes / GIB:.1f} GiB",
        cost="ranks ask for transparent huge pages and never use these, so the memory is lost to them",
        fix="sysctl vm.nr_hugepages=0, and no hugepages= on the kernel's command line",
    )  # fmt: skip


def check_locked_memory(machine: Machine) -> Finding:
    """Check the limit of locked memory, which counts where memory is registered with a network device."""
    limit = machine.locked_bytes
    seen = "not told" if limit is None else "unlimited" if math.isinf(limit) else _size(limit)
    if not machine.has_rdma:
        return ok("memlock", f"{seen}; nothing here locks memory (CUDA's driver is not bound by it)")
    if limit is None or limit >= machine.usable_bytes:
        return ok("memlock", seen)
    return warn(
        "memlock", f"{seen}, with an RDMA device",
        cost="NCCL cannot register memory with the device and exchanges over TCP",
        fix="ulimit -l unlimited (systemd: LimitMEMLOCK=infinity, a container: --ulimit memlock=-1)",
    )  # fmt: skip


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def check_shared_memory(machine: Machine) -> Finding:
    """Check that /dev/shm holds the exchange of ranks."""
    size, fix = machine.shm_bytes, "mount -o remount,size=1g /dev/shm (a container: --shm-size=1g)"
    if size is None or size >= GOOD_SHM_BYTES:
        return ok("/dev/shm", "not told" if size is None else _size(size))
    if not size:
        return warn(
            "/dev/shm", "nothing is mounted there",
            cost="ranks exchange over TCP, or through a file on disk", fix="mount -t tmpfs -o size=1g tmpfs /dev/shm",
        )  # fmt: skip
    seen = _size(size)
    if size < LEAST_SHM_BYTES:
        return fail("/dev/shm", seen, cost="a group of several ranks cannot reserve its exchange and fails", fix=fix)
    return warn("/dev/shm", seen, cost="groups of many ranks, and NCCL among GPUs, may run out of it", fix=fix)


def check_open_files(machine: Machine) -> Finding:
    """Check that the gateway may hold all the connections that its doors take."""
    limit = machine.open_files
    if limit is None or limit >= GOOD_OPEN_FILES:
        return ok("open files", "not told" if limit is None else f"{limit:,.0f}")
    return warn(
        "open files", f"{limit:,.0f}",
        cost=f"each connection is one: a door takes {MAX_DOOR_CONNECTIONS}, and fails to accept beyond the limit",
        fix=f"ulimit -n {2 * GOOD_OPEN_FILES} (systemd: LimitNOFILE=, a container: --ulimit nofile=)",
    )  # fmt: skip


def check_driver(machine: Machine) -> Finding:
    """Check that devices of a loaded NVIDIA driver are visible."""
    if machine.gpus:
        names = ", ".join(sorted({gpu.name or "GPU" for gpu in machine.gpus}))
        return ok("NVIDIA driver", f"{machine.driver or 'version not told'}, {len(machine.gpus)} devices ({names})")
    if not machine.driver:
        return ok("NVIDIA driver", "none")
    return warn(
        "NVIDIA driver", f"{machine.driver}, and no device is visible",
        cost="ranks of type GPU cannot start here",
        fix=f"give the container the devices (--gpus all), or unset {ENV_VISIBLE_DEVICES}",
    )  # fmt: skip


MACHINE_CHECKS: Final[Sequence[Callable[[Machine], Finding]]] = (
    check_memory, check_cores, check_quota, check_smt, check_governor, check_numa, check_balancing, check_huge_pages,
    check_reserved_pages, check_locked_memory, check_shared_memory, check_open_files, check_driver,
)  # fmt: skip


def check_machine(machine: Machine) -> list[Finding]:
    """Return the findings of all checks of a machine."""
    return [check(machine) for check in MACHINE_CHECKS]

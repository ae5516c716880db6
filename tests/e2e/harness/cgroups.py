"""A cgroup of its own for each node's pods, so that several kubelets get along on one machine.

cgroup v1 and v2 alike: on v1 a folder in each controller's hierarchy, on v2 one folder that hands its controllers down.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
CPUSET_FILES = ("cpuset.cpus", "cpuset.mems")
NEEDED = ("cpu", "cpuset", "memory", "pids")


def make_cgroup(name: str) -> None:
    """The cgroup /`name`, ready to be a kubelet's --cgroup-root."""
    if _is_unified():
        _hand_down(ROOT)
        (ROOT / name).mkdir()
        _hand_down(ROOT / name)
        return
    for folder in hierarchies():
        (folder / name).mkdir()
    cpuset = ROOT / "cpuset"
    for file in CPUSET_FILES:  # empty in a new cgroup of v1, and then nothing may run in it
        (cpuset / name / file).write_text((cpuset / file).read_text())


def hierarchies() -> list[Path]:
    """Where cgroups are made: the hierarchies that are mounted."""
    if _is_unified():
        return [ROOT]
    return sorted({folder.resolve() for folder in ROOT.iterdir() if (folder / "cgroup.procs").exists()})


def _is_unified() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def _hand_down(folder: Path) -> None:
    available = (folder / "cgroup.controllers").read_text().split()
    wanted = " ".join(f"+{name}" for name in NEEDED if name in available)
    (folder / "cgroup.subtree_control").write_text(wanted)

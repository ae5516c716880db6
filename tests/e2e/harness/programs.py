"""What real nodes need of this machine beside Kubernetes' own programs: found, or named with how to get it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.support.kube.errors import BinariesMissing

# Debian's package has the plugins in the first; their release and containerd's bundle in the second.
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
CNI_PLUGINS = ("bridge", "host-local", "loopback", "portmap")
PROGRAMS = ("containerd", "ctr", "runc", "ip", "nsenter", "iptables", "unshare", "mount", "umount", "cc")
PACKAGES = "containerd runc containernetworking-plugins iproute2 iptables util-linux gcc libc6-dev"


@dataclass(frozen=True, slots=True)
class NodePrograms:
    """Absolute paths."""

    containerd: Path
    ctr: Path
    runc: Path
    ip: Path
    nsenter: Path
    cc: Path
    cni: Path
    """Folder of the plugins."""


def find_node_programs() -> NodePrograms:
    """Raises BinariesMissing, naming all that is missing at once."""
    if os.geteuid() != 0:
        raise BinariesMissing("real nodes need root: they make network namespaces, mounts and cgroups")
    found = {name: shutil.which(name) for name in PROGRAMS}
    missing = [name for name, path in found.items() if path is None]
    cni = next((folder for folder in CNI_FOLDERS if all((folder / name).is_file() for name in CNI_PLUGINS)), None)
    if cni is None:
        missing.append(f"CNI plugins {', '.join(CNI_PLUGINS)} in {' or '.join(map(str, CNI_FOLDERS))}")
    if missing or cni is None:
        raise BinariesMissing(f"not on this machine: {', '.join(missing)}. On Debian: apt-get install {PACKAGES}")
    paths = {name: Path(path) for name, path in found.items() if path is not None}
    chosen = {name: paths[name] for name in ("containerd", "ctr", "runc", "ip", "nsenter", "cc")}
    return NodePrograms(**chosen, cni=cni)

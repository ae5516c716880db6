"""Which CPUs and processes the containers of our nodes have: read from their cgroups, not from what they say."""

from __future__ import annotations

from pathlib import Path

from hetero_api.cpu_list import parse_cpu_list
from tests.e2e.harness.cgroups import ROOT
from tests.e2e.site import Site
from tests.support.kube.client import Object

FILES = ("cpuset.cpus", "cpuset.cpus.effective")


def cpuset_of(site: Site, pod: Object) -> frozenset[int]:
    """Of a pod's only container."""
    (status,) = pod["status"]["containerStatuses"]
    return _containers(site, pod["spec"]["nodeName"])[_id(status)]


def processes_of(site: Site, pod: Object) -> list[int]:
    """Of a pod's only container, as this machine numbers them."""
    (status,) = pod["status"]["containerStatuses"]
    (folder,) = [path for path in _folders(site, pod["spec"]["nodeName"]) if path.name == _id(status)]
    return [int(line) for line in (folder / "cgroup.procs").read_text().split()]


def cpusets_of_others(site: Site, pod: Object) -> dict[str, frozenset[int]]:
    """Of all other containers that run on the pod's node, by id; those of its own pause process are its own."""
    uid = pod["metadata"]["uid"]
    own = {path.name for path in _folders(site, pod["spec"]["nodeName"]) if uid in str(path)}
    found = _containers(site, pod["spec"]["nodeName"])
    return {name: cpus for name, cpus in found.items() if name not in own}


def _containers(site: Site, node: str) -> dict[str, frozenset[int]]:
    running = {
        _id(status)
        for pod in site.client.list_all("Pod", fields=f"spec.nodeName={node}")
        for status in pod["status"].get("containerStatuses", [])
        if "running" in status["state"]
    }
    return {path.name: _cpus(path) for path in _folders(site, node) if path.name in running}


def _folders(site: Site, node: str) -> list[Path]:
    """cgroups of a node's containers."""
    name = site.nodes[node].cgroup
    top = next(path for path in (ROOT / "cpuset" / name, ROOT / name) if path.is_dir())
    return [path for path in top.rglob("*") if path.is_dir() and len(path.name) == 64]


def _cpus(folder: Path) -> frozenset[int]:
    text = next(text for file in FILES if (folder / file).exists() and (text := (folder / file).read_text().strip()))
    return frozenset(parse_cpu_list(text))


def _id(status: Object) -> str:
    return str(status["containerID"]).rpartition("/")[2]

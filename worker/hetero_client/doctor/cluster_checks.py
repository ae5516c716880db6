"""Checks of a cluster: the definition, the operator, and what nodes give to ranks.

Each is a pure function of the snapshot. Only nodes on which pods may be put count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Final

from hetero_api.contract import API_VERSION, VERSION
from hetero_api.crd import crd
from hetero_api.quantity import parse_bytes
from hetero_client.doctor.cluster import DEFINITION, Cluster, Object
from hetero_client.doctor.findings import Finding, fail, ok, warn

GPU: Final = "nvidia.com/gpu"
GPU_LABELS: Final = (
    "nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present",
    "feature.node.kubernetes.io/pci-0302_10de.present",
)  # fmt: skip
"""Labels by which feature discovery names nodes with an NVIDIA device."""
_VERSION_LABEL: Final = "app.kubernetes.io/version"
_INSTALL: Final = "helm upgrade --install heteroinference charts/heteroinference -n heteroinference-system"
_HUGE_PAGES: Final = "hugepages-"
_SHOWN: Final = 3
"""Fields or nodes that a finding names."""


def check_server(cluster: Cluster) -> Finding:
    """Check that the API server answers."""
    version = cluster.version
    if version.found is not None:
        return ok("API server", str(version.found.get("gitVersion", "answers")))
    return fail(
        "API server", version.problem, cost="nothing of the cluster can be checked",
        fix="see what `kubectl version` says; KUBECONFIG or --context may name another cluster",
    )  # fmt: skip


def check_definition(cluster: Cluster) -> Finding:
    """Check that the resource's definition is that of this package."""
    found, name = cluster.definition.found, "definition"
    if found is None:
        if not cluster.definition.is_missing:
            return _unread(name, cluster.definition.problem, right="get customresourcedefinitions")
        return fail(
            name,
            f"{DEFINITION} is not there",
            cost="no HeteroInference can be applied",
            fix=f"{_INSTALL} --create-namespace",
        )
    schema = _served_schema(found)
    if schema is None:
        cost = f"resources of {API_VERSION}, which this package writes, are refused"
        return fail(name, f"{API_VERSION} is not served", cost=cost, fix=_INSTALL)
    ours, theirs = (frozenset(field_paths(each)) for each in (_our_schema(), schema))
    if lacking := _topmost(ours - theirs):
        cost = "the API server drops these fields without a word: the definition is older than this package"
        return warn(name, f"lacks {_some(lacking)}", cost=cost, fix=_INSTALL)
    if more := _topmost(theirs - ours):
        cost = "this command refuses these fields: the definition is newer than this package"
        return warn(name, f"has also {_some(more)}", cost=cost, fix="pip install --upgrade heteroinference")
    return ok(name, f"{API_VERSION}, fields as in {VERSION}")


def field_paths(schema: Object, path: str = "") -> Iterator[str]:
    """Yield the paths of all fields of a structural schema, as "spec.pools[].ranks"."""
    for name, inner in schema.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        yield below
        yield from field_paths(inner, below)
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(inner := schema.get(key), Mapping):
            yield from field_paths(inner, f"{path}{mark}")


def _topmost(paths: Set[str]) -> list[str]:
    """Return the fields that are not within others of them, sorted."""
    within = {path for path in paths for other in paths if path.startswith((f"{other}.", f"{other}[", f"{other}{{"))}
    return sorted(paths - within)


def _our_schema() -> Object:
    schema: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def _served_schema(definition: Object) -> Object | None:
    for version in definition["spec"]["versions"]:
        if version["name"] == API_VERSION and version["served"]:
            schema: Object = version.get("schema", {}).get("openAPIV3Schema", {})
            return schema
    return None


def check_operator(cluster: Cluster) -> Finding:
    """Check that an operator runs, of this package's version."""
    name = "operator"
    if cluster.operators.found is None:
        return _unread(name, cluster.operators.problem, right="list deployments in all namespaces")
    found = cluster.operators.items
    if not found:
        cost = "HeteroInference resources stay as they are: nobody makes pods of them"
        return fail(name, "there is none", cost=cost, fix=f"{_INSTALL} --create-namespace")
    idle = [each for each in found if not each.get("status", {}).get("availableReplicas")]
    if len(idle) == len(found):
        cost = "changes of resources wait, and lost pods are not replaced"
        fix = f"kubectl logs deployment/{idle[0]['metadata']['name']} -n {idle[0]['metadata']['namespace']}"
        return fail(name, f"{_named(idle)}: no pod is available", cost=cost, fix=fix)
    versions = sorted({each["metadata"].get("labels", {}).get(_VERSION_LABEL, "unknown") for each in found})
    seen = f"{_named(found)}, version {', '.join(versions)}"
    if versions == [VERSION]:
        return ok(name, seen)
    cost = f"it may refuse what version {VERSION} of this package accepts, or the other way round"
    return warn(name, seen, cost=cost, fix=_INSTALL)


def _named(found: Sequence[Object]) -> str:
    return _some([f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in found])


def check_nodes(cluster: Cluster) -> Finding:
    """Check that there are nodes on which ranks may be put, and that all of them are ready."""
    if cluster.nodes.found is None:
        return _unread("nodes", cluster.nodes.problem, right="list nodes")
    nodes = usable_nodes(cluster)
    ready = {name for name, node in nodes.items() if _is_ready(node)}
    if not ready:
        cost, fix = "no pod of a group can run", "kubectl describe nodes"
        return fail("nodes", f"none of {len(cluster.nodes.items)} is ready for pods", cost=cost, fix=fix)
    if waiting := sorted(nodes.keys() - ready):
        cost, fix = "ranks cannot be put there", f"kubectl describe node {waiting[0]}"
        return warn("nodes", f"{len(ready)} of {len(nodes)} are ready, not {_some(waiting)}", cost=cost, fix=fix)
    return ok("nodes", f"{len(ready)}, all ready")


def usable_nodes(cluster: Cluster) -> dict[str, Object]:
    """Return the nodes that take pods without tolerations of their own, by name."""
    return {node["metadata"]["name"]: node for node in cluster.nodes.items if _takes_pods(node)}


def _takes_pods(node: Object) -> bool:
    spec = node.get("spec", {})
    roles = (taint["key"].startswith("node-role.kubernetes.io/") for taint in spec.get("taints", ()))
    return not spec.get("unschedulable") and not any(roles)


def _is_ready(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def check_cpu_manager(cluster: Cluster) -> Finding:
    """Check that kubelets give ranks cores of their own."""
    return _check_policy(
        cluster, "CPU manager", field="cpuManagerPolicy", good="static",
        cost="any other pod may run on the ranks' cores (NUMAPinned: NotGuaranteed)",
    )  # fmt: skip


def check_topology_manager(cluster: Cluster) -> Finding:
    """Check that kubelets give a rank cores and devices of one NUMA node."""
    return _check_policy(
        cluster, "topology manager", field="topologyManagerPolicy", good="single-numa-node",
        cost="a rank's cores may be of two NUMA nodes, and its GPU of another (NUMAPinned: NotPinned)",
    )  # fmt: skip


def check_memory_manager(cluster: Cluster) -> Finding:
    """Check that kubelets keep a rank's memory on the NUMA node of its cores."""
    return _check_policy(
        cluster, "memory manager", field="memoryManagerPolicy", good="Static",
        cost="a node may give away the memory beside a rank's cores (NUMAPinned: MemoryNotLocal)",
    )  # fmt: skip


def _check_policy(cluster: Cluster, check: str, *, field: str, good: str, cost: str) -> Finding:
    told = {name: cluster.kubelets[name] for name in usable_nodes(cluster) if name in cluster.kubelets}
    read = {name: answer.found for name, answer in told.items() if answer.found is not None}
    if told and not read:
        return _unread(check, next(iter(told.values())).problem, right="get nodes/proxy")
    policies = {name: found.get("kubeletconfig", {}).get(field, "not told") for name, found in read.items()}
    others = sorted(name for name, policy in policies.items() if policy != good)
    unread = f"; not readable on {_some(sorted(told.keys() - read.keys()))}" if len(read) < len(told) else ""
    if others:
        seen = f"{', '.join(sorted({policies[name] for name in others}))} on {_some(others)}{unread}"
        return warn(check, seen, cost=cost, fix=f"kubelet: {field}: {good} (docs/numa.md, Configure a node)")
    return ok(check, f"{good} on {_some(sorted(read))}{unread}" if read else "no node")


def check_node_pages(cluster: Cluster) -> Finding:
    """Check that nodes set no memory aside that ranks do not use."""
    kept = {name: size for name, node in usable_nodes(cluster).items() if (size := _huge_page_bytes(node))}
    if not kept:
        return ok("reserved huge pages", "none")
    return warn(
        "reserved huge pages", f"{sum(kept.values()) / 2**30:.1f} GiB on {_some(sorted(kept))}",
        cost="ranks ask for transparent huge pages and never use these, so the memory is lost to them",
        fix="sysctl vm.nr_hugepages=0 on the node, and no hugepages= on its kernel's command line",
    )  # fmt: skip


def _huge_page_bytes(node: Object) -> int:
    resources = node.get("status", {}).get("allocatable", {})
    return sum(parse_bytes(size) for name, size in resources.items() if name.startswith(_HUGE_PAGES))


def check_node_gpus(cluster: Cluster) -> Finding:
    """Check that nodes with NVIDIA devices offer them to pods."""
    nodes = usable_nodes(cluster)
    offered = {name: gpus for name, node in nodes.items() if (gpus := _gpus(node))}
    hidden = sorted(name for name, node in nodes.items() if name not in offered and _has_gpu_label(node))
    seen = f"{sum(offered.values())} {GPU} on {_some(sorted(offered))}" if offered else f"no node offers {GPU}"
    if not hidden:
        return ok("GPUs", seen)
    return warn(
        "GPUs", f"{seen}; {_some(hidden)} have devices and offer none",
        cost="ranks of type GPU cannot be put there",
        fix="run NVIDIA's device plugin on these nodes (kubectl get pods -A shows whether it starts)",
    )  # fmt: skip


def _gpus(node: Object) -> int:
    return int(node.get("status", {}).get("allocatable", {}).get(GPU, 0))


def _has_gpu_label(node: Object) -> bool:
    labels = node["metadata"].get("labels", {})
    return any(labels.get(name) == "true" for name in GPU_LABELS)


def _unread(check: str, problem: str, *, right: str) -> Finding:
    return warn(check, f"cannot be read: {problem}", cost="unknown", fix=f"ask as a user who may {right}")


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


CLUSTER_CHECKS: Final[Sequence[Callable[[Cluster], Finding]]] = (check_definition, check_operator, check_nodes)
NODE_CHECKS: Final[Sequence[Callable[[Cluster], Finding]]] = (
    check_cpu_manager, check_topology_manager, check_memory_manager, check_node_pages, check_node_gpus,
)  # fmt: skip
"""Checks of what nodes say."""


def check_cluster(cluster: Cluster) -> list[Finding]:
    """Return the findings of all checks of a cluster, as far as its API server answers this user."""
    first = check_server(cluster)
    if cluster.version.found is None:
        return [first]
    checks = [*CLUSTER_CHECKS, *(NODE_CHECKS if cluster.nodes.found is not None else ())]
    return [first, *(check(cluster) for check in checks)]

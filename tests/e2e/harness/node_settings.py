"""Settings of a node's kubelet and kube-proxy, for the versions of Kubernetes that tests run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.kube.versions import Version

MEMORY_MANAGER_SINCE = Version(1, 22, 0)
RUNTIME_IN_CONFIG_SINCE = Version(1, 27, 0)
EVICTION_MEMORY = "200Mi"
RESERVED_MEMORY = "300Mi"


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What a node of a test is like.

    With `static` policy and whole cores in both requests and limits, a container has its cores for itself. The kubelet
    keeps `reserved_cores` in the pool that all others share, and these cannot be requested; without them it keeps the
    first core, and all but `reserved_cpu` of it can be requested.
    """

    name: str
    static: bool = True
    reserved_cpu: str = "100m"
    reserved_cores: str = ""
    taints: Sequence[str] = ()
    """As KEY=VALUE:EFFECT."""


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """What a kubelet is told of its surroundings."""

    folder: Path
    kubeconfig: Path
    ca: Path
    certificate: Path
    key: Path
    address: str
    name_server: str
    runtime: str
    cgroup: str


def kubelet_config(plan: NodePlan, files: NodeFiles, version: Version) -> dict[str, Any]:
    """A KubeletConfiguration."""
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": files.address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(files.ca)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(files.certificate),
        "tlsPrivateKeyFile": str(files.key),
        "clusterDomain": "cluster.local",
        "clusterDNS": [files.name_server],
        "resolvConf": "",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{files.cgroup}",
        "failSwapOn": False,
        "evictionHard": {"memory.available": EVICTION_MEMORY, "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "5s",
        "cpuManagerPolicy": "static" if plan.static else "none",
        "kubeReserved": {"memory": RESERVED_MEMORY},
    }
    if plan.reserved_cores:
        config["reservedSystemCPUs"] = plan.reserved_cores
    else:
        config["kubeReserved"]["cpu"] = plan.reserved_cpu
    if plan.static:
        config["topologyManagerPolicy"] = "single-numa-node"
    if plan.static and version >= MEMORY_MANAGER_SINCE:
        config["memoryManagerPolicy"] = "Static"
        config["reservedMemory"] = [{"numaNode": 0, "limits": {"memory": _sum_of_mi(RESERVED_MEMORY, EVICTION_MEMORY)}}]
    if version >= RUNTIME_IN_CONFIG_SINCE:
        config["containerRuntimeEndpoint"] = files.runtime
    return config


def kubelet_flags(plan: NodePlan, files: NodeFiles, version: Version) -> list[str]:
    """What is not, or not in all versions, a field of the configuration."""
    flags = [
        f"--config={files.folder / 'kubelet.yaml'}",
        f"--kubeconfig={files.kubeconfig}",
        f"--hostname-override={plan.name}",
        f"--node-ip={files.address}",
        f"--root-dir={files.folder / 'kubelet'}",
        f"--cert-dir={files.folder / 'kubelet-certificates'}",
    ]
    if plan.taints:
        flags.append(f"--register-with-taints={','.join(plan.taints)}")
    if version < RUNTIME_IN_CONFIG_SINCE:
        flags += ["--container-runtime=remote", f"--container-runtime-endpoint={files.runtime}"]
    return flags


def proxy_config(plan: NodePlan, kubeconfig: Path, pods: str) -> dict[str, Any]:
    """A KubeProxyConfiguration. Sysctls of connection tracking are left alone: they are the machine's."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": plan.name,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": pods,
        "bindAddress": "0.0.0.0",
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        # Two pods of one bridge would answer one another past the rule that translates back.
        "iptables": {"masqueradeAll": True, "minSyncPeriod": "0s", "syncPeriod": "30s"},
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def _sum_of_mi(*quantities: str) -> str:
    return f"{sum(int(quantity.removesuffix('Mi')) for quantity in quantities)}Mi"

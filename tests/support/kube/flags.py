"""The command lines of etcd and the Kubernetes servers, as tests want them: loopback only, fast, no leader election.

Only flags that 1.20 and the current release both have. Controllers are named as 1.20 named them; newer versions keep
these names as aliases.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.support.kube.binaries import Binaries
from tests.support.kube.ports import HOST, free_port
from tests.support.kube.versions import Version

SERVICE_RANGE = "10.0.0.0/24"
SERVICE_ADDRESS = "10.0.0.1"
QPS = 500
# etcd from 3.5 on knows it; as a flag, older ones would refuse it.
ETCD_ENVIRONMENT = {"ETCD_UNSAFE_NO_FSYNC": "true"}
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_NEEDED_BYTES = 1 << 30
SCHEDULER_API = ((Version(1, 25, 0), "v1"), (Version(1, 23, 0), "v1beta3"), (Version(1, 0, 0), "v1beta1"))

CONTROLLERS = (
    "deployment",
    "endpoint",
    "garbagecollector",
    "namespace",
    "replicaset",
    "root-ca-cert-publisher",
    "serviceaccount",
    "serviceaccount-token",
    "statefulset",
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the files of a control plane are, and its ports."""

    folder: Path
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    address: str = HOST
    """Of the API server. Other than loopback where real nodes have to reach it."""

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    @property
    def audit_policy(self) -> Path:
        return self.folder / "audit-policy.yaml"

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.api_port}"

    def kubeconfig(self, name: str) -> Path:
        return self.folder / f"{name}.kubeconfig"


def etcd_command(binaries: Binaries, layout: Layout) -> list[str]:
    """One member, which need not survive a power cut."""
    client = f"http://{HOST}:{layout.etcd_port}"
    peer = f"http://{HOST}:{layout.etcd_peer_port}"
    # fmt: off
    return [
        str(binaries.etcd), f"--data-dir={layout.folder / 'etcd'}", "--name=test",
        f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=test={peer}",
        "--logger=zap", "--log-level=warn",
    ]
    # fmt: on


def wants_shared_memory() -> bool:
    """Whether etcd's data can lie in memory, where syncing costs nothing (etcd 3.4 syncs always)."""
    return SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= SHARED_MEMORY_NEEDED_BYTES


def api_server_command(
    binaries: Binaries, layout: Layout, *, with_controllers: bool, extra: Sequence[str] = ()
) -> list[str]:
    """An API server that audits every call, with RBAC."""
    pki = layout.pki
    # fmt: off
    command = [
        str(binaries.api_server), f"--etcd-servers=http://{HOST}:{layout.etcd_port}",
        f"--bind-address={layout.address}", f"--advertise-address={layout.address}", f"--secure-port={layout.api_port}",
        f"--endpoint-reconciler-type={_endpoints(layout)}", f"--service-cluster-ip-range={SERVICE_RANGE}",
        *_serving_certificate(layout),
        f"--client-ca-file={pki / 'ca.crt'}", "--authorization-mode=Node,RBAC", "--allow-privileged=true",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki / 'service-accounts.key'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        f"--requestheader-client-ca-file={pki / 'ca.crt'}", "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki / 'front-proxy.crt'}", f"--proxy-client-key-file={pki / 'front-proxy.key'}",
        f"--audit-policy-file={layout.audit_policy}", f"--audit-log-path={layout.audit_log}",
        "--audit-log-mode=blocking", "--audit-log-maxsize=100000", "--profiling=false",
    ]
    # fmt: on
    if not with_controllers:  # nobody makes the default ServiceAccounts, which admission would wait for
        command.append("--disable-admission-plugins=ServiceAccount")
    return [*command, *extra]


def _endpoints(layout: Layout) -> str:
    """Who writes the endpoints of the Service `kubernetes`; they must not be loopback addresses."""
    return "none" if layout.address == HOST else "master-count"


def controller_manager_command(
    binaries: Binaries, layout: Layout, *, port: int, controllers: Sequence[str], extra: Sequence[str] = ()
) -> list[str]:
    """Only the named controllers, all as the user system:kube-controller-manager, hardly rate-limited."""
    kubeconfig = layout.kubeconfig("controller-manager")
    # fmt: off
    return [
        str(binaries.require_controller_manager()), f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}", f"--authorization-kubeconfig={kubeconfig}",
        f"--bind-address={HOST}", f"--secure-port={port}", *_serving_certificate(layout),
        f"--controllers={','.join(_named(controllers, binaries.version))}",
        "--leader-elect=false", "--use-service-account-credentials=false",
        f"--service-account-private-key-file={layout.pki / 'service-accounts.key'}",
        f"--root-ca-file={layout.pki / 'ca.crt'}", f"--kube-api-qps={QPS}", f"--kube-api-burst={2 * QPS}",
        "--concurrent-gc-syncs=4", "--profiling=false", *_no_insecure_port(binaries.version), *extra,
    ]
    # fmt: on


def scheduler_command(binaries: Binaries, layout: Layout, *, port: int) -> list[str]:
    """The default profile, which tries an unschedulable pod again soon."""
    kubeconfig = layout.kubeconfig("scheduler")
    config = layout.folder / "scheduler.yaml"
    config.write_text(yaml.safe_dump(_scheduler_config(binaries.version, kubeconfig)), encoding="utf-8")
    # fmt: off
    return [
        str(binaries.require_scheduler()), f"--config={config}", f"--bind-address={HOST}", f"--secure-port={port}",
        *_serving_certificate(layout),
        f"--authentication-kubeconfig={kubeconfig}", f"--authorization-kubeconfig={kubeconfig}",
    ]
    # fmt: on


def _named(controllers: Sequence[str], version: Version) -> list[str]:
    """Evicting pods by taint was the node controller's until 1.29."""
    split = "nodelifecycle" in controllers and version >= Version(1, 29, 0)
    return [*controllers, "taint-eviction-controller"] if split else list(controllers)


def _no_insecure_port(version: Version) -> list[str]:
    """Off by a flag until it went, else two controller managers would not fit on a machine."""
    return ["--port=0"] if version < Version(1, 24, 0) else []


def _serving_certificate(layout: Layout) -> list[str]:
    pair = layout.pki / "api-server"
    return [f"--tls-cert-file={pair}.crt", f"--tls-private-key-file={pair}.key"]


def _scheduler_config(version: Version, kubeconfig: Path) -> dict[str, object]:
    api = next(name for since, name in SCHEDULER_API if version >= since)
    config: dict[str, object] = {
        "apiVersion": f"kubescheduler.config.k8s.io/{api}",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": QPS, "burst": 2 * QPS},
        "leaderElection": {"leaderElect": False},
        "podInitialBackoffSeconds": 1,
        "podMaxBackoffSeconds": 2,
    }
    if api == "v1beta1":  # has an insecure port, which cannot be turned off but moved
        insecure = f"{HOST}:{free_port()}"
        config |= {"healthzBindAddress": insecure, "metricsBindAddress": insecure}
    return config

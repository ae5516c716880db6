"""One real node: containerd, kubelet and kube-proxy in a network namespace and below a cgroup of their own."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import yaml

from tests.e2e.harness.cgroups import make_cgroup
from tests.e2e.harness.container_runtime import Runtime
from tests.e2e.harness.janitor import MADE, kill_all
from tests.e2e.harness.network import POD_BRIDGE, Network
from tests.e2e.harness.node_settings import NodeFiles, NodePlan, kubelet_config, kubelet_flags, proxy_config
from tests.e2e.harness.private_folders import make_folders, with_private_folders
from tests.e2e.harness.programs import NodePrograms
from tests.support.kube.binaries import Binaries
from tests.support.kube.certificates import Authority
from tests.support.kube.cluster import Cluster
from tests.support.kube.components import Component
from tests.support.kube.kubeconfigs import Credentials, write_kubeconfig
from tests.support.kube.polling import poll

START_TIMEOUT_S = 60.0


class Node:
    """Made and started in the order in which its parts need one another; taken away by the janitor."""

    def __init__(
        self,
        plan: NodePlan,
        index: int,
        *,
        folder: Path,
        network: Network,
        cluster: Cluster,
        binaries: Binaries,
        programs: NodePrograms,
        cgroup: str,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.runtime = Runtime(folder, programs)
        self._index = index
        self._network = network
        self._cluster = cluster
        self._binaries = binaries
        self.cgroup = cgroup
        self._components: dict[str, Component] = {}
        self._files: NodeFiles | None = None
        self._containerd: list[str] = []

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def _namespace(self) -> str:
        return self._network.namespace(self._index)

    def make(self) -> None:
        """Make the node's folders, cgroup and settings."""
        self.folder.mkdir(parents=True)
        make_folders(self.folder, self.folder.parent / MADE)
        make_cgroup(self.cgroup)
        self._containerd = self.runtime.configure(pods=self._network.addresses.pods(self._index), bridge=POD_BRIDGE)

    def start_runtime(self) -> None:
        """Start containerd, so that images can be loaded."""
        inside = self._network.inside(self._namespace, *with_private_folders(self._containerd, self.folder))
        daemon = self._start("containerd", inside)
        poll(self.runtime.serves, timeout_s=START_TIMEOUT_S, describe=daemon.log_tail)

    def stop_runtime(self) -> None:
        """Stop containerd, which runs no container."""
        self._components["containerd"].stop()

    def start(self) -> None:
        """Kubelet and kube-proxy; the node is Ready some seconds later."""
        self._files = files = self._files or self._make_files()
        self._configure_kubelet(files)
        flags = kubelet_flags(self.plan, files, self._binaries.version)
        self._start("kubelet", self._beside_containerd(str(self._binaries.require_kubelet()), *flags))
        pair = Authority(self._cluster.pki).issue(
            f"proxy-{self.name}", common_name="system:kube-proxy", usage="clientAuth"
        )
        kubeconfig = self._kubeconfig("kube-proxy.kubeconfig", Credentials(pair))
        config = self._write("kube-proxy.yaml", proxy_config(self.plan, kubeconfig, self._network.addresses.all_pods))
        self._start("kube-proxy", self._beside_containerd(str(self._binaries.require_proxy()), f"--config={config}"))

    def restart_kubelet(self) -> None:
        """As after its package was upgraded: pods run on meanwhile."""
        self._components["kubelet"].stop()
        self._components["kubelet"].start()

    def lose_power(self) -> None:
        """End all that runs on it, at once and unheard. Its disk stays."""
        self._network.connect(self._index, connected=False)
        left = kill_all(self.folder, self.cgroup)
        assert not left, f"processes of {self.name} live on: {left}"
        for component in self._components.values():
            component.stop()

    def boot(self) -> None:
        """Start it again, as a machine whose power is back."""
        shutil.rmtree(self.runtime.state)  # as what lies in memory only
        self._network.connect(self._index, connected=True)
        self.start_runtime()
        self.start()

    def set_cpu_policy(self, *, static: bool) -> None:
        """Start the kubelet anew with another CPU manager policy."""
        self.change_plan(replace(self.plan, static=static))

    def change_plan(self, plan: NodePlan) -> None:
        """Start the kubelet anew with other settings. It wants its record of another CPU manager policy removed."""
        assert self._files is not None, "the node has not been started"
        self._components["kubelet"].stop()
        (self.folder / "kubelet/cpu_manager_state").unlink(missing_ok=True)
        self.plan = plan
        self._configure_kubelet(self._files)
        self._components["kubelet"].start()

    def inside(self, *command: str) -> list[str]:
        """A command line that runs in the node's network, where Services have their addresses."""
        return self._network.inside(self._namespace, *command)

    def log_tails(self) -> str:
        """The ends of all logs."""
        return "\n".join(component.log_tail() for component in self._components.values())

    def _beside_containerd(self, *command: str) -> list[str]:
        """A command line that runs in the node's network and with its private folders."""
        mounts = f"--mount=/proc/{self._components['containerd'].pid}/ns/mnt"
        return self._network.inside(self._namespace, *command, more=[mounts])

    def _start(self, name: str, command: list[str]) -> Component:
        component = Component(name, command, folder=self.folder)
        component.start()
        self._components[name] = component
        return component

    def _configure_kubelet(self, files: NodeFiles) -> None:
        self._write("kubelet.yaml", kubelet_config(self.plan, files, self._binaries.version))

    def _make_files(self) -> NodeFiles:
        addresses = self._network.addresses
        address = addresses.node(self._index)
        authority = Authority(self._cluster.pki)
        user = f"system:node:{self.name}"
        client = authority.issue(
            f"node-{self.name}", common_name=user, organizations=["system:nodes"], usage="clientAuth"
        )
        serving = authority.issue(
            f"kubelet-{self.name}", common_name=user, usage="serverAuth", alternative_names=[f"IP:{address}"]
        )
        return NodeFiles(
            folder=self.folder,
            kubeconfig=self._kubeconfig("kubelet.kubeconfig", Credentials(client)),
            ca=self._cluster.ca_file,
            certificate=serving.certificate,
            key=serving.key,
            address=address,
            name_server=addresses.name_server,
            runtime=self.runtime.endpoint,
            cgroup=self.cgroup,
        )

    def _kubeconfig(self, name: str, credentials: Credentials) -> Path:
        return write_kubeconfig(
            self.folder / name, server=self._cluster.server, credentials=credentials, ca_file=self._cluster.ca_file
        )

    def _write(self, name: str, config: object) -> Path:
        path = self.folder / name
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        os.chmod(path, 0o600)
        return path

"""A control plane and real nodes, ready when entered, gone when left.

The control plane runs on this machine, where tests are, and listens at the machine's end of the cluster's network.
Everything that a node makes lies below one folder, /var/tmp/<cluster>: the cluster's name is the prefix of all that has
a name elsewhere, so the janitor finds it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tests.e2e.harness import janitor
from tests.e2e.harness.image_archive import pause_archive
from tests.e2e.harness.network import Network
from tests.e2e.harness.node import Node
from tests.e2e.harness.node_settings import NodePlan
from tests.e2e.harness.pod_security import api_server_arguments, policies
from tests.e2e.harness.programs import NodePrograms
from tests.support.kube.binaries import Binaries
from tests.support.kube.client import Client, Object, condition
from tests.support.kube.cluster import Cluster
from tests.support.kube.components import Component
from tests.support.kube.control_plane import ControlPlane, Options
from tests.support.kube.errors import ComponentFailed
from tests.support.kube.spawned import Spawned

ROOT = Path(__file__).parents[3]
PREFIX = "he2e-"  # with what is added, the names of network interfaces stay below 16 characters
STATE = Path("/var/tmp")
READY_TIMEOUT_S = 180.0
JANITOR_TIMEOUT_S = 300.0
EVERY_CONTROLLER = ("*",)


class RealCluster:
    """`nodes` of `binaries` on this machine, all with the same images from archives; logs end up in `logs`."""

    def __init__(
        self,
        nodes: Sequence[NodePlan],
        *,
        images: Sequence[Path],
        logs: Path,
        binaries: Binaries,
        programs: NodePrograms,
    ) -> None:
        self._plans = nodes
        self._images = images
        self._logs = logs
        self._binaries = binaries
        self._programs = programs
        self._users: IO[str] | None = None
        self._janitor: Spawned | None = None
        self._plane: ControlPlane | None = None
        self.nodes: dict[str, Node] = {}
        self.folder = STATE / f"{PREFIX}{secrets.token_hex(3)}"

    @property
    def cluster(self) -> Cluster:
        """Of the control plane."""
        assert self._plane is not None, "the cluster has not been started"
        return self._plane.cluster

    def start(self) -> None:
        """Start everything and wait until all nodes are Ready. Leaves nothing behind when that fails."""
        self.folder.mkdir(mode=0o700)
        self._hire_janitor(self.folder)
        try:
            self._start(self.folder)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Take everything away. Raises ComponentFailed when something could not be."""
        if self._plane is not None:
            self._plane.stop()
        if self._users is None or self._janitor is None:
            return
        self._users.close()  # what the janitor waits for
        self._users = None
        if not self._janitor.wait(JANITOR_TIMEOUT_S) or self._janitor.status != 0:
            raise ComponentFailed(f"the janitor did not get done: see {self._janitor_log}")

    def _start(self, folder: Path) -> None:
        network = Network(folder.name, len(self._plans), self._programs)
        network.start()
        self._plane = self._start_control_plane(folder, network)
        self._start_name_server(folder, network)
        self.nodes = {plan.name: self._node(plan, index, folder, network) for index, plan in enumerate(self._plans)}
        self._start_runtimes(folder)
        for node in self.nodes.values():
            node.start()
        with self.cluster.client() as client:
            for manifest in policies(self._binaries.version):
                client.apply(manifest)
            for name in self.nodes:
                self.wait_ready(client, name)

    def wait_ready(self, client: Client, node: str) -> Object:
        """The Node object, once its kubelet says that it is ready. Fails with the ends of its logs."""
        try:
            return client.wait_for("Node", node, until=is_ready, timeout_s=READY_TIMEOUT_S)
        except AssertionError as late:
            late.add_note(self.nodes[node].log_tails())
            raise

    def _start_control_plane(self, folder: Path, network: Network) -> ControlPlane:
        pki = folder / "plane/pki"
        options = Options(
            controllers=EVERY_CONTROLLER,
            scheduler=True,
            address=network.addresses.machine,
            api_server_arguments=[
                "--kubelet-preferred-address-types=InternalIP",
                f"--kubelet-certificate-authority={pki / 'ca.crt'}",
                f"--kubelet-client-certificate={pki / 'admin.crt'}",
                f"--kubelet-client-key={pki / 'admin.key'}",
                *api_server_arguments(self._binaries.version),
            ],
        )
        plane = ControlPlane(folder / "plane", self._binaries, options)
        plane.start()
        return plane

    def _start_name_server(self, folder: Path, network: Network) -> None:
        program = (sys.executable, "-m", "tests.e2e.harness.dns")
        inside = network.inside(
            network.backbone, *program, self.cluster.admin_kubeconfig, network.addresses.name_server
        )
        Component("name-server", inside, folder=folder, environment={"PYTHONPATH": str(ROOT)}).start()

    def _node(self, plan: NodePlan, index: int, folder: Path, network: Network) -> Node:
        return Node(
            plan,
            index,
            folder=folder / f"n{index}",
            network=network,
            cluster=self.cluster,
            binaries=self._binaries,
            programs=self._programs,
            cgroup=f"{folder.name}-n{index}",
        )

    def _start_runtimes(self, folder: Path) -> None:
        """Start each node's containerd. The first imports the images; the others get its files by link."""
        for node in self.nodes.values():
            node.make()
        first, *others = self.nodes.values()
        first.start_runtime()
        pause = pause_archive(folder / "pause.tar", cc=self._programs.cc)
        with ThreadPoolExecutor() as pool:
            list(pool.map(first.runtime.load, (pause, *self._images)))
        first.stop_runtime()
        for node in others:
            node.runtime.link_images(first.runtime)
        for node in self.nodes.values():
            node.start_runtime()

    def _hire_janitor(self, folder: Path) -> None:
        self._users = (folder / janitor.USERS).open("a", encoding="utf-8")
        fcntl.flock(self._users, fcntl.LOCK_EX)
        self._logs.mkdir(parents=True, exist_ok=True)
        self._janitor_log = self._logs / "janitor.log"
        command = [sys.executable, "-I", janitor.__file__, str(folder), str(self._logs)]
        self._janitor = Spawned.start(command, log=self._janitor_log, environment=os.environ)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def is_ready(node: Object) -> bool:
    """Whether a Node says that it is."""
    found = condition(node, "Ready")
    return found is not None and found["status"] == "True"

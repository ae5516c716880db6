"""The network of a cluster: a namespace with a bridge, and a namespace for each node.

    this machine ── 10.B.0.1 ─┐
    name server ─── 10.B.0.2 ─┤ bridge, in a namespace of its own
    node i ──── 10.B.0.(10+i) ┘ with pods at 10.B.(10+i).0/24

The machine itself gets one interface, one address and a route for each node; no rule of its firewall is touched, and
nothing is forwarded by it. All goes when the namespaces go. Programs enter a namespace by nsenter: `ip netns exec`
mounts /sys anew, and the cgroups that a kubelet needs would be hidden.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.harness.programs import NodePrograms
from tests.support.kube.debian import run
from tests.support.kube.errors import ProvisionFailed

NAMESPACES = Path("/run/netns")
BRIDGE = "backbone"
POD_BRIDGE = "pods"
CANDIDATES = range(200, 256)
FIRST_NODE = 10


@dataclass(frozen=True, slots=True)
class Addresses:
    """Of one cluster, all in 10.`block`.0.0/16."""

    block: int

    @property
    def machine(self) -> str:
        return f"10.{self.block}.0.1"

    @property
    def name_server(self) -> str:
        return f"10.{self.block}.0.2"

    @property
    def all_pods(self) -> str:
        """A range that holds the pods of all nodes."""
        return f"10.{self.block}.0.0/16"

    def node(self, index: int) -> str:
        return f"10.{self.block}.0.{FIRST_NODE + index}"

    def pods(self, index: int) -> str:
        """Range of a node's pods."""
        return f"10.{self.block}.{FIRST_NODE + index}.0/24"

    def gateway(self, index: int) -> str:
        """A node's own address among its pods."""
        return f"10.{self.block}.{FIRST_NODE + index}.1"


class Network:
    """Made by `start`; taken away by the janitor."""

    def __init__(self, cluster: str, nodes: int, programs: NodePrograms) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._programs = programs
        self.addresses = Addresses(0)

    @property
    def backbone(self) -> str:
        """Namespace of the bridge and of the name server."""
        return f"{self._cluster}-net"

    def namespace(self, index: int) -> str:
        """Of a node."""
        return f"{self._cluster}-n{index}"

    def inside(self, namespace: str, *command: str | Path, more: Sequence[str] = ()) -> list[str]:
        """A command line that runs in a namespace, as a process that nsenter becomes; `more` are options of that."""
        return [str(self._programs.nsenter), f"--net={NAMESPACES / namespace}", *more, "--", *map(str, command)]

    def start(self) -> None:
        self.addresses = Addresses(self._free_block())
        self._make(self.backbone)
        self._ip(self.backbone, "link", "add", BRIDGE, "type", "bridge")
        self._up(self.backbone, BRIDGE, f"{self.addresses.name_server}/24")
        self._plug(None, f"{self._cluster}-m", f"{self.addresses.machine}/24")
        for index in range(self._nodes):
            self._start_node(index)
        for index in range(self._nodes):
            self._route_to_pods_of(index)

    def connect(self, index: int, *, connected: bool) -> None:
        """Plug a node's cable in or out. Out: nobody hears of the node any more, nor that anything has ended."""
        self._ip(self.backbone, "link", "set", f"{self._interface(index)}b", "up" if connected else "down")

    def _interface(self, index: int) -> str:
        return f"{self._cluster}-{index}"

    def _start_node(self, index: int) -> None:
        name = self.namespace(index)
        self._make(name)
        self._plug(name, self._interface(index), f"{self.addresses.node(index)}/24")
        self._ip(name, "route", "add", "default", "via", self.addresses.machine)
        # Made here rather than by the CNI plugin, which would make it with the first pod: routes can name it at once.
        self._ip(name, "link", "add", POD_BRIDGE, "type", "bridge")
        self._up(name, POD_BRIDGE, f"{self.addresses.gateway(index)}/24")
        run(self.inside(name, "sysctl", "-qw", "net.ipv4.ip_forward=1"))

    def _route_to_pods_of(self, index: int) -> None:
        others = [self.namespace(other) for other in range(self._nodes) if other != index]
        route = ("route", "add", self.addresses.pods(index), "via", self.addresses.node(index))
        for namespace in (None, self.backbone, *others):
            self._ip(namespace, *route)

    def _make(self, namespace: str) -> None:
        run([str(self._programs.ip), "netns", "add", namespace])
        self._ip(namespace, "link", "set", "lo", "up")

    def _plug(self, namespace: str | None, interface: str, address: str) -> None:
        """Connect a namespace, or this machine, with the bridge."""
        other = f"{interface}b"
        ends = ["link", "add", interface, "type", "veth", "peer", "name", other, "netns", self.backbone]
        self._ip(namespace, *ends)
        self._ip(self.backbone, "link", "set", other, "master", BRIDGE, "up")
        self._up(namespace, interface, address)

    def _up(self, namespace: str | None, interface: str, address: str) -> None:
        self._ip(namespace, "address", "add", address, "dev", interface)
        self._ip(namespace, "link", "set", interface, "up")

    def _ip(self, namespace: str | None, *arguments: str) -> None:
        command = (str(self._programs.ip), *arguments)
        run(command if namespace is None else self.inside(namespace, *command))

    def _free_block(self) -> int:
        """A second byte of 10.B.0.0/16 that no route of this machine knows."""
        routes = json.loads(run([str(self._programs.ip), "-json", "-4", "route", "show", "table", "all"]) or "[]")
        taken = {str(route.get("dst", "")) for route in routes}
        for block in CANDIDATES:
            if not any(route.startswith(f"10.{block}.") for route in taken):
                return block
        raise ProvisionFailed(f"all of 10.{CANDIDATES.start}.0.0/16 to 10.{CANDIDATES.stop - 1}.0.0/16 are in use")

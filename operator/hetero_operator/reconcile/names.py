"""Names of the objects that a resource owns, and of the containers and ports of its pods: every one is made here.

All are functions of the resource's name and the replica's ordinal, so nothing has to be remembered. Two resources can
want the same name (`a` with a pool `b-c`, `a-b` with a pool `c`); the second one is refused, and takes nothing over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hetero_api.contract import ADMIN_PORT, HTTP_PORT, INFERENCE_PORT, METRICS_PORT, RANKS_PORT, ROUTER_PORT
from hetero_api.spec import HeteroInferenceSpec
from hetero_operator.reconcile.model import Observed

RANK_CONTAINER: Final = "rank"
GATEWAY_CONTAINER: Final = "gateway"
MODEL_CONTAINER: Final = "model"
"""The init container that fetches the model."""

GATEWAY_PORTS: Final = {
    "inference": INFERENCE_PORT,
    "http": HTTP_PORT,
    "admin": ADMIN_PORT,
    "ranks": RANKS_PORT,
    "metrics": METRICS_PORT,
}
"""Ports of the gateway's container by name, which it always has."""
RANK_PORT: Final = "health"
"""Name of a rank container's port for probes and metrics; containers that share a pod number theirs."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the objects of one replica of the resource `resource`."""

    resource: str
    """Also the name of the Service that clients dial, of the PodMonitor and of the InferencePool."""
    ordinal: int = 0
    """The replica; names of replica 0 are those that a lone group has."""

    @classmethod
    def of(cls, observed: Observed) -> Names:
        """Return the names of an observed replica."""
        return cls(observed.resource["metadata"]["name"], observed.ordinal)

    @property
    def group(self) -> str:
        """The replica's group, with which its names begin; also Volcano's PodGroup."""
        return f"{self.resource}-{self.ordinal}" if self.ordinal else self.resource

    @property
    def gateway(self) -> str:
        """The gateway's Deployment, and its headless Service for ranks and operator."""
        return f"{self.group}-gateway"

    @property
    def ranks(self) -> str:
        """The ranks' headless Service, and the replica's PodDisruptionBudget."""
        return f"{self.group}-ranks"

    @property
    def rank_account(self) -> str:
        """The ServiceAccount of the ranks of all replicas."""
        return f"{self.resource}-rank"

    @property
    def gateway_account(self) -> str:
        """The ServiceAccount of the gateways of all replicas, and their NetworkPolicy."""
        return f"{self.resource}-gateway"

    @property
    def rank_policy(self) -> str:
        """The NetworkPolicy of the ranks of all replicas."""
        return f"{self.resource}-ranks"

    @property
    def router(self) -> str:
        """The router's Deployment, Service, ServiceAccount, Role, RoleBinding and NetworkPolicy."""
        return f"{self.resource}-router"

    @property
    def engines(self) -> str:
        """The headless Service of the gateways' ports for the router."""
        return f"{self.resource}-engines"

    @property
    def responder(self) -> str:
        """The responder's Deployment, ServiceAccount and NetworkPolicy; it stands for all replicas."""
        return f"{self.resource}-responder"

    def rank_set(self, name: str) -> str:
        """Return the name of the StatefulSet of a set of rank pods."""
        return f"{self.group}-{name}"

    def claim_template(self, pool: str, revision: str) -> str:
        """Return the name of a pool's ResourceClaimTemplate: one a revision, because it can never be changed."""
        return f"{self.group}-{pool}-{revision}"

    def group_secret(self, revision: str) -> str:
        """Return the name of the Secret with the tokens of one revision's group."""
        return f"{self.group}-group-{revision}"

    def inside_secret(self, revision: str) -> str:
        """Return the name of the Secret with the certificates of one revision's group."""
        return f"{self.group}-inside-{revision}"

    def config(self, gateway_revision: str) -> str:
        """Return the name of the ConfigMap of one gateway revision."""
        return f"{self.group}-{gateway_revision}"

    def queued_group(self, revision: str) -> str:
        """Return the name of Kueue's pod group: one a revision, because its size may change."""
        return f"{self.group}-{revision}"

    def gateway_host(self, namespace: str, cluster_domain: str) -> str:
        """Return the DNS name that ranks dial."""
        return f"{self.gateway}.{namespace}.svc.{cluster_domain}"

    def engines_host(self, namespace: str, cluster_domain: str) -> str:
        """Return the DNS name of all ready gateways, which the router dials first."""
        return f"{self.engines}.{namespace}.svc.{cluster_domain}"


def gateway_ports(spec: HeteroInferenceSpec) -> Mapping[str, int]:
    """Return the ports of the gateway's container by name; a router has one of its own."""
    return GATEWAY_PORTS | ({"router": ROUTER_PORT} if spec.has_router else {})

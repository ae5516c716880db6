"""Names of the objects that a resource owns, and of the parts of its pods: every name is made here.

All are functions of the resource's name, so nothing has to be remembered. Two resources can want the same name (`a`
with a pool `b-c`, `a-b` with a pool `c`); the second one is refused, and takes nothing over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RANK_CONTAINER: Final = "rank"
GATEWAY_CONTAINER: Final = "gateway"
MODEL_CONTAINER: Final = "model"
"""The init container that fetches the model."""

# Volumes of different sources have different names; why: manifests/model_volumes.py.
MODEL_VOLUME: Final = "model"
MODEL_CLAIM_VOLUME: Final = "model-claim"
MODEL_IMAGE_VOLUME: Final = "model-image"
MODEL_FOLDER_VOLUME: Final = "model-folder"
CACHE_VOLUME: Final = "model-cache"
CACHE_CLAIM_VOLUME: Final = "model-cache-claim"
CACHE_FOLDER_VOLUME: Final = "model-cache-folder"
MODEL_VOLUMES: Final = frozenset(
    {
        MODEL_VOLUME, MODEL_CLAIM_VOLUME, MODEL_IMAGE_VOLUME, MODEL_FOLDER_VOLUME,
        CACHE_VOLUME, CACHE_CLAIM_VOLUME, CACHE_FOLDER_VOLUME,
    }
)  # fmt: skip
"""Every volume that a model or its cache may be in."""

HEALTH_PORT_NAME: Final = "health"
INFERENCE_PORT_NAME: Final = "inference"
HTTP_PORT_NAME: Final = "http"
ADMIN_PORT_NAME: Final = "admin"
RANKS_PORT_NAME: Final = "ranks"
METRICS_PORT_NAME: Final = "metrics"


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the objects of the resource `resource`."""

    resource: str

    @property
    def client_service(self) -> str:
        """The Service that clients dial."""
        return self.resource

    @property
    def gateway(self) -> str:
        """The gateway's Deployment, ServiceAccount, NetworkPolicy, and its headless Service for ranks and operator."""
        return f"{self.resource}-gateway"

    @property
    def ranks(self) -> str:
        """The ranks' headless Service, NetworkPolicy and PodDisruptionBudget."""
        return f"{self.resource}-ranks"

    @property
    def rank_account(self) -> str:
        """The ranks' ServiceAccount."""
        return f"{self.resource}-rank"

    @property
    def pod_monitor(self) -> str:
        """The PodMonitor."""
        return self.resource

    @property
    def pod_group(self) -> str:
        """Volcano's PodGroup."""
        return self.resource

    def pool(self, pool: str) -> str:
        """Return the name of a pool's StatefulSet."""
        return f"{self.resource}-{pool}"

    def claim_template(self, pool: str, revision: str) -> str:
        """Return the name of a pool's ResourceClaimTemplate: one a revision, because it can never be changed."""
        return f"{self.resource}-{pool}-{revision}"

    def group_secret(self, revision: str) -> str:
        """Return the name of the Secret with the tokens of one revision's group."""
        return f"{self.resource}-group-{revision}"

    def config(self, gateway_revision: str) -> str:
        """Return the name of the ConfigMap of one gateway revision."""
        return f"{self.resource}-{gateway_revision}"

    def queued_group(self, revision: str) -> str:
        """Return the name of Kueue's pod group: one a revision, because its size may change."""
        return f"{self.resource}-{revision}"

    def gateway_host(self, namespace: str, cluster_domain: str) -> str:
        """Return the DNS name that ranks dial."""
        return f"{self.gateway}.{namespace}.svc.{cluster_domain}"

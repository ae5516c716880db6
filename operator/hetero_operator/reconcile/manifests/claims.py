"""ResourceClaimTemplates: cores through Dynamic Resource Allocation instead of the kubelet's CPU manager.

Source: the API `resource.k8s.io/v1`, and kubernetes-sigs/dra-driver-cpu in its default mode, where a device is a
NUMA node and its cores are capacity: a request for n cores is served by one node. A claim must not be shared between
containers, so only the rank's container names it; the cores are asked for in its plain requests too, because the
scheduler would count them twice else. A template can never be changed: there is one for each revision, and one that
is there is kept as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hetero_api.contract import LABEL_POOL, LABEL_REVISION, ROLE_RANK
from hetero_api.spec import PoolSpec
from hetero_operator.reconcile.manifests.rendering import Rendering, manifest
from hetero_operator.reconcile.model import Object

RESOURCE_CLAIM_TEMPLATE: Final = ("resource.k8s.io/v1", "ResourceClaimTemplate")
CLAIM_NAME: Final = "cores"
"""Name of the claim within a pod."""
_CORES_CAPACITY: Final = "dra.cpu/cpu"
"""The driver's name for the number of cores of a device."""


def claim_templates(rendering: Rendering, stored: Mapping[str, Object]) -> list[dict[str, Any]]:
    """A template for each pool that takes its cores by a claim; `stored` are those that are there, by name."""
    return [_template(rendering, pool, stored) for pool in rendering.spec.pools if device_class(pool)]


def device_class(pool: PoolSpec) -> str:
    """DeviceClass that a pool's cores are claimed from; "" when they are not claimed."""
    claim = pool.cpu_or_default.numa.claim if pool.cpu else None
    return claim.device_class_name if claim else ""


def _template(rendering: Rendering, pool: PoolSpec, stored: Mapping[str, Object]) -> dict[str, Any]:
    revision = rendering.revisions.ranks
    name = rendering.names.claim_template(pool.name, revision)
    requests = [_request(pool, local_rank) for local_rank in range(pool.ranks_per_pod)]
    spec = stored[name]["spec"] if name in stored else {"spec": {"devices": {"requests": requests}}}
    labels = {LABEL_POOL: pool.name, LABEL_REVISION: revision}
    return manifest(rendering, RESOURCE_CLAIM_TEMPLATE, name, component=ROLE_RANK, labels=labels, spec=spec)


def _request(pool: PoolSpec, local_rank: int) -> dict[str, Any]:
    """The cores of one rank, all of one NUMA node."""
    return {
        "name": f"rank-{local_rank}",
        "exactly": {
            "deviceClassName": device_class(pool),
            "allocationMode": "ExactCount",
            "count": 1,
            "capacity": {"requests": {_CORES_CAPACITY: str(pool.cpu_or_default.cores_per_rank)}},
        },
    }

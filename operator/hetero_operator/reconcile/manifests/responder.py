"""The responder: a small pod that answers callers while no replica runs (spec.idle.responder).

It comes when a resource is scaled to zero, and goes when the first replica serves, and the router where there is one;
meanwhile the Services that clients dial select it in place of gateways and router. So callers hear when to try again
also while these start. Its pod has no LABEL_NAME: it belongs to no replica, and nothing that counts or waits for pods
sees it.

It has an account without rights, no token, and no way out of its pod, and the image of the gateway. An upgrade of the
operator leaves one that runs as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

from hetero_api.contract import ANNOTATION_RENDER, COMPONENT_RESPONDER, LABEL_ROLE, ROLE_GATEWAY
from hetero_operator.reconcile.exposure import Clients
from hetero_operator.reconcile.inventory import DEPLOYMENT, Inventory, is_leaving, label_of
from hetero_operator.reconcile.manifests.containers import container, container_ports, door_scheduling, pod_template
from hetero_operator.reconcile.manifests.gateway import door_arguments, door_certificates
from hetero_operator.reconcile.manifests.network import responder_policy
from hetero_operator.reconcile.manifests.rendering import Rendering, manifest, responder_selector
from hetero_operator.reconcile.model import Object
from hetero_operator.reconcile.names import GATEWAY_PORTS
from hetero_operator.reconcile.status.pods import is_ready

_KIND: Final = ("apps/v1", "Deployment")
_ACCOUNT: Final = ("v1", "ServiceAccount")
_CONTAINER: Final = "responder"
_DOORS: Final = {name: GATEWAY_PORTS[name] for name in ("inference", "http")}
_REQUESTS: Final = {"cpu": "50m", "memory": "128Mi"}
_LIMITS: Final = {**_REQUESTS, "cpu": "500m"}
"""It starts in half a second of a core's time: callers would wait ten for that at 50m."""
_GRACE_S: Final = 5


def responds(rendering: Rendering, inventory: Inventory, pods: Collection[Object]) -> bool:
    """Return whether callers are the responder's: nothing is asked to run, or nothing serves since. `pods`: of all."""
    if not _is_wanted(rendering):
        return False
    is_there = inventory.named(DEPLOYMENT, rendering.names.responder, group="apps") is not None
    return rendering.spec.replicas == 0 or (is_there and not any(map(_is_gateway_in_service, pods)))


def responds_for_router(rendering: Rendering, inventory: Inventory, *, responds: bool) -> bool:
    """Return whether the router's callers are the responder's: as a gateway's, and until a pod of the router is ready.

    `responds` is so for gateways.
    """
    if not rendering.spec.has_router or not _is_wanted(rendering):
        return False
    responder, router = (
        inventory.named(DEPLOYMENT, name, group="apps") for name in (rendering.names.responder, rendering.names.router)
    )
    takes_calls = router is not None and (router.get("status") or {}).get("readyReplicas", 0) > 0
    return responds or (responder is not None and not takes_calls)


def _is_wanted(rendering: Rendering) -> bool:
    return rendering.spec.idle.responder.enabled and not rendering.spec.suspend


def _is_gateway_in_service(pod: Object) -> bool:
    return label_of(pod, LABEL_ROLE) == ROLE_GATEWAY and is_ready(pod) and not is_leaving(pod)


def responder_objects(rendering: Rendering, inventory: Inventory, clients: Clients) -> list[dict[str, Any]]:
    """Return account, NetworkPolicy and Deployment."""
    names = rendering.names
    live = inventory.named(DEPLOYMENT, names.responder, group="apps")
    return [
        manifest(
            rendering, _ACCOUNT, names.responder, component=COMPONENT_RESPONDER, automountServiceAccountToken=False
        ),
        *responder_policy(rendering, clients=clients),
        _deployment(rendering if live is None else _as_rendered(rendering, live)),
    ]


def _as_rendered(rendering: Rendering, live: Object) -> Rendering:
    """Return the rendering with the options that a Deployment which is there was rendered with."""
    template, options = live["spec"]["template"], rendering.options
    annotations = template["metadata"].get("annotations") or {}
    options = replace(
        options,
        gateway_image=template["spec"]["containers"][0]["image"],
        operator_version=annotations.get(ANNOTATION_RENDER, options.operator_version),
        run_as_user=template["spec"]["securityContext"].get("runAsUser", 0),
    )
    return replace(rendering, options=options)


def _deployment(rendering: Rendering) -> dict[str, Any]:
    names, gateway = rendering.names, rendering.spec.gateway
    selector = responder_selector(rendering)
    files = door_certificates(gateway)
    template = pod_template(
        rendering,
        files,
        labels={**selector, "app.kubernetes.io/component": COMPONENT_RESPONDER},
        annotations={},
        account=names.responder,
        grace_period_s=_GRACE_S,
        scheduling=door_scheduling(rendering.spec),
        containers=[
            container(
                rendering, _CONTAINER, rendering.spec.images.gateway or rendering.options.gateway_image,
                resources={"requests": _REQUESTS, "limits": _LIMITS},
                command=["python", "-m", "hetero_gateway", "respond"],
                args=_arguments(rendering),
                mounts=[mount for item in files for mount in item.mounts],
                ports=container_ports(_DOORS),
                readinessProbe=_probe(period_s=2),
                livenessProbe=_probe(period_s=10),
            )
        ],
    )  # fmt: skip
    spec = {"replicas": 1, "revisionHistoryLimit": 0, "selector": {"matchLabels": selector}, "template": template}
    return manifest(rendering, _KIND, names.responder, component=COMPONENT_RESPONDER, spec=spec)


def _probe(*, period_s: int) -> dict[str, Any]:
    return {"tcpSocket": {"port": "http"}, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": 3}


def _arguments(rendering: Rendering) -> list[str]:
    listen = [text for name, port in _DOORS.items() for text in (f"--{name}-port", str(port))]
    after_s = str(rendering.spec.idle.responder.retry_after_seconds)
    host = rendering.options.any_address
    return ["--host", host, *listen, "--retry-after-s", after_s, *door_arguments(rendering.spec.gateway)]

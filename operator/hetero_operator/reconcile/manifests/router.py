"""The router: Shepherd Model Gateway in front of all replicas (spec.router), with an account of its own.

It finds gateways by watching the API server for their pods, so a replica that comes or goes restarts nothing. That is
all that its account may do: list and watch pods of its namespace. No other pod of a resource has a right there. It
dials a port of gateways that has neither TLS nor keys, and that a NetworkPolicy opens to it alone.

Its pods know nothing of one another. Each learns from the gateways what they have cached, so any of them sends a prompt
to the same replica. A pod that goes takes calls for five seconds more, until no Service sends it any: SMG does so.

Its pod has no LABEL_NAME: it belongs to no replica, and nothing that counts or waits for pods sees it. Callers are the
responder's where they are for gateways: while no replica serves.

It is rendered with the options that the pods of replica 0 were rendered with: an upgrade of the operator leaves it as
it is, and a new revision of the ranks brings a new image.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from hetero_api.contract import (
    COMPONENT_ROUTER,
    HTTP_PORT,
    METRICS_PORT,
    POD_ROUTER_KEYS_FILE,
    POD_TLS_DIR,
    ROLE_GATEWAY,
    ROUTER_PORT,
    TLS_CERTIFICATE,
    TLS_KEY,
)
from hetero_operator.reconcile.exposure import Clients
from hetero_operator.reconcile.manifests.containers import (
    TMP_DIR,
    MountedFiles,
    container,
    container_ports,
    gateway_resources,
    pod_template,
    router_scheduling,
    secret_file,
    secret_folder,
    tmp_files,
)
from hetero_operator.reconcile.manifests.network import router_policy, router_services
from hetero_operator.reconcile.manifests.optional_kinds import router_budgets
from hetero_operator.reconcile.manifests.rendering import Rendering, manifest, role_selector, router_selector
from hetero_operator.reconcile.model import RenderOptions

_KIND: Final = ("apps/v1", "Deployment")
_ACCOUNT: Final = ("v1", "ServiceAccount")
_RBAC: Final = "rbac.authorization.k8s.io"
_ROLE: Final = (f"{_RBAC}/v1", "Role")
_BINDING: Final = (f"{_RBAC}/v1", "RoleBinding")
_PORTS: Final = {"http": HTTP_PORT, "metrics": METRICS_PORT}
_GRACE_AFTER_DRAIN_S: Final = 15
_STARTUP_PERIOD_S: Final = 1
_RULES: Final = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]


def router_objects(
    rendering: Rendering, options: RenderOptions, clients: Clients, *, responds: bool
) -> list[dict[str, Any]]:
    """Return account, rights, NetworkPolicy, Services, budget and Deployment; none where no router is asked for.

    `options` are those that the pods of replica 0 were rendered with.
    """
    if not rendering.spec.has_router:
        return []
    return [
        manifest(
            rendering, _ACCOUNT, rendering.names.router, component=COMPONENT_ROUTER, automountServiceAccountToken=False
        ),
        *_rights(rendering),
        router_policy(rendering, clients=clients),
        *router_services(rendering, responds=responds),
        *router_budgets(rendering),
        _deployment(replace(rendering, options=options)),
    ]


def _rights(rendering: Rendering) -> list[dict[str, Any]]:
    name = rendering.names.router
    subject = {"kind": "ServiceAccount", "name": name, "namespace": rendering.namespace}
    role = {"apiGroup": _RBAC, "kind": _ROLE[1], "name": name}
    return [
        manifest(rendering, _ROLE, name, component=COMPONENT_ROUTER, rules=_RULES),
        manifest(rendering, _BINDING, name, component=COMPONENT_ROUTER, roleRef=role, subjects=[subject]),
    ]


def _deployment(rendering: Rendering) -> dict[str, Any]:
    spec, names = rendering.spec, rendering.names
    selector = router_selector(rendering)
    files = [
        secret_file("keys", spec.router.keys_secret_ref, POD_ROUTER_KEYS_FILE),
        secret_folder("tls", spec.router.tls_secret_name, (TLS_CERTIFICATE, TLS_KEY), POD_TLS_DIR),
        tmp_files(),
    ]
    template = pod_template(
        rendering,
        files,
        labels={**selector, "app.kubernetes.io/component": COMPONENT_ROUTER},
        annotations={},
        account=names.router,
        grace_period_s=spec.gateway.drain_timeout_seconds + _GRACE_AFTER_DRAIN_S,
        scheduling=router_scheduling(rendering),
        containers=[_container(rendering, files)],
        automountServiceAccountToken=True,
    )
    body = {
        "replicas": spec.router.replicas if spec.runs else 0,
        # The next one takes calls before the last one goes.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "revisionHistoryLimit": 0,
        "progressDeadlineSeconds": _patience_s(rendering),
        "selector": {"matchLabels": selector},
        "template": template,
    }
    return manifest(rendering, _KIND, names.router, component=COMPONENT_ROUTER, spec=body)


def _container(rendering: Rendering, files: list[MountedFiles]) -> dict[str, Any]:
    spec = rendering.spec
    return container(
        rendering, COMPONENT_ROUTER, spec.images.router or rendering.options.router_image,
        resources=gateway_resources(spec.router.resources),
        command=["python", "-m", "hetero_gateway", "route"],
        args=_arguments(rendering),
        env={"HOME": TMP_DIR},
        mounts=[mount for item in files for mount in item.mounts],
        ports=container_ports(_PORTS),
        **_probes(rendering),
    )  # fmt: skip


def _arguments(rendering: Rendering) -> list[str]:
    spec, namespace = rendering.spec, rendering.namespace
    engines = rendering.names.engines_host(namespace, rendering.options.cluster_domain)
    labels = ",".join(f"{key}={value}" for key, value in role_selector(rendering, ROLE_GATEWAY).items())
    files = {
        "--keys": POD_ROUTER_KEYS_FILE if spec.router.keys_secret_ref is not None else None,
        "--tls-dir": POD_TLS_DIR if spec.router.tls_secret_name is not None else None,
    }
    return [
        "--host", rendering.options.any_address, "--port", str(HTTP_PORT), "--metrics-port", str(METRICS_PORT),
        "--gateway", f"{engines}:{ROUTER_PORT}", "--pods", f"{namespace}/{labels}",
        "--policy", spec.router.policy.value, "--drain-s", str(spec.gateway.drain_timeout_seconds),
        *(text for option, path in files.items() if path is not None for text in (option, path)),
    ]  # fmt: skip


def _probes(rendering: Rendering) -> dict[str, Any]:
    """Return the probes: it listens once a gateway has answered it, and is ready while it knows one."""
    startup = math.ceil(_patience_s(rendering) / _STARTUP_PERIOD_S)
    return {
        "startupProbe": _probe(rendering, "/liveness", period_s=_STARTUP_PERIOD_S, failures=startup),
        "livenessProbe": _probe(rendering, "/liveness", period_s=10, failures=3),
        "readinessProbe": _probe(rendering, "/readiness", period_s=1, failures=3),
    }


def _patience_s(rendering: Rendering) -> int:
    """Return how long ranks may take to load and meet; the router waits for them."""
    recovery = rendering.spec.recovery
    return recovery.startup_timeout_seconds + recovery.rendezvous_timeout_seconds


def _probe(rendering: Rendering, path: str, *, period_s: int, failures: int) -> dict[str, Any]:
    scheme = "HTTP" if rendering.spec.router.tls_secret_name is None else "HTTPS"
    return {
        "httpGet": {"path": path, "port": "http", "scheme": scheme},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }

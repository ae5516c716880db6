"""kopf: the handler, and the settings that make kopf fit for production.

kopf watches the HeteroInference resources and nothing else, and it writes nothing: `on.event` needs neither finalizers
nor annotations, its Events and its peering are off. What it hears goes to `deliver`; what is done about it is not its
business. So it may run whether this process leads or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import kopf
from kubernetes.aio.client import Configuration

from hetero_api.contract import API_VERSION, GROUP, PLURAL
from hetero_operator.backoff import Backoff
from hetero_operator.cluster.fence import REQUEST_TIMEOUT_S
from hetero_operator.cluster.transport import CONNECT_TIMEOUT_S, WATCH_SERVER_TIMEOUT_S, authorization_of

WORKER_LIMIT: Final = 100
IDLE_S: Final = 0.05
"""A worker of kopf keeps its place for so long after its object's last event: 100 of them pass on 2,000 a second."""
CLIENT_GRACE_S: Final = 30.0

Deliver = Callable[[str | None, dict[str, Any]], None]
"""Told the event's type (None: from a list) and the resource."""


def registry_of(deliver: Deliver, configuration: Configuration) -> kopf.OperatorRegistry:
    """Handlers: one for events, one for the way to the API server."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        return await connection_of(configuration)

    @kopf.on.event(GROUP, API_VERSION, PLURAL, registry=registry)
    async def heard(event: kopf.RawEvent, **_: Any) -> None:
        deliver(event["type"], dict(event["object"]))

    return registry


async def connection_of(configuration: Configuration) -> kopf.ConnectionInfo:
    """The same way to the API server that our own calls take."""
    scheme, _, token = (await authorization_of(configuration)).partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
    )


def settings_of() -> kopf.OperatorSettings:
    """Settings, a reason each."""
    settings = kopf.OperatorSettings()
    # The default list of pauses ends after 54 s, and a watch that used it up is dead for good while the process lives.
    settings.networking.error_backoffs = Backoff()
    settings.networking.request_timeout = REQUEST_TIMEOUT_S
    settings.networking.connect_timeout = CONNECT_TIMEOUT_S
    settings.watching.server_timeout = WATCH_SERVER_TIMEOUT_S
    settings.watching.client_timeout = WATCH_SERVER_TIMEOUT_S + CLIENT_GRACE_S
    settings.watching.connect_timeout = CONNECT_TIMEOUT_S
    settings.watching.chunk_size = 500
    settings.queueing.worker_limit = WORKER_LIMIT
    settings.queueing.idle_timeout = IDLE_S
    # Peering is no election; the Lease is. Without this, kopf would look for peers and stop for those it sees.
    settings.peering.standalone = True
    settings.posting.enabled = False
    # No right to see definitions or namespaces is needed. Whether ours is served is our own question (kopf_session).
    settings.scanning.disabled = True
    # Nothing is stored; if anything ever is, then under our own name from the first release on.
    settings.persistence.finalizer = f"{GROUP}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    # Its last resort would be to kill the thread, hence the process, ten minutes after a stop.
    settings.process.ultimate_exiting_timeout = None
    return settings

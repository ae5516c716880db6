"""kopf's watch of the HeteroInference resources: its handlers, its settings, and its supervision.

kopf lists and watches the resources, keeps the watch alive through outages, and calls `deliver` for each event. It
writes nothing: `on.event` needs neither finalizers nor annotations, and its Events and its peering are off. So it runs
whether this process leads or not. Owned kinds are watched by `cluster.reflector`; test_kopf_limits.py shows why.

kopf runs in a thread and an event loop of its own, because when it ends it cancels every task of its loop that it did
not find there at its beginning, and because it takes over the signals of a main thread. It knows a kind only if it is
there when it starts, and ends when the kind goes. So it is started once HeteroInference is served, and again after the
definition was deleted and created. Any other end means that a watch has died, which kopf never repairs: the process
ends then, and is restarted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

import kopf
from kubernetes.aio.client import Configuration

from hetero_api.contract import API_VERSION, GROUP, PLURAL
from hetero_operator.cluster.cache import has_kind
from hetero_operator.cluster.fence import REQUEST_TIMEOUT_S
from hetero_operator.cluster.kinds import RESOURCE
from hetero_operator.cluster.transport import CONNECT_TIMEOUT_S, WATCH_SERVER_TIMEOUT_S, Transport, authorization_of
from hetero_operator.errors import ApiError, KopfStopped, NotFound
from hetero_operator.timing import Backoff

logger = logging.getLogger(__name__)

PROBE_S: Final = 3.0
STOP_S: Final = 5.0
WORKER_LIMIT: Final = 100
IDLE_S: Final = 0.05
"""A worker of kopf keeps its place for so long after its object's last event: 100 of them pass on 2,000 a second."""
CLIENT_GRACE_S: Final = 30.0
PAGE_SIZE: Final = 100
"""Objects of a page: kopf holds a whole page, and does not adapt its size to the objects."""
IDENTITY: Final = "heteroinference-operator"
"""For peering, which is off. kopf would make one up of the user's name, and a container's user mostly has none."""

Deliver = Callable[[str | None, dict[str, Any]], None]
"""Receives an event's type (None: from a list) and the resource."""


class KopfWatch:
    """Watch of the resources by kopf, whenever HeteroInference is served."""

    def __init__(
        self, api: Transport, *, namespaces: Sequence[str], deliver: Deliver, on_gap: Callable[[], None]
    ) -> None:
        """`on_gap` is called when kopf starts and when it ends: changes around that time have to be listed."""
        self.watching = False
        self._api = api
        self._namespaces = namespaces
        self._deliver = deliver
        self._on_gap = on_gap

    async def run(self) -> None:
        """Watch until cancelled. Raises KopfStopped when kopf ends for any reason but two.

        The exceptions: the kind, or the version that it watched from, is gone (it expects the latter only as an event
        within the stream, not as an answer); a namespace refuses, as one that is gone does. Then it watches the others
        until that is back.
        """
        while True:
            served = await self._until_served(self._namespaces)
            error = await self._watch(served)
            self._set(False)
            status = getattr(error, "status", None)
            is_refusal = status == HTTPStatus.FORBIDDEN and bool(served)
            if error is not None and not is_refusal and status not in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
                raise KopfStopped(f"kopf has ended: {error!r}") from error
            logger.warning("kopf starts again, once HeteroInference is served: %s", error or "a namespace is back")
            await asyncio.sleep(PROBE_S if is_refusal else 0.0)

    async def _watch(self, served: Sequence[str]) -> BaseException | None:
        """Watch in namespaces until kopf ends, and return the reason; None: one of the others is back."""
        others = [namespace for namespace in self._namespaces if namespace not in served]
        watch = asyncio.create_task(run_kopf(self._registry(), settings_of(), namespaces=served))
        tasks = [watch, *([asyncio.create_task(self._until_served(others))] if others else ())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return (watch.result() or KopfStopped("without a reason")) if watch.done() else None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _registry(self) -> kopf.OperatorRegistry:
        """Return handlers that act in this loop."""
        loop = asyncio.get_running_loop()

        def deliver(change: str | None, item: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(self._deliver, change, item)

        def tell(watching: bool) -> None:
            loop.call_soon_threadsafe(self._set, watching)

        return registry_of(self._api.configuration, deliver=deliver, on_watching=tell)

    def _set(self, watching: bool) -> None:
        if self.watching is not watching:
            self.watching = watching
            self._on_gap()

    async def _until_served(self, namespaces: Sequence[str]) -> list[str]:
        """Return those of the namespaces in which it is served, once there are any; of none (all): none."""
        backoff, failures = Backoff(), 0
        while True:
            served: list[str | None] = []
            problems = 0
            for namespace in namespaces or (None,):
                try:
                    if await resource_served(self._api, namespace):
                        served.append(namespace)
                except ApiError as error:
                    problems += 1
                    logger.debug("not known whether HeteroInference is served: %s", error)
            if served:
                return [namespace for namespace in served if namespace is not None]
            failures = failures + 1 if problems else 0
            await asyncio.sleep(backoff.pause_s(failures) if failures else PROBE_S)


async def run_kopf(
    registry: kopf.OperatorRegistry, settings: kopf.OperatorSettings, *, namespaces: Sequence[str]
) -> BaseException | None:
    """Run kopf in a thread until it ends, and return the reason. Stop it when this is cancelled.

    `namespaces` are those to watch; none: all.
    """
    inner, stop = asyncio.new_event_loop(), asyncio.Event()
    ended: Future[BaseException | None] = Future()

    def live() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: inner) as runner:
                runner.run(
                    kopf.operator(
                        registry=registry, settings=settings, clusterwide=not namespaces, namespaces=list(namespaces),
                        standalone=True, identity=IDENTITY,  # type: ignore[arg-type]  # kopf hides the type's name
                        stop_flag=stop,
                    )
                )  # fmt: skip
        except BaseException as error:  # noqa: BLE001 the top of a thread
            ended.set_result(error)
        else:
            ended.set_result(None)

    threading.Thread(target=live, name="kopf", daemon=True).start()
    ending = asyncio.wrap_future(ended)
    try:
        return await asyncio.shield(ending)
    finally:
        with suppress(RuntimeError):  # kopf has ended, and its loop is closed
            inner.call_soon_threadsafe(stop.set)
        await asyncio.wait([ending], timeout=STOP_S)


def registry_of(
    configuration: Configuration, *, deliver: Deliver, on_watching: Callable[[bool], None]
) -> kopf.OperatorRegistry:
    """Return kopf's handlers. They run in kopf's thread; `on_watching` gets True at its start and False at its end."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        on_watching(True)

    @kopf.on.cleanup(registry=registry)
    async def clean_up(**_: Any) -> None:
        on_watching(False)

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        return await connection_of(configuration)

    @kopf.on.event(GROUP, API_VERSION, PLURAL, registry=registry)
    async def hear(event: kopf.RawEvent, **_: Any) -> None:
        deliver(event["type"], dict(event["object"]))

    return registry


async def connection_of(configuration: Configuration) -> kopf.ConnectionInfo:
    """Return the way to the API server that our own calls take."""
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
    """Return kopf's settings, each with its reason."""
    settings = kopf.OperatorSettings()
    # The default list of pauses ends after 54 s, and a watch that used it up is dead for good while the process lives.
    settings.networking.error_backoffs = Backoff()
    settings.networking.request_timeout = REQUEST_TIMEOUT_S
    settings.networking.connect_timeout = CONNECT_TIMEOUT_S
    settings.watching.server_timeout = WATCH_SERVER_TIMEOUT_S
    settings.watching.client_timeout = WATCH_SERVER_TIMEOUT_S + CLIENT_GRACE_S
    settings.watching.connect_timeout = CONNECT_TIMEOUT_S
    settings.watching.chunk_size = PAGE_SIZE
    settings.queueing.worker_limit = WORKER_LIMIT
    settings.queueing.idle_timeout = IDLE_S
    # Peering is no election; the Lease is. Without this, kopf would look for peers and stop for those it sees.
    settings.peering.standalone = True
    settings.posting.enabled = False
    # No right to see definitions or namespaces is needed: KopfWatch asks itself whether ours is served.
    settings.scanning.disabled = True
    # Nothing is stored; if anything ever is, then under our own name from the first release on.
    settings.persistence.finalizer = f"{GROUP}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    # Its last resort would be to kill the thread, hence the process, ten minutes after a stop.
    settings.process.ultimate_exiting_timeout = None
    return settings


async def resource_served(api: Transport, namespace: str | None) -> bool:
    """Return whether HeteroInference can be listed and is in the discovery documents that kopf reads.

    Those lag behind the listing for a moment after the definition was created. Raises ApiError.
    """
    group, _, version = RESOURCE.api_version.partition("/")
    try:
        groups = (await api.get("/apis"))["groups"]
        versions = [one["version"] for found in groups if found["name"] == group for one in found["versions"]]
        if version not in versions or not has_kind(await api.get(RESOURCE.root), RESOURCE):
            return False
        async for _ in api.pages(RESOURCE.path(namespace), size=1, at_most=1):
            pass  # it can be listed
    except NotFound:
        return False
    return True

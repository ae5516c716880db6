"""What kopf does not do, each shown with kopf itself: the reasons why owned kinds, queue and clock are ours.

Should one of these tests fail after an upgrade of kopf, that part of ours may be given to kopf. (ARCHITECTURE.md, "What
kopf does here, and why not more".)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import kopf
import pytest

from hetero_api.contract import API_VERSION, GROUP, KIND, LABEL_NAME, PLURAL
from hetero_operator.cluster.kinds import RESOURCE
from hetero_operator.kopf_watch import KopfWatch, connection_of, run_kopf, settings_of
from tests.support.api_stand_in import ApiStandIn, Fault, refusal
from tests.support.kube.ports import free_port
from tests.unit.operator.test_reflector import eventually

TIMEOUT_S = 20.0
RESOURCES = RESOURCE.path("ns")
MAPS = "/api/v1/namespaces/ns/configmaps"
LABELLED = {"metadata": {"labels": {LABEL_NAME: "x"}}}
MEBIBYTE = 2**20


def kind(name: str, kind: str) -> dict[str, Any]:
    verbs = ["get", "list", "watch", "patch"]
    return {"name": name, "singularName": kind.lower(), "kind": kind, "namespaced": True, "verbs": verbs}


@pytest.fixture
async def server() -> AsyncIterator[ApiStandIn]:
    """With the discovery documents that kopf reads."""
    async with ApiStandIn() as server:
        ours, maps = kind(PLURAL, KIND), kind("configmaps", "ConfigMap")
        namespaces = {**kind("namespaces", "Namespace"), "namespaced": False}
        version = {"groupVersion": f"{GROUP}/{API_VERSION}", "version": API_VERSION}
        server.objects |= {
            "/api": {"versions": ["v1"]},
            "/api/v1": {"groupVersion": "v1", "resources": [maps, namespaces]},
            "/apis": {"groups": [{"name": GROUP, "versions": [version], "preferredVersion": version}]},
            RESOURCE.root: {"groupVersion": f"{GROUP}/{API_VERSION}", "resources": [ours]},
        }
        yield server


def registry_for(server: ApiStandIn) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        async with server.transport() as api:
            return await connection_of(api.configuration)

    return registry


@asynccontextmanager
async def running(registry: kopf.OperatorRegistry, **queueing: Any) -> AsyncIterator[asyncio.Task[Any]]:
    settings = settings_of()
    for name, value in queueing.items():
        setattr(settings.queueing, name, value)
    session = asyncio.create_task(run_kopf(registry, settings, namespaces=["ns"]))
    try:
        yield session
    finally:
        session.cancel()
        await asyncio.wait([session])


async def wait_for(holds: Callable[[], bool]) -> None:
    await eventually(holds, timeout_s=TIMEOUT_S)


async def test_deletions_while_a_watch_was_away_are_never_reported(server: ApiStandIn) -> None:
    """So a list that compares uids is needed in any case: of owned kinds, that list is half of a reflector."""
    told: list[tuple[str | None, str]] = []
    for name in ("stays", "goes"):
        await server.put(f"{RESOURCES}/{name}", {})
    async with server.transport() as api:
        watch = KopfWatch(
            api,
            namespaces=["ns"],
            deliver=lambda change, item: told.append((change, item["metadata"]["name"])),
            on_gap=lambda: None,
        )
        task = asyncio.create_task(watch.run())
        await wait_for(lambda: len(told) == 2 and server.count("WATCH") == 1)
        assert watch.watching
        await server.remove(f"{RESOURCES}/goes", silently=True)
        await server.error_event(RESOURCES, 410)
        await wait_for(lambda: told.count((None, "stays")) == 2)
        await server.put(f"{RESOURCES}/comes", {})
        await wait_for(lambda: ("ADDED", "comes") in told)
        task.cancel()
        await asyncio.wait([task])
    assert [name for change, name in told if change == "DELETED"] == []


async def test_a_watch_is_read_however_much_waits_to_be_handled(server: ApiStandIn) -> None:
    """There is no back-pressure from workers to watches: memory has no bound but the cluster's."""
    registry, handled = registry_for(server), []

    @kopf.on.event("v1", "configmaps", registry=registry)
    async def handle(name: str, **_: Any) -> None:
        handled.append(name)
        await asyncio.Event().wait()

    async with running(registry, worker_limit=1, exit_timeout=0.1):
        await wait_for(lambda: server.count("WATCH") == 1)
        for number in range(64):
            await server.put(f"{MAPS}/{number}", {**LABELLED, "data": {"x": "x" * MEBIBYTE}})
        await wait_for(lambda: server.events_sent == 64)
        assert len(handled) <= 1


async def test_one_kind_that_goes_ends_the_watches_of_all(server: ApiStandIn) -> None:
    """PodMonitor, PodGroup and others come and go with their CRDs, while HeteroInference is served on."""
    registry, told = registry_for(server), []

    @kopf.on.event(GROUP, API_VERSION, PLURAL, registry=registry)
    async def hear(name: str, **_: Any) -> None:
        told.append(name)

    @kopf.on.event("v1", "configmaps", registry=registry)
    async def hear_other(**_: Any) -> None:
        pass

    await server.put(f"{RESOURCES}/x", {})
    async with running(registry) as session:
        await wait_for(lambda: told == ["x"] and server.count("WATCH") == 2)
        server.faults.append(Fault("WATCH", "configmaps", refusal(404, "NotFound"), times=100))
        server.faults.append(Fault("GET", "configmaps", refusal(404, "NotFound"), times=100))
        await server.cut_watches()
        error = await asyncio.wait_for(session, TIMEOUT_S)
        assert getattr(error, "status", None) == 404


async def test_a_timer_needs_a_finalizer(server: ApiStandIn) -> None:
    """With one, `kubectl delete` hangs while the operator is down: so what is due later waits in our own queue."""
    registry = registry_for(server)

    @kopf.timer(GROUP, API_VERSION, PLURAL, interval=3600.0, registry=registry)
    async def look_again(**_: Any) -> None:
        pass

    await server.put(f"{RESOURCES}/x", {})
    server.faults.append(Fault("PATCH", PLURAL, refusal(404, "NotFound"), times=100))
    async with running(registry):
        await wait_for(lambda: bool(server.bodies))
    [(call, patch), *_] = server.bodies
    assert call == f"PATCH {RESOURCES}/x"
    assert {"path": "/metadata/finalizers", "value": [f"{GROUP}/finalizer"]}.items() <= patch[-1].items()


async def test_the_endpoint_of_on_probe_goes_with_the_kind(server: ApiStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liveness by `on.probe` would have the kubelet kill an operator that rightly waits for its definition."""
    registry, url = registry_for(server), f"http://127.0.0.1:{free_port()}/healthz"
    monkeypatch.setattr(kopf, "operator", partial(kopf.operator, liveness_endpoint=url))

    @kopf.on.probe(id="alive", registry=registry)
    async def alive(**_: Any) -> str:
        return "ok"

    @kopf.on.event(GROUP, API_VERSION, PLURAL, registry=registry)
    async def hear(**_: Any) -> None:
        pass

    async with running(registry) as session, aiohttp.ClientSession() as client:
        await wait_for(lambda: server.count("WATCH") == 1)
        async with client.get(url) as response:
            assert await response.json() == {"alive": "ok"}
        server.faults.append(Fault("WATCH", PLURAL, refusal(404, "NotFound"), times=100))
        server.faults.append(Fault("GET", PLURAL, refusal(404, "NotFound"), times=100))
        await server.cut_watches()
        assert getattr(await asyncio.wait_for(session, TIMEOUT_S), "status", None) == 404
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(url)

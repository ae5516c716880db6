"""Namespaces that refuse, as those that are gone do, and kinds that cannot be listed: what is left is looked after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from hetero_api.contract import LABEL_NAME
from hetero_operator.cluster import cache as cache_module
from hetero_operator.cluster.cache import ClusterCache, discover
from hetero_operator.cluster.kinds import OPTIONAL, RESOURCE
from hetero_operator.cluster.resources import Resources
from hetero_operator.cluster.store import Key
from hetero_operator.errors import ApiError, Unreachable
from hetero_operator.kopf_watch import KopfWatch
from tests.support.api_stand_in import ApiStandIn, Fault, refusal
from tests.unit.operator.test_kopf_limits import kind, server, wait_for
from tests.unit.operator.test_reflector import eventually

__all__ = ["server"]

BOTH = ["gone", "ns"]
LABELLED = {"metadata": {"labels": {LABEL_NAME: "x"}}}
BUDGETS = OPTIONAL[0]


def refusing(server: ApiStandIn, part: str = "/namespaces/gone/", code: int = 403) -> list[Fault]:
    """The faults, for as long as they are in the server's list."""
    faults = [Fault(method, part, refusal(code, "Forbidden"), times=10**6) for method in ("GET", "WATCH")]
    server.faults += faults
    return faults


@asynccontextmanager
async def running(life: Any) -> AsyncIterator[asyncio.Task[Any]]:
    task = asyncio.create_task(life)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
def offering(server: ApiStandIn) -> ApiStandIn:
    """With a version, and PodDisruptionBudgets."""
    server.objects |= {
        "/version": {"major": "1", "minor": "33"},
        BUDGETS.root: {"resources": [kind(BUDGETS.plural, BUDGETS.kind)]},
    }
    return server


async def test_a_namespace_that_refuses_holds_up_no_other_and_is_filled_when_it_is_back(offering: ApiStandIn) -> None:
    for namespace in BOTH:
        await offering.put(f"/api/v1/namespaces/{namespace}/pods/p", LABELLED)
    faults = refusing(offering)
    async with offering.transport() as api:
        cache = ClusterCache(api, namespaces=BOTH, on_change=lambda key: None)
        async with running(cache.run()):
            await asyncio.wait_for(cache.ready.wait(), 5.0)
            assert cache.capabilities.has(BUDGETS.api_version, BUDGETS.kind)
            assert len((await cache.owned_by(Key("ns", "x")))[1]) == 1
            assert any("gone" in problem or "Forbidden" in problem for problem in cache.problems())
            with pytest.raises(Unreachable, match="namespace gone: not listed yet"):
                await cache.owned_by(Key("gone", "x"))
            offering.faults = [fault for fault in offering.faults if fault not in faults]
            await eventually(lambda: not cache.problems(), timeout_s=10.0)
            assert len((await cache.owned_by(Key("gone", "x")))[1]) == 1


async def test_resources_of_a_namespace_that_refuses_are_gone_until_it_is_back(server: ApiStandIn) -> None:
    told: list[Key] = []
    for namespace in BOTH:
        await server.put(RESOURCE.path(namespace, "x"), {})
    async with server.transport() as api:
        resources = Resources(api, namespaces=BOTH, resync_s=0.1, on_change=told.append)
        async with running(resources.run()):
            await eventually(lambda: len(resources.store) == 2)
            faults = refusing(server)
            await eventually(lambda: [*resources.store.keys()] == [Key("ns", "x")])
            assert told.count(Key("gone", "x")) == 2
            await eventually(lambda: "cannot be listed" in resources.problem)
            await server.put(RESOURCE.path("ns", "y"), {})
            await eventually(lambda: Key("ns", "y") in told)
            server.faults = [fault for fault in server.faults if fault not in faults]
            await eventually(lambda: len(resources.store) == 3 and not resources.problem)


async def test_resources_are_not_listed_while_every_namespace_refuses(server: ApiStandIn) -> None:
    faults = refusing(server, "/namespaces/")
    async with server.transport() as api:
        resources = Resources(api, namespaces=BOTH, resync_s=0.1, on_change=lambda key: None)
        async with running(resources.run()):
            await eventually(lambda: bool(resources.problem))
            assert not resources.listed.is_set()
            server.faults = [fault for fault in server.faults if fault not in faults]
            await asyncio.wait_for(resources.listed.wait(), 5.0)


async def test_kopf_watches_the_namespaces_that_do_not_refuse_and_the_others_when_they_are_back(
    server: ApiStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero_operator.kopf_watch.PROBE_S", 0.1)
    told: list[tuple[str, str]] = []

    def deliver(change: str | None, item: dict[str, Any]) -> None:
        told.append((item["metadata"]["namespace"], item["metadata"]["name"]))

    async with server.transport() as api:
        watch = KopfWatch(api, namespaces=BOTH, deliver=deliver, on_gap=lambda: None)
        async with running(watch.run()) as task:
            faults: list[Fault] = []
            for number in range(2):  # from the beginning, and once it runs
                faults = refusing(server)
                await server.cut_watches()
                await wait_for(lambda: watch.watching)
                await server.put(RESOURCE.path("ns", f"n{number}"), {})
                await wait_for(partial(told.__contains__, ("ns", f"n{number}")))
                assert not task.done()
                server.faults = [fault for fault in server.faults if fault not in faults]
                await server.put(RESOURCE.path("gone", f"g{number}"), {})
                await wait_for(partial(told.__contains__, ("gone", f"g{number}")))


@pytest.mark.parametrize("code", [403, 404, 500])
async def test_an_optional_kind_that_cannot_be_listed_is_not_offered_until_it_can(
    offering: ApiStandIn, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(cache_module, "OPTIONAL_S", 0.2)
    monkeypatch.setattr(cache_module, "DISCOVERY_S", 0.1)
    faults = refusing(offering, f"{BUDGETS.root}/{BUDGETS.plural}", code)
    async with offering.transport() as api:
        cache = ClusterCache(api, namespaces=[], on_change=lambda key: None)
        async with running(cache.run()):
            await asyncio.wait_for(cache.ready.wait(), 5.0)
            assert not cache.capabilities.kinds
            offering.faults = [fault for fault in offering.faults if fault not in faults]
            await eventually(lambda: bool(cache.capabilities.kinds), timeout_s=10.0)


async def test_an_optional_kind_that_is_refused_in_a_namespace_holds_up_no_look(offering: ApiStandIn) -> None:
    refusing(offering, f"/namespaces/ns/{BUDGETS.plural}")
    async with offering.transport() as api:
        cache = ClusterCache(api, namespaces=BOTH, on_change=lambda key: None)
        async with running(cache.run()):
            await asyncio.wait_for(cache.ready.wait(), 5.0)
            assert not cache.capabilities.kinds
            assert await cache.owned_by(Key("ns", "x")) == ([], [])


@pytest.mark.parametrize("code", [429, 503])
async def test_a_first_discovery_that_is_put_off_is_no_answer(offering: ApiStandIn, code: int) -> None:
    async with offering.transport() as api:
        offering.faults.append(Fault("GET", BUDGETS.root, refusal(code)))
        with pytest.raises(ApiError):
            await discover(api, None)
        known = await discover(api, None)
        assert known.has(BUDGETS.api_version, BUDGETS.kind)
        offering.faults.append(Fault("GET", BUDGETS.root, refusal(code)))
        assert await discover(api, known) == known
        offering.faults.append(Fault("GET", BUDGETS.root, refusal(403)))
        assert not (await discover(api, None)).kinds


async def test_a_deleted_resource_leaves_no_trace() -> None:
    resources = Resources(None, namespaces=[], resync_s=1.0, on_change=lambda key: None)  # type: ignore[arg-type]
    item = {"metadata": {"namespace": "ns", "name": "x", "uid": "u", "resourceVersion": "1"}}
    resources.hear("ADDED", item)
    resources.hear("DELETED", item)
    assert not resources._heard

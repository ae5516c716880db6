"""Calls of the API: errors by kind, time limits, credentials, counting, and the fence before writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from hetero_operator.cluster.fence import Fence
from hetero_operator.cluster.kinds import LEASE
from hetero_operator.cluster.transport import Transport
from hetero_operator.errors import ApiError, Conflict, FenceBroken, Gone, NotFound, NotLeading, Refused, Unreachable
from tests.support.api_stand_in import ApiStandIn, Fault, refusal

PATH = "/api/v1/namespaces/ns/configmaps/x"


@pytest.fixture
async def server() -> AsyncIterator[ApiStandIn]:
    async with ApiStandIn() as server:
        yield server


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, Refused), (403, Refused), (422, Refused), (404, NotFound), (409, Conflict), (410, Gone), (500, ApiError),
        (429, ApiError), (503, ApiError), (401, ApiError),
    ],
)  # fmt: skip
async def test_statuses_are_errors_by_kind_with_their_reason_and_message(
    server: ApiStandIn, code: int, kind: type[ApiError]
) -> None:
    server.faults.append(Fault("GET", "configmaps", refusal(code, "Because", "so it is")))
    async with server.transport() as api:
        with pytest.raises(kind) as caught:
            await api.get(PATH)
    assert (caught.value.status, caught.value.reason, caught.value.message) == (code, "Because", "so it is")


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("3", 3.0), ("0.5", 0.5), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0), ("-1", 0.0),
        ("3600", 60.0), ("inf", 60.0), ("nan", 0.0),
    ],
)  # fmt: skip
async def test_retry_after_is_seconds_up_to_a_minute_and_a_date_is_none(
    server: ApiStandIn, given: str, seconds: float
) -> None:
    server.faults.append(Fault("GET", "configmaps", refusal(429, headers={"Retry-After": given})))
    async with server.transport() as api:
        with pytest.raises(ApiError) as caught:
            await api.get(PATH)
    assert caught.value.retry_after_s == seconds


async def test_answers_that_are_no_status_still_tell_something(server: ApiStandIn) -> None:
    server.faults.append(Fault("GET", "configmaps", lambda: web.Response(status=502, text="<html>bad gateway</html>")))
    async with server.transport() as api:
        with pytest.raises(ApiError, match="bad gateway"):
            await api.get(PATH)


async def test_an_answer_that_is_no_json_is_no_answer(server: ApiStandIn) -> None:
    server.faults.append(Fault("GET", "configmaps", lambda: web.Response(text="<html>welcome</html>")))
    async with server.transport() as api:
        with pytest.raises(Unreachable, match="no JSON"):
            await api.get(PATH)


async def test_a_server_that_is_not_there_is_unreachable() -> None:
    async with ApiStandIn().transport() as api:
        with pytest.raises(Unreachable):
            await api.get(PATH)


async def test_a_call_that_hangs_ends_in_time(server: ApiStandIn) -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    server._handle = hang  # type: ignore[method-assign]
    await server.stop()
    await server.start()
    async with server.transport() as api:
        with pytest.raises(Unreachable):
            await api.get(PATH, timeout_s=0.05)


async def test_a_write_may_take_no_longer_than_the_lease_lasts(server: ApiStandIn) -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    server._handle = hang  # type: ignore[method-assign]
    await server.stop()
    await server.start()
    fence = Fence(clock=lambda: 0.0)
    fence.open(writes_until=0.01, lease_until=0.05)
    async with server.transport(fence) as api:
        with pytest.raises(Unreachable):
            await api.create("/api/v1/namespaces/ns/configmaps", {"metadata": {"name": "x"}})


@pytest.mark.parametrize("write", ["create", "apply", "merge", "delete"])
async def test_without_the_lease_no_write_leaves_the_process(server: ApiStandIn, write: str) -> None:
    async with server.transport(Fence()) as api:
        with pytest.raises(NotLeading):
            await getattr(api, write)(PATH, {"metadata": {"name": "x"}})
        with pytest.raises(NotFound):
            await api.get(PATH)
    assert server.calls == [f"GET {PATH}"]


@pytest.mark.parametrize("namespace", ["ns", "leases"])
async def test_a_lease_that_runs_out_while_a_connection_is_made_stops_the_write(
    server: ApiStandIn, namespace: str
) -> None:
    moments = iter([0.0, 0.0, 20.0])
    fence = Fence(clock=lambda: next(moments, 20.0))
    fence.open(writes_until=10.0, lease_until=15.0)
    async with server.transport(fence) as api:
        with pytest.raises(NotLeading):
            await api.create(f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"name": "x"}})
    assert server.calls == []


MAPS = "/api/v1/namespaces/ns/configmaps"


async def test_a_dry_write_proves_that_a_closed_fence_refuses(server: ApiStandIn) -> None:
    async with server.transport(Fence()) as api:
        await api.prove_fence(MAPS, {"metadata": {"name": "x"}})
    assert server.calls == []


async def test_a_client_library_that_goes_around_the_fence_is_found_out(server: ApiStandIn) -> None:
    async with server.transport(Fence()) as api:
        api.configuration.trace_configs = []
        with pytest.raises(FenceBroken, match="although the Lease is not held"):
            await api.prove_fence(MAPS, {"metadata": {"name": "x"}})
    assert server.queries == [{"dryRun": "All"}]


async def test_a_fence_that_is_open_or_a_server_that_is_away_proves_nothing(server: ApiStandIn) -> None:
    async with server.transport() as api:
        with pytest.raises(FenceBroken, match="open"):
            await api.prove_fence(MAPS, {"metadata": {"name": "x"}})
    await server.stop()
    async with server.transport(Fence()) as api:
        with pytest.raises(Unreachable, match="could not be tried"):
            await api.prove_fence(MAPS, {"metadata": {"name": "x"}})


async def test_the_lease_itself_is_written_by_whoever_has_none(server: ApiStandIn) -> None:
    async with server.transport(Fence()) as api:
        await api.claim("POST", LEASE.path("ns"), {"metadata": {"name": "x"}}, timeout_s=5.0)
        await api.claim("PUT", LEASE.path("ns", "x"), {"metadata": {"name": "x"}}, timeout_s=5.0)
    assert server.calls == [f"POST {LEASE.path('ns')}", f"PUT {LEASE.path('ns', 'x')}"]


@pytest.mark.parametrize(("at_most", "told"), [(None, [2, 2, 1]), (4, [2, 2]), (9, [2, 2, 1])])
async def test_a_list_comes_in_pages(server: ApiStandIn, at_most: int | None, told: list[int]) -> None:
    pods = "/api/v1/namespaces/ns/pods"
    for name in "abcde":
        await server.put(f"{pods}/{name}", {})
    async with server.transport() as api:
        pages = [page async for page in api.pages(pods, size=2, at_most=at_most, labelSelector="app")]
    assert [len(page["items"]) for page in pages] == told
    assert [query.get("continue") for query in server.queries] == [None, "2", "4"][: len(told)]
    assert all(query["labelSelector"] == "app" for query in server.queries)


async def _pages_of(server: ApiStandIn, sizes: list[int]) -> list[int]:
    """Objects of each page of a list of ConfigMaps with so many bytes."""
    maps = "/api/v1/namespaces/ns/configmaps"
    for number, size in enumerate(sizes):
        server.objects[f"{maps}/{number:05}"] = {"metadata": {"name": str(number)}, "data": {"x": "x" * size}}
    async with server.transport() as api:
        return [len(page["items"]) async for page in api.pages(maps)]


async def test_pages_grow_while_objects_are_small_and_shrink_when_they_are_large(server: ApiStandIn) -> None:
    assert await _pages_of(server, [10] * 1200) == [8, 32, 128, 500, 500, 32]
    server.objects.clear()
    assert await _pages_of(server, [2**20] * 20) == [8, 3, 3, 3, 3]


async def test_a_page_that_is_too_large_is_asked_for_again_with_fewer_objects(server: ApiStandIn) -> None:
    assert await _pages_of(server, [10] * 40 + [2**20] * 20) == [8, 32, 2, *[3] * 6]
    assert [query["limit"] for query in server.queries] == ["8", "32", "128", "16", "2", *["3"] * 6]


async def test_calls_are_counted_by_verb_and_code(server: ApiStandIn) -> None:
    counted: list[tuple[str, str]] = []
    async with server.transport(count=lambda verb, code: counted.append((verb, code))) as api:
        await api.apply(PATH, {"metadata": {"name": "x"}})
        await api.get(PATH)
        with pytest.raises(NotFound):
            await api.get(PATH + "y")
        await server.stop()
        with pytest.raises(Unreachable):
            await api.delete(PATH, {})
    assert counted == [("apply", "201"), ("get", "200"), ("get", "404"), ("delete", "error")]


async def test_apply_names_the_field_manager_and_forces(server: ApiStandIn) -> None:
    async with server.transport() as api:
        await api.apply(PATH, {"metadata": {"name": "x"}})
    assert server.queries[-1] == {"fieldManager": "heteroinference-operator", "force": "true"}


async def test_a_token_that_is_refused_is_read_again_once_in_a_while(server: ApiStandIn) -> None:
    reads = 0

    async def reload() -> Any:
        nonlocal reads
        reads += 1
        fresh = Configuration(host=server.url)
        fresh.api_key["BearerToken"] = "Bearer second"
        return fresh

    server.faults.append(Fault("GET", "configmaps", refusal(401, "Unauthorized"), times=2))
    await server.put(PATH, {})
    configuration = Configuration(host=server.url)
    configuration.api_key["BearerToken"] = "Bearer first"
    async with aclosing(Transport(configuration, Fence(), reload=reload)) as api:
        for _ in range(2):
            with pytest.raises(ApiError):
                await api.get(PATH)
        await api.get(PATH)
    assert reads == 1
    assert configuration.api_key["BearerToken"] == "Bearer second"


async def test_long_lines_and_lines_in_pieces_are_read_whole(server: ApiStandIn) -> None:
    pods = "/api/v1/namespaces/ns/pods"
    await server.put(f"{pods}/a", {"data": "x" * 500_000})
    await server.put(f"{pods}/b", {"data": "y"})
    async with server.transport() as api:
        stream = api.watch(pods, resourceVersion="1")
        found = [await anext(stream), await anext(stream)]
        await stream.aclose()  # type: ignore[attr-defined]
    assert [len(event["object"]["data"]) for event in found] == [500_000, 1]

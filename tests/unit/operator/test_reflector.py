"""The reflector: its store equals the server's objects in the end, whatever happened on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from hetero_api.contract import LABEL_NAME
from hetero_operator.cluster.kinds import POD
from hetero_operator.cluster.reflector import Reflector
from hetero_operator.cluster.store import Key, ObjectStore
from hetero_operator.timing import Backoff
from tests.support.api_stand_in import ApiStandIn, Fault, refusal

PODS = "/api/v1/namespaces/ns/pods"
LABELLED = {"metadata": {"labels": {LABEL_NAME: "x"}}}
TIMEOUT_S = 5.0
QUICK = Backoff(first_s=0.01, cap_s=0.02)


@dataclass
class Bench:
    """A reflector at work."""

    server: ApiStandIn
    store: ObjectStore
    reflector: Reflector
    told: list[Key] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        return [item["metadata"]["name"] for item in self.store.owned_by(Key("ns", "x"))]

    async def wait_names(self, *names: str) -> None:
        await eventually(lambda: self.names() == list(names), lambda: str(self.names()))


async def eventually(
    holds: Callable[[], bool], describe: Callable[[], str] = lambda: "", timeout_s: float = 5.0
) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, describe()
        await asyncio.sleep(0.005)


@pytest.fixture
async def server() -> AsyncIterator[ApiStandIn]:
    async with ApiStandIn() as server:
        yield server


@pytest.fixture
async def bench(server: ApiStandIn) -> AsyncIterator[Bench]:
    """Not started yet: `start(bench)` does."""
    async with server.transport() as api:
        store = ObjectStore(POD)
        bench = Bench(server, store, None)  # type: ignore[arg-type]
        bench.reflector = Reflector(
            api,
            store,
            namespace=None,
            on_change=bench.told.append,
            on_restart=bench.restarts.append,
            backoff=QUICK,
            page_size=2,
        )
        task = asyncio.create_task(bench.reflector.run())
        try:
            yield bench
        finally:
            assert not task.done(), "a reflector never ends"
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_pages_are_joined_and_changes_followed(server: ApiStandIn, bench: Bench) -> None:
    for name in "abcde":
        await server.put(f"{PODS}/{name}", LABELLED)
    await bench.wait_names(*"abcde")
    await server.remove(f"{PODS}/b")
    await server.put(f"{PODS}/f", LABELLED)
    await bench.wait_names(*"acdef")
    assert set(bench.told) == {Key("ns", "x")}
    assert {query["labelSelector"] for query in server.queries} == {LABEL_NAME}


async def test_the_first_list_is_read_page_by_page(server: ApiStandIn) -> None:
    for name in "abcde":
        await server.put(f"{PODS}/{name}", LABELLED)
    async with server.transport() as api:
        store = ObjectStore(POD)
        reflector = Reflector(api, store, namespace="ns", on_change=lambda key: None, page_size=2)
        task = asyncio.create_task(reflector.run())
        await reflector.synced.wait()
        assert len(store) == 5
        assert [query.get("continue") for query in server.queries[:3]] == [None, "2", "4"]
        task.cancel()


async def test_a_stream_that_is_cut_goes_on_where_it_was_without_a_list(server: ApiStandIn, bench: Bench) -> None:
    await server.put(f"{PODS}/a", LABELLED)
    await bench.wait_names("a")
    await eventually(lambda: server.count("WATCH") == 1)
    lists = server.count("GET")
    await server.bookmark("/api/v1/namespaces/ns/pods")
    mark = server.version
    await server.cut_watches()
    await server.put(f"{PODS}/b", LABELLED)
    await bench.wait_names("a", "b")
    assert server.count("GET") == lists
    await eventually(lambda: server.count("WATCH") == 2)
    assert int(server.queries[-1]["resourceVersion"]) >= mark


@pytest.mark.parametrize("how", ["answer", "event"])
async def test_410_lists_anew_and_finds_a_deletion_that_was_never_told(
    server: ApiStandIn, bench: Bench, how: str
) -> None:
    await server.put(f"{PODS}/a", LABELLED)
    await server.put(f"{PODS}/b", LABELLED)
    await bench.wait_names("a", "b")
    await server.remove(f"{PODS}/a", silently=True)
    bench.told.clear()
    if how == "answer":
        server.oldest = server.version
        await server.cut_watches()
    else:
        await server.error_event(PODS, 410)
    await bench.wait_names("b")
    assert bench.told == [Key("ns", "x")]
    assert "gone" in bench.restarts


async def test_a_token_of_a_page_that_expired_lists_from_the_beginning(server: ApiStandIn) -> None:
    for name in "abc":
        await server.put(f"{PODS}/{name}", LABELLED)
    async with server.transport() as api:
        reflector = Reflector(
            api, ObjectStore(POD), namespace="ns", on_change=lambda key: None, page_size=2, backoff=QUICK
        )
        answered = 0

        def expired_at_the_second() -> bool:
            nonlocal answered
            answered += 1
            return answered == 2

        original = server._list
        server._list = (  # type: ignore[method-assign]
            lambda path, request: refusal(410, "Expired")() if expired_at_the_second() else original(path, request)
        )
        task = asyncio.create_task(reflector.run())
        await reflector.synced.wait()
        assert len(reflector.store) == 3
        task.cancel()


async def test_errors_of_the_server_are_outlived(server: ApiStandIn, bench: Bench) -> None:
    await server.put(f"{PODS}/a", LABELLED)
    await bench.wait_names("a")
    for code in (500, 503, 429, 403):
        server.faults.append(Fault("WATCH", "pods", refusal(code, message="no")))
        server.faults.append(Fault("GET", "pods", refusal(code, message="no")))
    await server.cut_watches()
    await eventually(lambda: bench.restarts.count("error") >= 4, lambda: str(bench.restarts))
    await server.put(f"{PODS}/b", LABELLED)
    await bench.wait_names("a", "b")
    await eventually(lambda: not bench.reflector.problem, lambda: bench.reflector.problem)


async def test_a_server_that_is_away_is_waited_for_and_the_problem_told(server: ApiStandIn, bench: Bench) -> None:
    await server.put(f"{PODS}/a", LABELLED)
    await bench.wait_names("a")
    await server.stop()
    await eventually(lambda: "Pod" in bench.reflector.problem)
    await server.start()
    await server.put(f"{PODS}/b", LABELLED)
    await bench.wait_names("a", "b")


async def test_a_kind_that_is_gone_has_no_objects(server: ApiStandIn, bench: Bench) -> None:
    await server.put(f"{PODS}/a", LABELLED)
    await bench.wait_names("a")
    server.faults.append(Fault("GET", "pods", refusal(404, "NotFound"), times=3))
    server.faults.append(Fault("WATCH", "pods", refusal(404, "NotFound"), times=3))
    await server.cut_watches()
    await bench.wait_names()
    await bench.wait_names("a")


async def test_retry_after_is_respected(server: ApiStandIn) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    server.faults.append(Fault("GET", "pods", refusal(429, "TooManyRequests", headers={"Retry-After": "7"})))
    async with server.transport() as api:
        reflector = Reflector(api, ObjectStore(POD), namespace=None, on_change=lambda key: None, sleep=sleep)
        task = asyncio.create_task(reflector.run())
        await reflector.synced.wait()
        task.cancel()
    assert pauses == [7.0]


async def test_a_stream_that_always_ends_at_once_is_no_hot_loop(server: ApiStandIn) -> None:
    pauses: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 8:
            enough.set()
        await asyncio.sleep(0)

    server.faults.append(Fault("WATCH", "pods", web.Response, times=1000))
    async with server.transport() as api:
        reflector = Reflector(
            api, ObjectStore(POD), namespace=None, on_change=lambda key: None, sleep=sleep, backoff=Backoff(jitter=0.0)
        )
        task = asyncio.create_task(reflector.run())
        await enough.wait()
        task.cancel()
    assert pauses[:8] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


async def test_an_event_that_is_cut_in_the_middle_is_told_again(server: ApiStandIn, bench: Bench) -> None:
    await server.put(f"{PODS}/a", LABELLED)
    await bench.wait_names("a")
    server.faults.append(Fault("WATCH", "pods", lambda: web.Response(body=b'{"type": "ADDED", "obj')))
    await server.cut_watches()
    await server.put(f"{PODS}/b", LABELLED)
    await bench.wait_names("a", "b")

"""Statuses are written when they changed, Events once for each thing said, Warnings asked for when something waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from hetero_operator.cluster.fence import Fence
from hetero_operator.cluster.inquiries import PATIENCE_S, WarningBook
from hetero_operator.cluster.kinds import RESOURCE
from hetero_operator.cluster.reporting import (
    ATTEMPTS,
    EVENT_BURST,
    MIN_INTERVAL_S,
    STATUS_BURST,
    EventRecorder,
    StatusWriter,
)
from hetero_operator.cluster.store import Key, ObjectStore
from hetero_operator.errors import Conflict
from hetero_operator.reconcile.model import PodEvent, Transition
from tests.support.api_stand_in import ApiStandIn, Fault, refusal

KEY = Key("ns", "x")
PATH = RESOURCE.path("ns", "x")
EVENTS = "/api/v1/namespaces/ns/events"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SAID = Transition("Warning", "RankExited", "rank 0 exited with 1")


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def server() -> AsyncIterator[ApiStandIn]:
    async with ApiStandIn() as server:
        yield server


@pytest.fixture
def clock() -> FakeTime:
    return FakeTime()


def status(reason: str, **fields: Any) -> dict[str, Any]:
    return {"reason": reason, "conditions": [{"type": "Ready", "status": "False", "reason": reason}], **fields}


async def test_a_status_is_written_once_and_again_only_when_it_changed(server: ApiStandIn, clock: FakeTime) -> None:
    resource = await server.put(PATH, {})
    async with server.transport() as api:
        store = ObjectStore(RESOURCE, owner_label=None)
        writer = StatusWriter(api, store, clock=clock)
        for reason in ("A", "A", "B"):
            assert await writer.write(KEY, resource, status(reason)) == 0.0
            resource = store.get(*KEY) or resource
            clock.now += 60.0
    assert server.count("PATCH") == 2
    assert server.objects[PATH]["status"]["reason"] == "B"


async def test_a_status_that_the_server_has_already_is_not_written_by_a_new_process(
    server: ApiStandIn, clock: FakeTime
) -> None:
    told = status("A")
    others = {"type": "Theirs", "status": "True", "reason": "X"}
    resource = await server.put(PATH, {"status": {**told, "conditions": [others, *told["conditions"]]}})
    async with server.transport() as api:
        writer = StatusWriter(api, ObjectStore(RESOURCE, owner_label=None), clock=clock)
        assert await writer.write(KEY, resource, told) == 0.0
    assert server.count("PATCH") == 0


async def test_what_is_no_longer_said_is_taken_back(server: ApiStandIn, clock: FakeTime) -> None:
    resource = await server.put(PATH, {"status": status("A", endpoint="x:1")})
    async with server.transport() as api:
        writer = StatusWriter(api, ObjectStore(RESOURCE, owner_label=None), clock=clock)
        await writer.write(KEY, resource, status("A"))
    assert "endpoint" not in server.objects[PATH]["status"]


async def test_a_status_that_changes_all_the_time_is_written_once_a_second(server: ApiStandIn, clock: FakeTime) -> None:
    resource = await server.put(PATH, {})
    async with server.transport() as api:
        store = ObjectStore(RESOURCE, owner_label=None)
        writer = StatusWriter(api, store, clock=clock)
        for number in range(STATUS_BURST):
            assert await writer.write(KEY, resource, status(f"A{number}")) == 0.0
            resource = store.get(*KEY) or resource
        clock.now += 0.25
        assert await writer.write(KEY, resource, status("B")) == pytest.approx(MIN_INTERVAL_S - 0.25)
        clock.now += 0.75
        assert await writer.write(KEY, resource, status("B")) == 0.0
    assert server.count("PATCH") == STATUS_BURST + 1


async def test_the_account_of_restarts_does_not_wait_its_turn(server: ApiStandIn, clock: FakeTime) -> None:
    resource = await server.put(PATH, {})
    async with server.transport() as api:
        store = ObjectStore(RESOURCE, owner_label=None)
        writer = StatusWriter(api, store, clock=clock)
        for count in range(STATUS_BURST + 3):
            assert await writer.write(KEY, resource, status("A", restarts={"count": count})) == 0.0
            resource = store.get(*KEY) or resource
        assert await writer.write(KEY, resource, status("B", restarts={"count": count})) > 0.0
    assert server.objects[PATH]["status"]["restarts"] == {"count": STATUS_BURST + 2}


async def test_conditions_of_others_stay_and_so_does_what_is_equal(server: ApiStandIn, clock: FakeTime) -> None:
    others = {"type": "Theirs", "status": "True", "reason": "X"}
    known = {**status("A", placement={"mode": "Tensor", "exchange": "shm"}), "conditions": [others]}
    resource = await server.put(PATH, {"status": known})
    async with server.transport() as api:
        writer = StatusWriter(api, ObjectStore(RESOURCE, owner_label=None), clock=clock)
        await writer.write(KEY, resource, status("A", placement={"mode": "Tensor"}))
    told = server.objects[PATH]["status"]
    assert told["placement"] == {"mode": "Tensor"}
    assert [condition["type"] for condition in told["conditions"]] == ["Ready", "Theirs"]
    assert set(server.bodies[-1][1]["status"]) == {"conditions", "placement"}


async def test_a_resource_made_anew_meanwhile_is_left_alone(server: ApiStandIn, clock: FakeTime) -> None:
    resource = await server.put(PATH, {})
    await server.remove(PATH)
    await server.put(PATH, {})
    async with server.transport() as api:
        with pytest.raises(Conflict):
            await StatusWriter(api, ObjectStore(RESOURCE, owner_label=None)).write(KEY, resource, status("A"))
    assert "status" not in server.objects[PATH]


async def recorded(server: ApiStandIn, *said: Transition, recorders: int = 1, fence: Fence | None = None) -> None:
    """Have a resource say this, through several processes one after another."""
    resource = server.objects.get(PATH) or await server.put(PATH, {})

    async def no_sleep(seconds: float) -> None:
        await asyncio.sleep(0)

    for _ in range(recorders):
        async with server.transport(fence) as api:
            recorder = EventRecorder(api, identity="me", clock=lambda: 0.0, sleep=no_sleep)
            for transition in said:
                recorder.record(resource, transition, NOW)
            task = asyncio.create_task(recorder.run())
            while recorder.pending:
                await asyncio.wait([task], timeout=0.001)
            task.cancel()


def events(server: ApiStandIn) -> list[dict[str, Any]]:
    return [item for path, item in server.objects.items() if path.startswith(EVENTS)]


async def test_an_event_says_what_about_whom_when_and_by_whom(server: ApiStandIn) -> None:
    await recorded(server, SAID)
    (event,) = events(server)
    assert (event["type"], event["reason"], event["message"], event["count"]) == (*SAID, 1)
    assert event["involvedObject"]["uid"] == server.objects[PATH]["metadata"]["uid"]
    assert event["lastTimestamp"] == "2026-01-02T03:04:05Z"


async def test_the_same_word_of_another_process_is_counted_not_repeated(server: ApiStandIn) -> None:
    await recorded(server, SAID, recorders=3)
    (event,) = events(server)
    assert event["count"] == 3


async def test_another_word_is_another_event(server: ApiStandIn) -> None:
    await recorded(server, SAID, SAID._replace(message="rank 1 exited with 1"))
    assert len(events(server)) == 2


async def test_events_survive_some_failures_and_are_dropped_after_many(server: ApiStandIn) -> None:
    server.faults.append(Fault("POST", "events", refusal(500), times=2))
    await recorded(server, SAID)
    assert len(events(server)) == 1
    server.faults.append(Fault("POST", "events", refusal(500), times=100))
    calls = server.count("POST")
    await recorded(server, SAID._replace(reason="Other"))
    assert server.count("POST") - calls == ATTEMPTS


async def test_who_does_not_lead_says_nothing(server: ApiStandIn) -> None:
    await recorded(server, SAID, fence=Fence())
    assert events(server) == []


async def test_a_resource_that_says_ever_new_things_is_cut_short(server: ApiStandIn) -> None:
    await recorded(server, *(SAID._replace(message=str(number)) for number in range(EVENT_BURST + 10)))
    assert len(events(server)) == EVENT_BURST


async def test_warnings_are_listed_once_a_namespace_when_something_has_waited_for_long(
    server: ApiStandIn, clock: FakeTime
) -> None:
    told: list[Key] = []
    about = {"involvedObject": {"uid": "pod-1"}, "type": "Warning"}
    await server.put(f"{EVENTS}/1", {**about, "reason": "Old", "lastTimestamp": "2026-01-01T00:00:00Z"})
    await server.put(f"{EVENTS}/2", {**about, "reason": "New", "lastTimestamp": "2026-01-01T00:01:00Z"})
    async with server.transport() as api:
        book = WarningBook(api, on_change=told.append, clock=clock)
        assert book.about(KEY, {"pod-1": 1.0}) == {}
        assert book.about(Key("ns", "y"), {"pod-2": 1.0}) == {}
        await book.ask()
        assert server.calls == []
        clock.now += PATIENCE_S
        await book.ask()
        assert server.calls == [f"GET {EVENTS}"]
        assert told == [KEY]
        assert book.about(KEY, {"pod-1": 30.0}) == {"pod-1": (PodEvent("New", ""), PodEvent("Old", ""))}
        await book.ask()
        assert told == [KEY], "nothing new was said"
        assert book.about(KEY, {}) == {}
        assert book.about(Key("ns", "y"), {}) == {}
        calls = len(server.calls)
        await book.ask()
        assert len(server.calls) == calls, "nothing waits any more"


async def test_warnings_that_may_not_be_listed_are_done_without(server: ApiStandIn, clock: FakeTime) -> None:
    server.faults.append(Fault("GET", "events", refusal(403, "Forbidden"), times=10))
    async with server.transport() as api:
        book = WarningBook(api, on_change=lambda key: None, clock=clock)
        book.about(KEY, {"pod-1": 60.0})
        await book.ask()
        assert book.about(KEY, {"pod-1": 60.0}) == {}

"""Questions about pods in trouble: answers are kept only as far as they decide anything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from hetero_operator.cluster.inquiries import MAX_TOLD, NodeBook, WarningBook
from hetero_operator.cluster.store import Key
from hetero_operator.reconcile.model import PodEvent
from tests.support.api_stand_in import ApiStandIn

OWNER = Key("ns", "x")
EVENTS = "/api/v1/namespaces/ns/events"
LONG_AGO_S = 1000.0


@pytest.fixture
async def server() -> AsyncIterator[ApiStandIn]:
    async with ApiStandIn() as server:
        yield server


def warning(uid: str, message: str, minute: int = 0) -> dict[str, Any]:
    moment = f"2026-01-01T00:{minute:02}:00Z"
    return {"involvedObject": {"uid": uid}, "reason": "Failed", "message": message, "lastTimestamp": moment}


async def test_of_a_node_the_conditions_are_kept(server: ApiStandIn) -> None:
    conditions = [{"type": "Ready", "status": "False"}]
    server.objects["/api/v1/nodes/n"] = {
        "metadata": {"name": "n", "annotations": {"long": "x" * 2**20}, "labels": {"a": "b"}},
        "spec": {"podCIDR": "10.0.0.0/24"},
        "status": {"conditions": conditions, "images": [{"names": ["i"]}], "nodeInfo": {"machineID": "m"}},
    }
    async with server.transport() as api:
        nodes = await NodeBook(api).named(["n", "gone"])
    assert nodes == {"n": {"metadata": {"name": "n"}, "status": {"conditions": conditions}}, "gone": None}


async def test_of_warnings_those_about_waiting_objects_are_kept_the_newest_first(server: ApiStandIn) -> None:
    changed: list[Key] = []
    for number in range(8):
        await server.put(f"{EVENTS}/ours-{number}", warning("waits", f"m{number}", minute=number))
        await server.put(f"{EVENTS}/theirs-{number}", warning("other", "x" * 2**16))
    async with server.transport() as api:
        book = WarningBook(api, on_change=changed.append)
        assert book.about(OWNER, {"waits": LONG_AGO_S}) == {}
        await book.ask()
        assert book.about(OWNER, {"waits": LONG_AGO_S, "other": LONG_AGO_S}) == {
            "waits": tuple(PodEvent("Failed", f"m{number}") for number in range(7, 7 - MAX_TOLD, -1))
        }
        assert book.about(OWNER, {}) == {}
    assert changed == [OWNER]


async def test_who_leads_no_longer_asks_no_longer(server: ApiStandIn) -> None:
    async with server.transport() as api:
        book = WarningBook(api, on_change=lambda key: None)
        book.about(OWNER, {"waits": LONG_AGO_S})
        book.forget_all()
        await book.ask()
    assert server.calls == []


async def test_nothing_is_asked_about_what_has_not_waited_for_long(server: ApiStandIn) -> None:
    async with server.transport() as api:
        book = WarningBook(api, on_change=lambda key: None)
        book.about(OWNER, {"waits": 1.0})
        await book.ask()
    assert server.calls == []

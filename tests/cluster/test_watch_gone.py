"""Watches that lie by omission: an event that never comes, history that is gone. Right within a minute all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hetero_api.contract import KIND, PLURAL
from tests.support.kube.calls import ProxiedCall, of
from tests.support.kube.fault_proxy import FaultProxy
from tests.support.kube.faults import AnswerNext, DropEvents
from tests.support.kube.polling import poll
from tests.support.operator_scene import Scene

RIGHT_WITHIN_S = 60.0


@pytest.fixture
def proxy(scene: Scene) -> Iterator[FaultProxy]:
    with scene.proxy() as proxy:
        yield proxy


def is_deletion(call: ProxiedCall, event: dict[str, Any]) -> bool:
    return bool(event["type"] == "DELETED")


@pytest.mark.slow
@pytest.mark.parametrize("in_stream", [True, False], ids=["410 in the stream", "410 as the answer"])
def test_a_deletion_that_was_missed_is_made_good(scene: Scene, proxy: FaultProxy, in_stream: bool) -> None:
    with scene.operator(through=proxy):
        scene.apply("x")
        before = scene.owned.wait_settled("x")["x"].uids()
        drop = DropEvents(is_deletion)
        proxy.rules.append(drop)
        for kind, name in (("Service", "x-ranks"), ("StatefulSet", "x-cpu"), ("ServiceAccount", "x-gateway")):
            scene.client.delete(kind, name, scene.namespace)
        if in_stream:
            assert proxy.expire_watches() > 0
        else:
            proxy.rules.append(AnswerNext(410, times=20, of=of("watch")))
            assert proxy.cut_watches() > 0
        after = scene.owned.wait_settled("x", timeout_s=RIGHT_WITHIN_S)["x"].uids()
        poll(lambda: len(scene.owned.labelled("x")) == len(before), timeout_s=RIGHT_WITHIN_S)
        after = scene.owned.of("x").uids()
        anew = {str(key) for key, uid in after.items() if before[key] != uid}
        assert anew == {"Service/x-ranks", "StatefulSet/x-cpu", "ServiceAccount/x-gateway"}
        assert drop.dropped or not in_stream


@pytest.mark.slow
def test_what_happens_to_resources_in_a_gap_is_made_good(scene: Scene, proxy: FaultProxy) -> None:
    """While the resources' own watch is away, one changes, one goes, one is replaced by another of its name."""
    ours = of("watch", PLURAL)
    with scene.operator(through=proxy):
        for name in ("changes", "goes", "returns"):
            scene.apply(name)
        before = scene.owned.wait_settled("changes", "goes", "returns")
        gap = AnswerNext(503, times=10_000, of=ours)
        proxy.rules.extend([gap, DropEvents(lambda call, event: ours(call))])
        assert proxy.cut_watches(ours) > 0
        scene.apply("changes", {"pools.0.ranks": 3})
        for name in ("goes", "returns"):
            scene.client.delete(KIND, name, scene.namespace)
            scene.client.wait_gone(KIND, name, scene.namespace)
        scene.apply("returns", {"pools.0.ranks": 1})
        proxy.rules[:] = [AnswerNext(410, of=ours)]
        settled = scene.owned.wait_settled("changes", "returns", timeout_s=RIGHT_WITHIN_S)
        assert [item["spec"]["replicas"] for item in settled["changes"].of_kind("StatefulSet")] == [3]
        assert_replaced(before["returns"].uids().values(), settled["returns"].uids().values())
        scene.owned.wait_gone("goes")


def assert_replaced(old: Any, new: Any) -> None:
    """Nothing of the resource that went is kept for the one that came: the garbage collector will have taken it."""
    assert not set(old) & set(new)

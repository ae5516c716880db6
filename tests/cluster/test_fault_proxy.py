"""Every kind of fault that the proxy can do, before a real API server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import urllib3

from tests.cluster.workloads import config_map
from tests.support.kube.calls import of
from tests.support.kube.client import Client
from tests.support.kube.cluster import Cluster
from tests.support.kube.errors import ApiError, Conflict
from tests.support.kube.fault_proxy import FaultProxy
from tests.support.kube.faults import AnswerNext, AnswerShare, AtCall, Delay, DropEvents
from tests.support.kube.kubeconfigs import Credentials
from tests.support.kube.polling import poll

NOBODY = Credentials()


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[FaultProxy]:
    """In front of the shared cluster, as its administrator."""
    with FaultProxy(cluster, credentials=cluster.admin) as proxy:
        yield proxy


@pytest.fixture
def caller(proxy: FaultProxy) -> Iterator[Client]:
    """Speaks to the proxy, and has no credentials."""
    with Client(proxy.url, NOBODY) as caller:
        yield caller


class Watcher:
    """Watches the ConfigMaps of a namespace in a thread, until the stream ends."""

    def __init__(self, url: str, namespace: str, *, version: str = "") -> None:
        self._url = f"{url}/api/v1/namespaces/{namespace}/configmaps?watch=1&resourceVersion={version}"
        self.events: list[dict[str, Any]] = []
        self.status: int | None = None
        self.thread = threading.Thread(target=lambda: asyncio.run(self._watch()), daemon=True)
        self.thread.start()

    def names(self, type: str) -> list[str]:
        return [event["object"]["metadata"]["name"] for event in self.events if event["type"] == type]

    def ended(self) -> bool:
        return not self.thread.is_alive()

    async def _watch(self) -> None:
        async with aiohttp.ClientSession() as session, session.get(self._url) as answer:
            self.status = answer.status
            try:
                async for line in answer.content:
                    self.events.append(json.loads(line))
            except aiohttp.ClientError:
                return


def test_calls_are_recorded_by_what_they_mean(proxy: FaultProxy, caller: Client, namespace: str) -> None:
    caller.apply(config_map("a", namespace))
    caller.list_all("ConfigMap", namespace)
    caller.delete("ConfigMap", "a", namespace)
    seen = [(call.verb, str(call.target), call.code) for call in proxy.matching(of(resource="configmaps"))]
    assert seen == [
        ("apply", f"configmaps {namespace}/a", 201),
        ("list", f"configmaps {namespace}", 200),
        ("delete", f"configmaps {namespace}/a", 200),
    ]


def test_a_callers_own_token_is_passed_on(cluster: Cluster, namespace: str) -> None:
    account = cluster.service_account("default", namespace)
    refusal = pytest.raises(ApiError, match=f"system:serviceaccount:{namespace}:default.* cannot list")
    with FaultProxy(cluster) as proxy, Client(proxy.url, account) as caller, refusal:
        caller.list_all("Secret", namespace)


@pytest.mark.parametrize(("when", "done"), [("before", False), ("after", True)])
def test_the_nth_write_is_cut_off(
    proxy: FaultProxy, caller: Client, client: Client, namespace: str, when: Any, done: bool
) -> None:
    struck: list[str] = []
    proxy.rules.append(AtCall(2, lambda: struck.append(when), when=when))
    caller.apply(config_map("first", namespace))
    with pytest.raises(urllib3.exceptions.HTTPError):
        caller.apply(config_map("second", namespace))
    assert struck == [when]
    assert (client.find("ConfigMap", "second", namespace) is not None) is done
    caller.apply(config_map("third", namespace))


def test_a_share_of_writes_is_refused_the_same_way_again(proxy: FaultProxy, caller: Client, namespace: str) -> None:
    first, second = (_refusals(proxy, caller, namespace) for _ in range(2))
    assert first == second
    assert set(first) == {0, 409, 422, 500}
    assert 8 <= sum(code > 0 for code in first) <= 24


def _refusals(proxy: FaultProxy, caller: Client, namespace: str) -> list[int]:
    """The codes of 40 writes; 0 for one that succeeded."""
    proxy.rules[:] = [AnswerShare(0.4, [409, 422, 500], seed=7)]
    codes = []
    for number in range(40):
        try:
            caller.apply(config_map(f"n{number}", namespace))
            codes.append(0)
        except ApiError as refusal:
            codes.append(refusal.code)
    return codes


def test_the_next_call_is_refused_once(proxy: FaultProxy, caller: Client, namespace: str) -> None:
    proxy.rules.append(AnswerNext(409))
    with pytest.raises(Conflict):
        caller.apply(config_map("a", namespace))
    caller.apply(config_map("a", namespace))


def test_the_server_is_gone_and_comes_back(proxy: FaultProxy, caller: Client, namespace: str) -> None:
    watcher = Watcher(proxy.url, namespace)
    proxy.wait_for_calls(of("watch"))
    proxy.refuse()
    with pytest.raises(urllib3.exceptions.HTTPError):
        caller.list_all("ConfigMap", namespace)
    poll(watcher.ended, timeout_s=5)
    proxy.accept()
    caller.list_all("ConfigMap", namespace)


def test_watches_stream(proxy: FaultProxy, client: Client, namespace: str) -> None:
    watcher = Watcher(proxy.url, namespace)
    proxy.wait_for_calls(of("watch"))
    client.apply(config_map("a", namespace))
    poll(lambda: "a" in watcher.names("ADDED"), timeout_s=5)
    assert proxy.cut_watches() == 1
    poll(watcher.ended, timeout_s=5)


def test_a_watch_is_answered_410(proxy: FaultProxy, namespace: str) -> None:
    proxy.rules.append(AnswerNext(410, of=of("watch")))
    watcher = Watcher(proxy.url, namespace)
    poll(watcher.ended, timeout_s=5)
    assert (watcher.status, watcher.events[0]["reason"]) == (410, "Expired")


def test_a_new_watch_gets_410_as_an_event(proxy: FaultProxy, namespace: str) -> None:
    proxy.rules.append(AnswerNext(410, of=of("watch"), in_stream=True))
    watcher = Watcher(proxy.url, namespace)
    poll(watcher.ended, timeout_s=5)
    assert watcher.status == 200
    assert [(event["type"], event["object"]["code"]) for event in watcher.events] == [("ERROR", 410)]


def test_a_delete_is_missed_and_the_watch_expires(proxy: FaultProxy, client: Client, namespace: str) -> None:
    drop = DropEvents(lambda call, event: event["type"] == "DELETED")
    proxy.rules.append(drop)
    client.apply(config_map("a", namespace))
    watcher = Watcher(proxy.url, namespace)
    poll(lambda: "a" in watcher.names("ADDED"), timeout_s=5)
    client.delete("ConfigMap", "a", namespace)
    poll(lambda: drop.dropped, timeout_s=5)
    assert proxy.expire_watches() == 1
    poll(watcher.ended, timeout_s=5)
    assert watcher.names("DELETED") == []
    assert watcher.events[-1]["object"]["code"] == 410


def test_calls_are_delayed(proxy: FaultProxy, caller: Client, namespace: str) -> None:
    proxy.rules.append(Delay(0.3, of=of("apply")))
    caller.apply(config_map("a", namespace))
    (call,) = proxy.matching(of("apply"))
    assert call.ended is not None
    assert call.ended - call.started >= 0.3

"""An API server that refuses many writes: everything is right in the end, and nobody is called in a hot loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest

from hetero_api.contract import CONFIG_TEMPLATES_KEY
from hetero_operator.cluster.reporting import STATUS_BURST
from tests.support.kube.calls import ProxiedCall, of
from tests.support.kube.fault_proxy import FaultProxy
from tests.support.kube.faults import AnswerNext, AnswerShare
from tests.support.kube.polling import poll
from tests.support.operator_scene import Scene
from tests.support.owned_objects import Owned, normalised_all

RESOURCES = 10
CONVERGED_WITHIN_S = 120.0
MOST_WRITES_A_SECOND = 4
"""To one object, and refused ones to one status."""
MOST_STATUSES_A_SECOND = STATUS_BURST + 1
"""Written for one resource: what its writer does at once, and the next that it may."""
OUTAGE_S = 20.0
RETRY_AFTER_S = 3


@pytest.fixture
def proxy(scene: Scene) -> Iterator[FaultProxy]:
    with scene.proxy() as proxy:
        yield proxy


def our_write(call: ProxiedCall) -> bool:
    return call.is_write and call.target.resource != "leases"


def busiest_second(calls: list[ProxiedCall]) -> int:
    """Most writes to one object that began within one second."""
    starts: dict[str, list[float]] = {}
    for call in calls:
        if is_named_write(call):
            starts.setdefault(str(call.target), []).append(call.started)
    return max(sum(begin <= other <= begin + 1.0 for other in its) for its in starts.values() for begin in its)


def is_named_write(call: ProxiedCall) -> bool:
    """Whether the path says what is written: what is created (Events, Secrets) has no name in it."""
    return our_write(call) and call.verb != "create"


def is_written_status(call: ProxiedCall) -> bool:
    """Whether it wrote a status, and was not refused."""
    return is_named_write(call) and call.path.partition("?")[0].endswith("/status") and call.code == HTTPStatus.OK


def said(owned: Owned) -> dict[str, Any]:
    """What the objects say, but for the templates that are kept: those of a ConfigMap that was refused while its
    workload was not are taken from the workload, with the API server's defaults in them."""
    objects = normalised_all(owned)
    for item in objects.values():
        item.get("data", {}).pop(CONFIG_TEMPLATES_KEY, None)
    return objects


def told(owned: Owned) -> list[tuple[str, str, str]]:
    """Type, status and reason of each condition."""
    conditions = owned.resource["status"]["conditions"]
    return sorted((one["type"], one["status"], one["reason"]) for one in conditions)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_fifth_of_writes_is_refused(scene: Scene, proxy: FaultProxy, seed: int) -> None:
    names = [f"x-{number}" for number in range(RESOURCES)]
    with scene.operator(through=proxy):
        scene.apply("undisturbed")
        scene.owned.wait_settled("undisturbed")
        scene.wait_quiet()
        undisturbed = scene.owned.of("undisturbed")
        writes_of_one = len(proxy.matching(our_write))
        mark = len(proxy.calls)
        refuse = AnswerShare(0.2, [409, 422, 500], seed=seed)
        proxy.rules.append(refuse)
        for name in names:
            scene.apply(name)
        scene.owned.wait_settled(*names, timeout_s=CONVERGED_WITHIN_S)
        scene.wait_quiet()
        poll(
            lambda: all(told(scene.owned.of(name)) == told(undisturbed) for name in names),
            timeout_s=CONVERGED_WITHIN_S,
            describe=lambda: str({name: told(scene.owned.of(name)) for name in names}),
            interval_s=1.0,
        )
        settled = scene.owned.wait_settled(*names)
        assert refuse.answered >= RESOURCES
        for name in names:
            assert said(settled[name]) == said(undisturbed), name
        calls = proxy.calls[mark:]
        # One in five fails, so about one in four is made again; a plan that stops at a failure is made again whole.
        assert len([call for call in calls if our_write(call)]) <= 3 * RESOURCES * writes_of_one
        assert busiest_second([call for call in calls if is_written_status(call)]) <= MOST_STATUSES_A_SECOND
        assert busiest_second([call for call in calls if not is_written_status(call)]) <= MOST_WRITES_A_SECOND


@pytest.mark.slow
def test_every_write_is_refused_for_a_while(scene: Scene, proxy: FaultProxy) -> None:
    with scene.operator(through=proxy) as operator:
        scene.apply("first")
        scene.owned.wait_settled("first")
        writes_of_one = len(proxy.matching(our_write))
        mark = len(proxy.calls)
        proxy.rules.append(AnswerShare(1.0, [500], seed=0, of=our_write))
        scene.apply("first", {"pools.0.ranks": 3})
        scene.apply("second")
        began = time.monotonic()
        poll(lambda: time.monotonic() - began > OUTAGE_S, timeout_s=2 * OUTAGE_S, interval_s=1.0)
        attempts = attempts_by_target(proxy.calls[mark:])
        assert attempts, "nothing was tried"
        # Ever longer pauses: 20 s hold few attempts at one object, the first few of them soon.
        assert max(attempts.values()) <= 12, attempts
        assert min(attempts.values()) >= 2, attempts
        assert sum(attempts.values()) <= 12 * 2 * writes_of_one
        proxy.rules.clear()
        scene.owned.wait_settled("first", "second", timeout_s=60)
        operator.check()


def attempts_by_target(calls: list[ProxiedCall]) -> dict[str, int]:
    attempts: dict[str, int] = {}
    for call in calls:
        if is_named_write(call):
            target = f"{call.verb} {call.target}"
            attempts[target] = attempts.get(target, 0) + 1
    return attempts


def test_a_server_that_asks_for_time_gets_it(scene: Scene, proxy: FaultProxy) -> None:
    accounts = of("apply", "serviceaccounts")
    with scene.operator(through=proxy):
        proxy.rules.append(AnswerNext(429, of=accounts, retry_after_s=RETRY_AFTER_S))
        scene.apply("x")
        scene.owned.wait_settled("x")
        (refused,) = [call for call in proxy.matching(accounts) if call.code == 429]
        again = [
            call for call in proxy.matching(accounts) if call.target == refused.target and call.number > refused.number
        ]
        assert again
        assert refused.ended is not None
        assert RETRY_AFTER_S <= again[0].started - refused.ended <= RETRY_AFTER_S + 10.0

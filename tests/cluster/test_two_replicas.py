"""Two replicas: one writes. When it dies, stops or leaves, the other takes over, and never do both write.

Who wrote what, and when, is told by the API server's audit log: each replica is a user of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.support.kube.calls import ProxiedCall
from tests.support.kube.fault_proxy import FaultProxy
from tests.support.kube.faults import PASS, Decision, Rule
from tests.support.kube.polling import poll
from tests.support.operator_process import OperatorProcess
from tests.support.operator_scene import Scene

TAKEOVER_S = 20.0
HANDOVER_S = 5.0
FIRST, SECOND = "first", "second"
SHORT_LEASE = {"lease_seconds": "6", "lease_renew_seconds": "4", "lease_retry_seconds": "0.8"}


@contextmanager
def replicas(
    scene: Scene, *, through: FaultProxy | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[tuple[OperatorProcess, OperatorProcess]]:
    """The leader, behind the proxy if there is one, and the other; with a Lease's real times unless said otherwise."""
    leader = scene.new_operator(FIRST, through=through, settings=settings)
    other = scene.new_operator(SECOND, settings=settings)
    with leader:
        leader.wait_leading()
        with other:
            other.wait_ready()
            assert not other.leading()
            yield leader, other


def writers(scene: Scene, since: int) -> list[str]:
    """Replicas in the order of their writes, by when the server received them; each run of one counts once."""
    calls = [
        (call.received, replica) for replica in (FIRST, SECOND) for call in scene.writes(since=since, replica=replica)
    ]
    order: list[str] = []
    for _, replica in sorted(calls):
        if order[-1:] != [replica]:
            order.append(replica)
    return order


def wait_owned(scene: Scene, name: str, *, timeout_s: float) -> float:
    """Seconds until a new resource has its objects."""
    began = time.monotonic()
    scene.apply(name)
    scene.owned.wait_settled(name, timeout_s=timeout_s)
    return time.monotonic() - began


@pytest.mark.slow
def test_a_leader_that_is_killed_is_succeeded(scene: Scene) -> None:
    with replicas(scene) as (leader, other):
        mark = scene.cluster.audit.mark()
        wait_owned(scene, "a", timeout_s=TAKEOVER_S)
        leader.kill()
        wait_owned(scene, "b", timeout_s=TAKEOVER_S)
        assert other.leading()
        assert writers(scene, mark) == [FIRST, SECOND]


def test_a_leader_that_leaves_hands_over(scene: Scene) -> None:
    with replicas(scene) as (leader, _):
        mark = scene.cluster.audit.mark()
        wait_owned(scene, "a", timeout_s=TAKEOVER_S)
        left = time.monotonic()
        os.kill(leader.pid, signal.SIGTERM)
        scene.apply("b")
        scene.owned.wait_settled("b", timeout_s=HANDOVER_S)
        assert time.monotonic() - left <= HANDOVER_S
        poll(lambda: leader.exit_status is not None, timeout_s=HANDOVER_S)
        assert leader.exit_status == 0
        assert writers(scene, mark) == [FIRST, SECOND]


class StopAt(Rule):
    """Stops a process, as a host that hangs does, at its n-th write but those to its Lease; the write is passed on."""

    def __init__(self, number: int, pid: int) -> None:
        self._left = number
        self._pid = pid

    @property
    def stopped(self) -> bool:
        return self._left <= 0

    def before(self, call: ProxiedCall) -> Decision:
        if call.is_write and call.target.resource != "leases" and not self.stopped:
            self._left -= 1
            if self.stopped:
                os.kill(self._pid, signal.SIGSTOP)
        return PASS


@pytest.mark.slow
@pytest.mark.parametrize("at_write", [1, 7])
def test_a_leader_that_hung_writes_no_more(scene: Scene, at_write: int) -> None:
    """Stopped in the middle of its work, with more to write; it wakes when another leads, and must not go on."""
    with scene.proxy(FIRST) as proxy, replicas(scene, through=proxy, settings=SHORT_LEASE) as (leader, other):
        mark = scene.cluster.audit.mark()
        stop = StopAt(at_write, leader.pid)
        proxy.rules.append(stop)
        for name in ("a", "b", "c"):
            scene.apply(name)
        poll(lambda: stop.stopped, timeout_s=20)
        other.wait_leading(timeout_s=TAKEOVER_S)
        scene.owned.wait_settled("a", "b", "c", timeout_s=TAKEOVER_S)
        # Work for whoever leads, at the moment when both are awake.
        for name in ("a", "b", "c"):
            scene.apply(name, {"pools.0.ranks": 3})
        os.kill(leader.pid, signal.SIGCONT)
        for name in ("d", "e", "f"):
            scene.apply(name)
        scene.owned.wait_settled(timeout_s=TAKEOVER_S)
        scene.wait_quiet(replica=SECOND)
        assert writers(scene, mark) == [FIRST, SECOND]
        assert other.leading()
        assert not leader.leading()
        # What it had been told to do it did not do in secret either: it stands by, and can lead again.
        if not leader.running:
            leader.start()
        other.kill()
        wait_owned(scene, "g", timeout_s=2 * TAKEOVER_S)
        assert writers(scene, mark) == [FIRST, SECOND, FIRST]

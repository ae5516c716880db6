"""A node refuses pods for ever, and the StatefulSet controller makes them anew at once, for ever: the budget ends it.

The test is the kubelet that refuses: every rank pod fails with TopologyAffinityError a moment after it was made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from hetero_api.contract import KIND, LABEL_ROLE, ROLE_RANK
from tests.support.kube.client import Client, Object
from tests.support.kube.errors import ApiError
from tests.support.kube.kubelet import TOPOLOGY_MESSAGE, Kubelet
from tests.support.kube.polling import poll
from tests.support.operator_scene import Scene

MAX_RESTARTS = 2
SETTINGS = {"pools.0.ranks": 1, "recovery.maxRestarts": MAX_RESTARTS, "recovery.windowSeconds": 3600}
FIRST_GAP_S = 30.0
# The StatefulSet controller makes one more before it hears of the hold, if it is quick.
SLACK = 2
PERIOD_S = 0.2
REFUSAL_DELAY_S = 2.0


class RefusingKubelet:
    """Fails every rank pod of a namespace two seconds after it was made, and counts them."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._kubelet = Kubelet(client, namespace)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="refusing-kubelet", daemon=True)
        self.seen: dict[str, int] = {}
        """Rounds that each rank pod was seen in, by uid."""

    def pods(self) -> list[Object]:
        """Rank pods that there are now."""
        return list(self._client.list_all("Pod", self._namespace, labels=f"{LABEL_ROLE}={ROLE_RANK}"))

    def _work(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                for pod in self.pods():
                    self._look_at(pod)
            except ApiError:  # it was deleted meanwhile
                continue

    def _look_at(self, pod: Object) -> None:
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        self.seen[uid] = self.seen.get(uid, 0) + 1
        if pod["metadata"].get("deletionTimestamp"):
            self._client.delete("Pod", name, self._namespace, grace_s=0)
        elif pod["status"]["phase"] != "Failed" and self.seen[uid] * PERIOD_S >= REFUSAL_DELAY_S:
            self._kubelet.event(name, "TopologyAffinityError", TOPOLOGY_MESSAGE)
            self._kubelet.topology_affinity_error(name)

    @contextmanager
    def working(self) -> Iterator[RefusingKubelet]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            self._thread.join()


def restarts(resource: Object) -> dict[str, Any]:
    found: dict[str, Any] = resource.get("status", {}).get("restarts", {})
    return found


def replicas(scene: Scene) -> int:
    return int(scene.client.get("StatefulSet", "x-cpu", scene.namespace)["spec"]["replicas"])


def wait_held(scene: Scene, *, attempts: int, timeout_s: float) -> dict[str, Any]:
    """What the status tells of restarts, once the pool is held for the so-manieth time."""

    def held(resource: Object) -> bool:
        told = restarts(resource)
        return bool(told.get("nextAttemptTime")) and told.get("attempts") == attempts and replicas(scene) == 0

    return restarts(scene.client.wait_for(KIND, "x", scene.namespace, until=held, timeout_s=timeout_s))


def seconds_until(time: str) -> float:
    return (datetime.fromisoformat(time) - datetime.now(UTC)).total_seconds()


def assert_tells_why(text: str) -> None:
    assert "TopologyAffinityError" in text, text


@pytest.mark.slow
@pytest.mark.minutes(1)
def test_pods_that_fail_for_ever_are_held_for_ever_longer(scene: Scene) -> None:
    scene.add_node()
    kubelet = RefusingKubelet(scene.client, scene.namespace)
    with scene.operator(), kubelet.working():
        scene.apply("x", SETTINGS)
        # The budget, then a hold.
        told = wait_held(scene, attempts=1, timeout_s=40)
        assert told["count"] > MAX_RESTARTS
        assert_tells_why(told["lastReason"])
        assert len(kubelet.seen) <= 1 + MAX_RESTARTS + SLACK
        assert FIRST_GAP_S - 15 <= seconds_until(told["nextAttemptTime"]) <= FIRST_GAP_S
        condition = scene.wait_for_condition("x", "Degraded", "True", reason="RestartBudgetExhausted")
        assert_tells_why(condition["message"])
        scene.wait_for_condition("x", "Ready", "False")
        before = len(kubelet.seen)
        # One attempt when the gap is over, then one that is twice as long.
        told = wait_held(scene, attempts=2, timeout_s=FIRST_GAP_S + 20)
        assert_tells_why(told["lastReason"])
        assert len(kubelet.seen) - before <= 1 + SLACK
        assert 2 * FIRST_GAP_S - 15 <= seconds_until(told["nextAttemptTime"]) <= 2 * FIRST_GAP_S
        # Nothing more happens while it is held, once the pod is gone that the controller may have made meanwhile.
        poll(lambda: not kubelet.pods(), timeout_s=15)
        made = len(kubelet.seen)
        scene.wait_quiet(quiet_s=5.0)
        assert len(kubelet.seen) == made
        # Another spec deserves another chance, at once and with the whole budget.
        scene.apply("x", {**SETTINGS, "podMetadata.labels": {"try": "again"}})
        poll(lambda: len(kubelet.seen) > made, timeout_s=15)
        told = wait_held(scene, attempts=1, timeout_s=40)
        assert_tells_why(told["lastReason"])
        assert MAX_RESTARTS <= len(kubelet.seen) - made <= 1 + MAX_RESTARTS + SLACK

"""A tour through all that the operator does with its rights, in one namespace; fails where something does not happen.

Each step ends with what a person would see: objects, status, Events, pods; never with the operator's log. No gateway
answers, and pods stay unscheduled but for the one whose node is gone: the API server lets go of them at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from hetero_api.contract import KIND, LABEL_NAME, LABEL_REVISION
from hetero_operator.cluster.resources import FRESH_S
from tests.support.hetero_resources import ABSENT, SPEC, resource
from tests.support.kube.client import Client, Object
from tests.support.kube.kubelet import Kubelet
from tests.support.kube.polling import poll
from tests.support.owned_objects import Key

T = TypeVar("T")

NAME: Final = "x"
CLAIMING: Final = "y"
WAITING: Final = "z"
TEMPLATES: Final = "resource.k8s.io/v1/ResourceClaimTemplate"
NODE: Final = "node-of-tours"
"""Whoever makes tours makes it, and makes it Ready."""
LOST_NODE: Final = "node-that-is-gone"
POLL_S: Final = 0.75
"""Many tours look at the same time: four times a second they keep a core busy with nothing else."""
LONGEST_S: Final = 480.0
"""For a tour with every right, and for the others while that one lasts."""
SLACK: Final = 1.6
GRACE_S: Final = 5.0
QUIET_MARGIN_S: Final = 1.0
MOUNT_MESSAGE: Final = 'MountVolume.SetUp failed for volume "shared-memory"'

OPTIONAL: Final[Mapping[str, Any]] = {
    "scheduling.gang": {"scheduler": "Volcano"},
    "disruptionBudget.enabled": True,
    "networkPolicy.enabled": True,
    "monitoring.podMonitor": True,
    "router.type": "SMG",
}
"""Asks for every object that a resource can have but claims."""
NONE_OF_IT: Final[Mapping[str, Any]] = {
    "scheduling.gang": ABSENT,
    "disruptionBudget.enabled": False,
    "networkPolicy.enabled": False,
    "monitoring.podMonitor": False,
    "router.type": "None",
    "model.revision": "second",
}
"""Asks for none of them, and for a roll-out."""

ALWAYS: Final = (
    Key("StatefulSet", "x-cpu"),
    Key("Deployment", "x-gateway"),
    Key("Service", "x"),
    Key("Service", "x-gateway"),
    Key("Service", "x-ranks"),
    Key("ServiceAccount", "x-gateway"),
    Key("ServiceAccount", "x-rank"),
)
ASKED_FOR: Final = (
    Key("NetworkPolicy", "x-gateway"),
    Key("NetworkPolicy", "x-ranks"),
    Key("PodDisruptionBudget", "x-ranks"),
    Key("PodMonitor", "x"),
    Key("PodGroup", "x"),
    Key("PodDisruptionBudget", "x-router"),
    Key("Deployment", "x-router"),
    Key("Service", "x-router"),
    Key("ServiceAccount", "x-router"),
    Key("Role", "x-router"),
    Key("RoleBinding", "x-router"),
)
OF_A_REVISION: Final = ("ConfigMap", "Secret")


class Pace:
    """How long tours made side by side may take over each step: one has every right, and who needs much longer fails.

    So a slow machine fails nobody, and a tour that succeeds without a right is given the time to; one that fails
    ends soon, and leaves the machine to the others.
    """

    def __init__(self) -> None:
        self._ended_s: dict[str, float] = {}
        self._turn = threading.Lock()

    def record(self, step: str, seconds: float) -> None:
        """Records when the tour with every right has ended a step, in seconds from its begin."""
        with self._turn:
            self._ended_s[step] = seconds

    def limit_s(self, step: str) -> float:
        """Returns by when a tour is to have ended a step, in seconds from its begin."""
        with self._turn:
            ended_s = self._ended_s.get(step)
        return LONGEST_S if ended_s is None else min(LONGEST_S, SLACK * ended_s + GRACE_S)


@dataclass(slots=True)
class Tour:
    """Through one namespace, in which nothing of ours is yet. `client` is the administrator's."""

    client: Client
    namespace: str
    pace: Pace
    entitled: bool
    """Whether the operator has every right here."""
    _begin: float = field(default_factory=time.monotonic)
    _step: str = ""

    def run(self) -> str:
        """All of it; what did not happen, "" when all did."""
        try:
            for step in (
                self.begin_to_wait,
                self.create_everything,
                self.count_what_is_said_twice,
                self.mend_what_somebody_deleted,
                self.replace_a_pod_on_a_node_that_is_gone,
                self.roll_out_without_the_optional_objects,
                self.claim_cores_and_give_them_back,
                self.put_all_ranks_into_one_pod,
                self.make_a_pool_change_it_and_take_it_away,
                self.add_a_replica_and_take_it_away,
                self.tell_what_is_waited_for,
            ):
                self._step = step.__name__
                step()
                if self.entitled:
                    self.pace.record(self._step, time.monotonic() - self._begin)
        except AssertionError as failure:
            return str(failure) or "failed"
        return ""

    def create_everything(self) -> None:
        """Every object that a resource can own, and its status; no pods yet."""
        self._apply({**OPTIONAL, "suspend": True})
        self._wait_there(ALWAYS + ASKED_FOR)
        self._wait_for_one_revision()
        self._wait_looked_at()

    def begin_to_wait(self) -> None:
        """A pod whose containers do not start, and the reason for it, which is told in an Event only."""
        self._apply({}, name=WAITING)
        pod = self._pod(f"{WAITING}-cpu-0")["metadata"]["name"]
        kubelet = Kubelet(self.client, self.namespace)
        kubelet.creating(pod, node=NODE)
        kubelet.event(pod, "FailedMount", MOUNT_MESSAGE)

    def tell_what_is_waited_for(self) -> None:
        """The status has the Event's message, after a while."""
        self._wait_for_status(lambda status: MOUNT_MESSAGE in str(status), f"says {MOUNT_MESSAGE!r}", name=WAITING)

    def count_what_is_said_twice(self) -> None:
        """The same Event again is counted, not repeated."""
        for suspend in (True, False, True, False):
            self._apply({**OPTIONAL, "suspend": suspend})
            self._wait_looked_at()
        self._wait_for_pods()
        self._wait(
            lambda: any(event["count"] >= 2 for event in self._events()),
            lambda: f"no Event was counted: {[(event['reason'], event['message']) for event in self._events()]}",
        )

    def mend_what_somebody_deleted(self) -> None:
        """Long after anything was last heard of the resource itself, which has to be asked for again then."""
        self._wait_quiet()
        uid = self._client_service()["metadata"]["uid"]
        self.client.delete("Service", NAME, self.namespace)
        self._wait(
            lambda: (self._client_service() or {"metadata": {"uid": uid}})["metadata"]["uid"] != uid,
            lambda: "the Service that was deleted did not come back",
        )

    def replace_a_pod_on_a_node_that_is_gone(self) -> None:
        """Nobody else would ever delete it: its kubelet is gone too."""
        uid = self._pod("x-cpu-1")["metadata"]["uid"]
        self._bind("x-cpu-1", LOST_NODE)
        self._wait_for_pod("x-cpu-1", lambda pod: pod["metadata"]["uid"] != uid)

    def roll_out_without_the_optional_objects(self) -> None:
        """New pods for old ones; what is not asked for any more, and what is of the old revision, goes."""
        before = _revision(self._pod("x-cpu-0"))
        self._apply(NONE_OF_IT)
        self._wait_looked_at()
        self._wait_for_pod("x-cpu-0", lambda pod: _revision(pod) != before)
        self._wait_gone(ASKED_FOR)
        self._wait_there(ALWAYS)
        self._wait_for_one_revision()

    def claim_cores_and_give_them_back(self) -> None:
        """Another resource, which is suspended: servers that lack the API lack the fields of pods that go with it."""
        claim = {"policy": "BestEffort", "claim": {"deviceClassName": "dra.cpu"}}
        self._apply({"pools.0.cpu.numa": claim, "suspend": True}, name=CLAIMING)
        self._wait_for_count(TEMPLATES, CLAIMING, 1)
        # Not by server-side apply: Kubernetes 1.20 leaves a null where it takes something out of a keyed list.
        self.client.patch(KIND, CLAIMING, {"spec": {"pools": SPEC["pools"]}}, self.namespace)
        self._wait_for_count(TEMPLATES, CLAIMING, 0)

    def make_a_pool_change_it_and_take_it_away(self) -> None:
        """An InferencePool comes, has another port, and goes with the router's type."""
        for port in (9002, 9003):
            router = {"type": "InferencePool", "endpointPickerRef": {"name": "picker", "port": port}}
            self.client.patch(KIND, CLAIMING, {"spec": {"router": router}}, self.namespace)
            self._wait_for_picker(port)
        self.client.patch(KIND, CLAIMING, {"spec": {"router": None}}, self.namespace)
        self._wait_for_object(Key("InferencePool", CLAIMING), there=False)

    def _wait_for_picker(self, port: int) -> None:
        def probe() -> bool:
            found = self.client.find("InferencePool", CLAIMING, self.namespace)
            return found is not None and found["spec"]["endpointPickerRef"]["port"]["number"] == port

        self._wait(probe, lambda: f"there is no InferencePool whose picker listens at {port}")

    def add_a_replica_and_take_it_away(self) -> None:
        """What a replica has of its own comes and goes with it."""
        own = (Key("Deployment", f"{CLAIMING}-1-gateway"), Key("Service", f"{CLAIMING}-1-gateway"))
        for replicas, there in ((2, True), (1, False)):
            self.client.patch(KIND, CLAIMING, {"spec": {"replicas": replicas}}, self.namespace)
            for key in own:
                self._wait_for_object(key, there=there)

    def put_all_ranks_into_one_pod(self) -> None:
        """One StatefulSet comes for all pools, and those of the pools go."""
        self.client.patch(KIND, CLAIMING, {"spec": {"topology": {"colocate": "Pod"}}}, self.namespace)
        self._wait_for_object(Key("StatefulSet", f"{CLAIMING}-ranks"), there=True)
        self._wait_for_object(Key("StatefulSet", f"{CLAIMING}-cpu"), there=False)

    def _apply(self, changes: Mapping[str, Any], *, name: str = NAME) -> None:
        self.client.apply(resource(name, self.namespace, changes))

    def _bind(self, pod: str, node: str) -> None:
        """As the scheduler did while the node was there. The pod may be gone a moment later, so it is not looked at."""
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        self.client.request("POST", f"/api/v1/namespaces/{self.namespace}/pods/{pod}/binding", binding)

    def _wait(self, probe: Callable[[], T | None], describe: Callable[[], str]) -> T:
        """Until the probe is true or the step's time is over."""
        failure: list[str] = []

        def look() -> tuple[T | None] | None:
            value = probe()
            if not value and time.monotonic() - self._begin > self.pace.limit_s(self._step):
                failure.append(describe())
                return (None,)
            return (value,) if value else None

        (value,) = poll(look, timeout_s=2 * LONGEST_S, interval_s=POLL_S, describe=describe)
        assert value, failure[0]
        return value

    def _wait_looked_at(self) -> None:
        generation = self.client.get(KIND, NAME, self.namespace)["metadata"]["generation"]
        self._wait_for_status(
            lambda status: status.get("observedGeneration", 0) >= generation, f"tells of generation {generation}"
        )

    def _wait_for_status(self, until: Callable[[Object], bool], what: str, *, name: str = NAME) -> None:
        def status() -> Object:
            found: Object = self.client.get(KIND, name, self.namespace).get("status", {})
            return found

        self._wait(lambda: until(status()), lambda: f"no status that {what}: {status()}")

    def _wait_quiet(self) -> None:
        """Until the resource has not changed for longer than the operator takes its own word for it."""
        seen, since_s = "", time.monotonic()

        def is_quiet() -> bool:
            nonlocal seen, since_s
            version = self.client.get(KIND, NAME, self.namespace)["metadata"]["resourceVersion"]
            if version != seen:
                seen, since_s = version, time.monotonic()
            return time.monotonic() - since_s > FRESH_S + QUIET_MARGIN_S

        self._wait(is_quiet, lambda: "the resource is written to again and again")

    def _client_service(self) -> Object:
        found: Object = self.client.find("Service", NAME, self.namespace) or {}
        return found

    def _wait_there(self, keys: Sequence[Key]) -> None:
        for key in keys:  # one after another, so that waiting costs one call at a time
            self._wait_for_object(key, there=True)

    def _wait_gone(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._wait_for_object(key, there=False)

    def _wait_for_object(self, key: Key, *, there: bool) -> None:
        self._wait(
            lambda: (self.client.find(key.kind, key.name, self.namespace) is not None) == there,
            lambda: f"{key} is {'not' if there else 'still'} there",
        )

    def _wait_for_one_revision(self) -> None:
        """What there is one of for each revision is there once."""
        for kind in OF_A_REVISION:
            self._wait_for_count(kind, NAME, 1)

    def _wait_for_count(self, kind: str, owner: str, count: int) -> None:
        labels = f"{LABEL_NAME}={owner}"
        self._wait(
            lambda: len(self.client.list_all(kind, self.namespace, labels=labels)) == count,
            lambda: f"of {kind} there are not {count}",
        )

    def _wait_for_pods(self) -> None:
        """All that the StatefulSet is to have, and none that it is about to delete."""

        def complete() -> bool:
            found = self.client.get("StatefulSet", "x-cpu", self.namespace)
            seen = found["status"].get("observedGeneration") == found["metadata"]["generation"]
            return bool(seen and found["spec"]["replicas"] == found["status"]["replicas"] == 2)

        self._wait(complete, lambda: "there are not two pods")

    def _wait_for_pod(self, name: str, until: Callable[[Object], bool]) -> None:
        def probe() -> bool:
            found = self.client.find("Pod", name, self.namespace)
            return found is not None and until(found)

        self._wait(probe, lambda: f"pod {name} is not replaced")

    def _pod(self, name: str) -> Object:
        return self._wait(lambda: self.client.find("Pod", name, self.namespace), lambda: f"there is no pod {name}")

    def _events(self) -> list[Object]:
        selector = f"involvedObject.kind={KIND},involvedObject.name={NAME}"
        return self.client.list_all("v1/Event", self.namespace, fields=selector)


def _revision(pod: Object) -> str:
    return str(pod["metadata"]["labels"][LABEL_REVISION])

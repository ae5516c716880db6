"""The operator is killed at every single write of a create and of a roll-out; a new one makes of it what an undisturbed
one would have.

The fault proxy kills it with SIGKILL, either before the API server sees a call or after it has done it. Each killed
operator's successor finishes that resource and then works on the next, and is killed in turn at the first write that
none was killed at yet. Writes are told apart by what they write and how often that was written before, for their order
is not always the same. The series ends with a resource that is done without a new one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal

import pytest

from hetero_api.contract import LABEL_NAME
from tests.support.kube.calls import ProxiedCall
from tests.support.kube.fault_proxy import FaultProxy
from tests.support.kube.faults import AtCall
from tests.support.kube.polling import poll
from tests.support.operator_process import OperatorProcess
from tests.support.operator_scene import Scene
from tests.support.owned_objects import Owned, normalised_all, unsettled

Moment = Literal["before", "after"]
Begin = Callable[[Scene, str], None]

MOST_WRITES = 60
ROLL_OUT = {"pools.0.cpu.coresPerRank": 2, "model.dtype": "float32"}
STRIKE_TIMEOUT_S = 20.0
CONVERGE_TIMEOUT_S = 30.0


def create(scene: Scene, name: str) -> None:
    scene.apply(name)


def roll_out(scene: Scene, name: str) -> None:
    """A change of what ranks and gateway are started with; the resource was there before."""
    scene.apply(name, ROLL_OUT)


def was_there(scene: Scene, name: str) -> None:
    scene.apply(name)
    scene.owned.wait_settled(name)
    scene.wait_quiet(quiet_s=1.0)


def nothing(scene: Scene, name: str) -> None:
    """What a create begins with."""


@pytest.fixture
def proxy(scene: Scene) -> Iterator[FaultProxy]:
    with scene.proxy() as proxy:
        yield proxy


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("prepare", "begin"), [(nothing, create), (was_there, roll_out)], ids=["create", "roll-out"])
def test_a_kill_at_any_write_leaves_nothing_wrong(
    scene: Scene, proxy: FaultProxy, prepare: Begin, begin: Begin, when: Moment
) -> None:
    # Started again, it has the same name, and need not wait for its own Lease: that is test_two_replicas' business.
    operator = scene.new_operator(through=proxy)
    with operator:
        operator.wait_leading()
        prepare(scene, "undisturbed")
        begin(scene, "undisturbed")
        scene.owned.wait_settled("undisturbed")
        scene.wait_quiet()
        undisturbed = scene.owned.of("undisturbed")
        hit: list[str] = []
        for number in range(1, MOST_WRITES):
            name = f"killed-{number:03}"
            prepare(scene, name)
            new = NewWrites(name, hit)
            strike = AtCall(1, operator.kill, when=when, of=new)
            proxy.rules.append(strike)
            begin(scene, name)
            if not struck(scene, operator, strike, name):
                break
            proxy.rules.clear()
            hit.append(new.found)
            operator.start()
            operator.wait_leading()
            wait_same(scene, name, undisturbed, operator, hit)
        assert MOST_WRITES > number >= 10, hit
        assert_each_kind_was_hit(hit)


class NewWrites:
    """The filter for writes to a resource and to what it owns, Events about it too, that are not in a list."""

    def __init__(self, name: str, known: Collection[str]) -> None:
        self._name = name
        self._known = known
        self._times: Counter[str] = Counter()
        self.found = ""
        """The first new write: after it, none is any more."""

    def __call__(self, call: ProxiedCall) -> bool:
        target = call.target
        # A created object's name is not in the path; only one resource is worked on at a time.
        ours = call.verb == "create" or target.name.startswith(self._name)
        if self.found or not call.is_write or target.resource == "leases" or not ours:
            return False
        what = f"{call.verb} {target}".replace(self._name, "NAME")
        self._times[what] += 1
        named = f"{what} (time {self._times[what]})"
        self.found = "" if named in self._known else named
        return bool(self.found)


def struck(scene: Scene, operator: OperatorProcess, strike: AtCall, name: str) -> bool:
    """Whether the call came; else the resource is done without so many calls."""

    def probe() -> str | None:
        if strike.call is not None and not operator.running:
            return "struck"
        return "done" if is_done(scene, name) and strike.call is None else None

    return poll(probe, timeout_s=STRIKE_TIMEOUT_S, describe=operator.log_tail) == "struck"


def is_done(scene: Scene, name: str) -> bool:
    """Whether nothing more will be written for a resource."""
    try:
        scene.owned.wait_settled(name, timeout_s=0)
    except AssertionError:
        return False
    scene.wait_quiet()
    return True


def wait_same(scene: Scene, name: str, undisturbed: Owned, operator: OperatorProcess, hit: list[str]) -> None:
    """Until there is exactly one of each object, the same as if nothing had happened; no restart is counted."""
    wanted = facts(undisturbed)
    found: dict[str, Any] = {}

    def same() -> bool:
        operator.check()
        found.clear()
        found.update(facts(scene.owned.of(name)))
        return found == wanted

    def differences() -> str:
        wrong = {
            key: (found.get(key), wanted.get(key)) for key in {*found, *wanted} if found.get(key) != wanted.get(key)
        }
        return f"killed at {hit[-1]}; found, wanted: {json.dumps(wrong, indent=1)}\n{operator.log_tail()}"

    poll(same, timeout_s=CONVERGE_TIMEOUT_S, describe=differences)


def facts(owned: Owned) -> dict[str, Any]:
    """All that has to be equal."""
    unsettledness = unsettled(owned)
    return {**normalised_all(owned), "pods": pods(owned), "status": status(owned), "unsettled": unsettledness}


def pods(owned: Owned) -> list[dict[str, str]]:
    labels = [dict(pod["metadata"]["labels"]) for pod in owned.pods]
    for label in labels:
        label[LABEL_NAME] = "NAME"
        for hashed in ("pod-template-hash", "controller-revision-hash"):  # the name is in the template
            label.pop(hashed, None)
    return sorted((json.loads(json.dumps(label).replace(owned.name, "NAME")) for label in labels), key=str)


def status(owned: Owned) -> dict[str, Any]:
    found = owned.resource.get("status", {})
    return {
        "conditions": sorted((one["type"], one["status"], one["reason"]) for one in found.get("conditions", [])),
        "revision": found.get("revision"),
        "gatewayRevision": found.get("gatewayRevision"),
        "restarts": found.get("restarts", {}).get("count", 0),
    }


def assert_each_kind_was_hit(hit: list[str]) -> None:
    """The series went through all that the operator writes, the status too."""
    for resource in ("secrets", "configmaps", "statefulsets", "deployments", " status "):
        assert any(resource in call for call in hit), hit

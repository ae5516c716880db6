"""The operator is killed after every write of a roll-out over two replicas; its successors finish it all the same.

Each operator does one write, and gets SIGKILL by the fault proxy before it hears of the answer. So the next one begins
in each of the states that a roll-out goes through. What comes of it is what an undisturbed operator makes, no restart
is counted, and one replica serves all the time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.test_kill_anywhere import facts, is_done
from tests.cluster.test_replicas import NEW, Resource
from tests.support.kube.calls import ProxiedCall
from tests.support.kube.faults import AtCall
from tests.support.kube.polling import poll
from tests.support.operator_process import OperatorProcess
from tests.support.operator_scene import Scene
from tests.support.played_groups import PlayedGroups

MOST_KILLS = 150
LEAST_KILLS = 14
"""Of each replica: ConfigMap, Secret, gateway, set of pods, pods, and the two deletions of what is over."""
STRIKE_TIMEOUT_S = 60.0
TWO = {"replicas": 2}


@pytest.fixture
def groups(scene: Scene) -> Iterator[PlayedGroups]:
    scene.add_node()
    with PlayedGroups(scene.client, scene.namespace) as groups:
        yield groups


def rolled_out(scene: Scene, name: str) -> Resource:
    """A resource of two replicas that serve, with a new spec."""
    scene.apply(name, TWO)
    resource = Resource(scene, name)
    resource.wait_ready(2)
    scene.wait_quiet(quiet_s=1.0)
    scene.apply(name, {**TWO, **NEW})
    return resource


def is_write(call: ProxiedCall) -> bool:
    return call.is_write and call.target.resource != "leases"


@pytest.mark.slow
@pytest.mark.minutes(1.3)
@pytest.mark.timeout(600)
def test_a_roll_out_survives_a_kill_after_each_of_its_writes(scene: Scene, groups: PlayedGroups) -> None:
    with scene.proxy() as proxy, scene.new_operator(through=proxy) as operator:
        operator.wait_leading()
        rolled_out(scene, "undisturbed").wait_ready(2)
        scene.wait_quiet()
        wanted = facts(scene.owned.of("undisturbed"))
        scene.apply("killed", TWO)
        resource = Resource(scene, "killed")
        resource.wait_ready(2)
        scene.wait_quiet(quiet_s=1.0)
        groups.watch()
        hit: list[str] = []
        strike = AtCall(1, operator.kill, when="after", of=is_write)
        proxy.rules.append(strike)
        scene.apply("killed", {**TWO, **NEW})
        while struck(scene, operator, strike, resource):
            hit.append(str(strike.call))
            assert len(hit) < MOST_KILLS, hit
            strike = AtCall(1, operator.kill, when="after", of=is_write)
            proxy.rules[:] = [strike]
            operator.start()
        assert len(hit) >= LEAST_KILLS, hit
        for resource_kind in ("secrets", "configmaps", "statefulsets", "deployments", "pods", " status "):
            assert any(resource_kind in call for call in hit), (resource_kind, hit)
        assert facts(scene.owned.of("killed")) == wanted
        assert resource.found()["status"]["updatedReplicas"] == 2
        assert groups.least_serving == 3, "two of the other resource, and one of this"


def struck(scene: Scene, operator: OperatorProcess, strike: AtCall, resource: Resource) -> bool:
    """Whether the operator was killed at a write; else all is done."""

    def probe() -> str | None:
        if strike.call is not None:
            return None if operator.running else "struck"
        is_rolled_out = resource.is_ready(2) and is_done(scene, resource.name)
        return "done" if is_rolled_out and strike.call is None else None

    return poll(probe, timeout_s=STRIKE_TIMEOUT_S, describe=operator.log_tail) == "struck"

"""What is told while things change: transitions and their times, Events once each, and when to look again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from hetero_api.group_state import GroupState
from hetero_operator.reconcile.model import Report
from tests.support import pod_statuses as pods
from tests.support.status_scene import GATEWAY, StatusScene, conditions, events, message

GPU, CPU0, CPU1 = "x-gpu-0", "x-cpu-0", "x-cpu-1"
PULL = 'Back-off pulling image "registry.example/hetero-cpu:0.1.0"'


def time_of(told: Report, kind: str) -> str:
    return str(next(item["lastTransitionTime"] for item in told.status["conditions"] if item["type"] == kind))


def start(scene: StatusScene) -> None:
    """All pods run, and are not ready."""
    for name in (GPU, CPU0, CPU1, GATEWAY):
        scene.put(name, pods.running(scene.container(name), ready=False))


def serve(scene: StatusScene) -> None:
    for name in (GPU, CPU0, CPU1, GATEWAY):
        scene.put(name, pods.running(scene.container(name)))
    scene.answer()


def test_a_first_start_is_told_by_one_event() -> None:
    scene = StatusScene.of()
    told = [events(scene.tell())]
    for change in (start, serve):
        scene.pass_time(10)
        change(scene)
        told.append(events(scene.tell()))
    told.append(events(scene.tell()))
    assert told == [[], [], [("Normal", "Ready")], []]


def test_a_time_moves_only_with_its_status() -> None:
    scene = StatusScene.of()
    scene.tell()
    scene.pass_time(60)
    start(scene)
    told = scene.tell()
    assert (conditions(told)["Ready"], time_of(told, "Ready")) == (("False", "Starting"), "2030-01-01T00:00:01Z")
    scene.pass_time(60)
    serve(scene)
    told = scene.tell()
    assert (time_of(told, "Ready"), time_of(told, "Accepted")) == ("2030-01-01T00:02:01Z", "2030-01-01T00:00:01Z")


def test_a_lost_rank_is_told_and_its_return() -> None:
    scene = StatusScene.serving()
    scene.put(CPU1, pods.terminated(exit_code=1, message="boom"))
    scene.answer(state=GroupState.ABORTED, serving=False, reason="rank 3 (x-cpu-1): its stream ended")
    told = scene.tell()
    assert events(told) == [("Warning", "RankExited"), ("Warning", "NotReady")]
    assert told.events[1].message == (
        "RankExited: rank 3 (pod x-cpu-1, node n1): exited with code 1 (it broke while running): boom"
    )
    assert events(scene.tell()) == []
    scene.put(CPU1, pods.restarted(exit_code=1, message="boom", restarts=1))
    scene.answer(state=GroupState.FORMING, serving=False, epoch=2)
    assert events(scene.tell()) == [("Normal", "Recovered")]
    serve(scene)
    scene.answer(epoch=2)
    told = scene.tell()
    assert events(told) == [("Normal", "Ready")]
    assert told.status["epoch"] == 2


def crash_states() -> Iterator[dict[str, Any]]:
    """A container that goes round, after its second end."""
    for restarts in range(2, 8):
        yield pods.restarted(exit_code=1, message=f"2030-01-01 00:0{restarts}:00,1 ERROR boom", restarts=restarts)
        yield pods.terminated(exit_code=1, message=f"2030-01-01 00:0{restarts}:03,9 ERROR boom", restarts=restarts)
        yield pods.crash_loop(exit_code=1, message=f"2030-01-01 00:0{restarts}:03,9 ERROR boom", restarts=restarts)


def test_a_crash_loop_is_told_once_however_often_it_goes_round() -> None:
    scene = StatusScene.of()
    scene.world.resource["spec"]["recovery"] = {"maxRestarts": 100}
    start(scene)
    told = []
    for status in crash_states():
        scene.put(CPU1, status)
        told.append(scene.tell())
        scene.pass_time(7)
    assert {conditions(one)["Ready"] for one in told} == {("False", "RankCrashLoop")}
    assert len({message(one, "Ready") for one in told}) == 1
    assert [events(one) for one in told if events(one)] == [[("Warning", "RankCrashLoop")]]


def test_an_image_that_cannot_be_pulled_is_told_once_with_the_error() -> None:
    scene = StatusScene.of()
    start(scene)
    errors = [("ErrImagePull", pods.PULL_ERROR), ("ImagePullBackOff", PULL)] * 3
    told = []
    for reason, said in errors:
        scene.put(CPU1, pods.waiting("rank", reason, said))
        told.append(scene.tell())
        scene.pass_time(60)
    assert len({str(one.status) for one in told}) == 1
    assert "nope:1: not found" in message(told[-1], "Ready")
    assert "nope:1: not found" in message(told[-1], "Degraded")
    assert [events(one) for one in told if events(one)] == [[("Warning", "ImagePull")]]


def test_an_error_of_another_pod_is_not_kept() -> None:
    scene = StatusScene.of()
    start(scene)
    scene.put(CPU0, pods.waiting("rank", "ErrImagePull", pods.PULL_ERROR))
    scene.tell()
    scene.put(CPU0, pods.running())
    scene.put(CPU1, pods.waiting("rank", "ImagePullBackOff", PULL))
    assert "not found" not in message(scene.tell(), "Ready")


def test_an_old_crash_is_forgotten_by_a_container_that_runs() -> None:
    scene = StatusScene.of()
    start(scene)
    scene.put(CPU1, pods.restarted(exit_code=1, message="boom", restarts=2))
    assert conditions(scene.tell())["Ready"] == ("False", "RankCrashLoop")
    scene.pass_time(600)
    assert conditions(scene.tell())["Ready"] == ("False", "Starting")


# --- what users ask for ---------------------------------------------------------------------------------


def test_a_suspension_is_told_from_the_asking_to_the_last_pod() -> None:
    scene = StatusScene.serving()
    scene.world.change({**scene.world.resource["spec"], "suspend": True})
    told = scene.tell()
    assert events(told) == [("Normal", "Suspended"), ("Normal", "NotReady")]
    found = conditions(told)
    assert (found["Suspended"], found["Progressing"]) == (("False", "Stopping"), ("True", "Stopping"))
    assert {found[kind] for kind in ("Ready", "Scheduled", "ModelReady", "GroupFormed", "GatewayReady")} == {
        ("False", "Suspended")
    }
    assert found["Degraded"] == ("False", "AsExpected")
    assert told.look_again_s is not None
    scene.world.pods.clear()
    scene.gateway = None
    told = scene.tell()
    found = conditions(told)
    assert (found["Suspended"], found["Progressing"]) == (("True", "Suspended"), ("False", "Suspended"))
    assert (told.status["replicas"], told.look_again_s, events(told)) == (0, None, [])
    scene.world.change({**scene.world.resource["spec"], "suspend": False})
    told = scene.tell()
    assert events(told) == [("Normal", "Resumed")]
    assert conditions(told)["Ready"] == ("False", "Starting")


def test_no_replicas_are_told_as_that() -> None:
    scene = StatusScene.of()
    scene.world.change({**scene.world.resource["spec"], "replicas": 0})
    scene.world.pods.clear()
    found = conditions(scene.tell())
    assert (found["Ready"], found["Suspended"]) == (("False", "ScaledToZero"), ("True", "ScaledToZero"))


EVICTED = pods.rejected("Evicted", "The node was low on resource: memory.")


@pytest.mark.parametrize("change", [{"suspend": True}, {"replicas": 0}, {"replicas": 0, "rollout": {"maxSurge": 1}}])
def test_an_evicted_gateway_that_nobody_deletes_holds_no_end_up(change: dict[str, Any]) -> None:
    scene = StatusScene.serving()
    scene.put(GATEWAY, EVICTED)
    ended = scene.pod(GATEWAY)
    scene.world.change({**scene.world.resource["spec"], **change})
    scene.world.pods = {ended["metadata"]["name"]: ended}
    scene.gateway = None
    for _ in range(2):  # the second is of the plan's own doing
        told = scene.tell()
        found = conditions(told)
        assert (found["Suspended"][0], found["Progressing"][0]) == ("True", "False")
        assert (told.status["replicas"], told.look_again_s) == (0, None)


def test_an_evicted_gateway_does_not_hide_its_successor() -> None:
    scene = StatusScene.serving()
    ended = copy.deepcopy(scene.pod(GATEWAY))
    ended["metadata"] |= {"name": "x-gateway-evicted", "creationTimestamp": "2031-01-01T00:00:00Z"}
    ended["status"] = EVICTED
    scene.world.pods["x-gateway-evicted"] = ended
    assert conditions(scene.tell())["Ready"] == ("True", "Serving")


def test_a_roll_out_is_told_until_the_new_pods_serve() -> None:
    scene = StatusScene.serving()
    before = scene.world.resource["status"]["revision"]
    scene.world.change({**scene.world.resource["spec"], "model": {"uri": "hf://a/c"}})
    scene.world.act(scene.world.plan())
    told = scene.tell()
    assert conditions(told)["Ready"] == ("False", "RollingOut")
    assert conditions(told)["Progressing"] == ("True", "RollingOut")
    assert conditions(told)["Degraded"] == ("False", "AsExpected")
    assert events(told) == [("Normal", "RollingOut"), ("Normal", "NotReady")]
    assert message(told, "Ready") == "ranks 0-1 (pod x-gpu-0, node n1): is of an earlier spec"
    assert told.status["revision"] != before
    assert {item["observedGeneration"] for item in told.status["conditions"]} == {2}
    assert events(scene.tell()) == []
    scene.world.run_controllers()
    scene.world.reconcile()
    serve(scene)
    told = scene.tell()
    assert events(told) == [("Normal", "Ready")]
    assert told.status["restarts"]["count"] == 0


# --- what takes too long --------------------------------------------------------------------------------

LIMIT_S = 1800 + 600


def test_a_start_that_takes_too_long_is_told() -> None:
    scene = StatusScene.of()
    start(scene)
    scene.tell()
    scene.pass_time(LIMIT_S - 2)
    told = scene.tell()
    assert conditions(told)["Progressing"] == ("True", "Starting")
    assert told.look_again_s == pytest.approx(2.5)
    scene.pass_time(2)
    told = scene.tell()
    assert conditions(told)["Progressing"] == ("False", "ProgressDeadlineExceeded")
    assert conditions(told)["Degraded"] == ("True", "ProgressDeadlineExceeded")
    assert conditions(told)["Ready"] == ("False", "Starting")
    assert message(told, "Progressing").startswith("Nothing moved for 2400 s; gateway (pod x-gateway-")
    assert events(told) == [("Warning", "ProgressDeadlineExceeded")]
    scene.pass_time(10_000)
    again = scene.tell()
    assert (again.status, events(again)) == (told.status, [])


def test_what_moves_gets_more_time() -> None:
    scene = StatusScene.of()
    scene.tell()
    scene.pass_time(LIMIT_S - 100)
    start(scene)  # Scheduled becomes true
    scene.tell()
    scene.pass_time(LIMIT_S - 100)
    assert conditions(scene.tell())["Progressing"] == ("True", "Starting")


def test_a_model_may_take_any_time_to_fetch() -> None:
    scene = StatusScene.of()
    start(scene)
    scene.put(CPU0, pods.init({"running": {"startedAt": pods.AT}}))
    scene.tell()
    scene.pass_time(100_000)
    assert conditions(scene.tell())["Progressing"] == ("True", "FetchingModel")


def test_a_load_may_take_any_time_that_the_gateway_gives_it() -> None:
    scene = StatusScene.of()
    start(scene)
    scene.answer(serving=False, state=GroupState.LOADING, ranks=scene.ranks(weight_bytes=0))
    scene.tell()
    scene.pass_time(LIMIT_S + 1)
    assert conditions(scene.tell())["Progressing"] == ("True", "LoadingModel")
    scene.answer(serving=False, state=GroupState.FORMING)
    assert conditions(scene.tell())["Progressing"][0] == "True", "a condition has changed"
    scene.pass_time(LIMIT_S + 1)
    assert conditions(scene.tell())["Progressing"] == ("False", "ProgressDeadlineExceeded")


def test_a_start_that_was_too_slow_is_forgiven_when_it_succeeds() -> None:
    scene = StatusScene.of()
    start(scene)
    scene.tell()
    scene.pass_time(LIMIT_S + 1)
    scene.tell()
    serve(scene)
    told = scene.tell()
    assert conditions(told)["Degraded"] == ("False", "AsExpected")
    assert events(told) == [("Normal", "Recovered"), ("Normal", "Ready")]


# --- when to look again ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("waited_s", "poll_s"), [(0, 2), (10, 2), (50, 5), (99, 9.9), (1000, 10), (1900, 30)])
def test_what_is_awaited_is_looked_at_ever_less_often(waited_s: float, poll_s: float) -> None:
    scene = StatusScene.of()
    start(scene)
    scene.tell()
    scene.pass_time(waited_s)
    assert scene.tell().look_again_s == pytest.approx(poll_s)


def test_a_step_that_is_out_is_looked_at_when_it_should_be_back() -> None:
    scene = StatusScene.serving()
    scene.pass_time(5)
    scene.answer(stalled_s=12.0)
    assert scene.report().look_again_s == pytest.approx(48.5)


def test_a_lost_node_is_looked_at_when_its_time_is_over() -> None:
    scene = StatusScene.of()
    start(scene)
    scene.world.nodes["n1"] = pods.node("Unknown")
    scene.tell()
    scene.pass_time(296)
    assert scene.report().look_again_s == pytest.approx(3.5)

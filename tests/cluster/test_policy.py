"""What whoever runs the operator forbids: the operator refuses it on a real API server, field by field."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kube.client import Object
from tests.support.operator_process import OperatorProcess
from tests.support.operator_scene import Scene
from tests.support.policy_cases import CASES, STRICT

REASON = "NotAllowed"
SETTINGS = {name: ",".join(getattr(STRICT, name)) for name in STRICT.__slots__ if name.startswith("allowed_")}


@pytest.fixture
def operator(scene: Scene) -> Iterator[OperatorProcess]:
    with scene.operator(settings=SETTINGS) as operator:
        yield operator


def templates(scene: Scene, name: str) -> list[Object]:
    return [item["spec"] for item in scene.client.list_all("StatefulSet", scene.namespace, labels=labels_of(name))]


def labels_of(name: str) -> str:
    return f"heteroinference.io/name={name}"


def test_each_forbidden_name_is_refused_by_field_and_setting_and_makes_nothing(
    scene: Scene, operator: OperatorProcess
) -> None:
    for number, case in enumerate(CASES):
        scene.apply(f"x{number}", case.forbidden)
    for number, case in enumerate(CASES):
        found = scene.wait_for_condition(f"x{number}", "Accepted", "False", reason=REASON)
        assert found["message"].startswith(case.field)
        assert f"setting {case.setting} (chart value {case.chart_value})" in found["message"]
        assert templates(scene, f"x{number}") == []
    events = scene.client.list_all("Event", scene.namespace, fields=f"reason={REASON}")
    assert {event["involvedObject"]["name"] for event in events} == {f"x{number}" for number in range(len(CASES))}


def test_a_group_that_works_outlives_a_forbidden_spec_and_a_stricter_operator(scene: Scene) -> None:
    folder = {"exchange.hostPath": "/dev/shm"}
    with scene.operator(settings=SETTINGS), scene.autopilot():
        scene.apply("x", folder)
        scene.wait_for_condition("x", "Accepted", "True")
        scene.client.wait_list("Pod", scene.namespace, until=lambda pods: len(pods) == 3)
        before, pods = templates(scene, "x"), pods_of(scene)
        scene.apply("x", {"exchange.hostPath": "/run"})
        scene.wait_for_condition("x", "Accepted", "False", reason=REASON)
        assert (templates(scene, "x"), pods_of(scene)) == (before, pods)
        scene.apply("x", folder)
        scene.wait_for_condition("x", "Accepted", "True")
    with scene.operator(settings={"allowed_host_paths": ""}) as stricter:
        found = scene.wait_for_condition("x", "Accepted", "False", reason=REASON)
        assert "policy.hostPaths), which is empty" in found["message"]
        scene.reconcile_again(stricter)
        assert (templates(scene, "x"), pods_of(scene)) == (before, pods)


def pods_of(scene: Scene) -> set[str]:
    return {pod["metadata"]["uid"] for pod in scene.client.list_all("Pod", scene.namespace)}

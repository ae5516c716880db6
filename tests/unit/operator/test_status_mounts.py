"""Volumes that cannot be mounted: whether the model's is among them, whatever the model comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hetero_api.contract import POD_CACHE_DIR, POD_MODEL_DIR
from hetero_operator.reconcile.manifests.model_volumes import MODEL_VOLUMES
from hetero_operator.reconcile.model import PodEvent
from hetero_operator.reconcile.status.containers import mount_trouble
from hetero_operator.reconcile.status.reasons import Reason
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import render_cases

CASES = render_cases()
BOUND = 'MountVolume.SetUp failed for volume "pvc-0b4c51a4-9d1e-4c0b-8f51-3a4f6d1a7a11" : rpc error: no such share'


def summary(*volumes: str) -> str:
    return (
        f"Unable to attach or mount volumes: unmounted volumes=[{' '.join(volumes)}], unattached volumes=[]: timed out"
    )


def setup(volume: str) -> str:
    return f'MountVolume.SetUp failed for volume "{volume}" : it is not there'


def reason_of(*messages: str) -> Reason:
    trouble = mount_trouble([PodEvent("FailedMount", message) for message in messages])
    assert trouble is not None
    return trouble.reason


def pods(name: str) -> Iterator[dict[str, Any]]:
    todo = OperatorWorld(dict(CASES[name].resource), CASES[name].capabilities).plan()
    yield from (item["spec"]["template"]["spec"] for item in todo.apply if "template" in item.get("spec", {}))


def volumes_at(pod: dict[str, Any], *folders: str) -> set[str]:
    containers = [*pod["containers"], *pod.get("initContainers", ())]
    return {mount["name"] for one in containers for mount in one["volumeMounts"] if mount["mountPath"] in folders}


@pytest.mark.parametrize("name", CASES)
def test_the_model_s_volumes_are_known_in_every_pod_and_no_others(name: str) -> None:
    for pod in pods(name):
        of_model = volumes_at(pod, POD_MODEL_DIR, POD_CACHE_DIR)
        assert bool(of_model) == (pod["containers"][0]["name"] != "router")
        for volume in (item["name"] for item in pod["volumes"]):
            expected = Reason.MODEL_VOLUME_NOT_READY if volume in of_model else Reason.VOLUME_NOT_READY
            assert reason_of(setup(volume)) == reason_of(summary(volume)) == expected, volume


def test_every_name_is_used() -> None:
    used = {volume for name in CASES for pod in pods(name) for volume in volumes_at(pod, POD_MODEL_DIR, POD_CACHE_DIR)}
    assert used == MODEL_VOLUMES


def test_a_claim_s_volume_is_known_by_the_summary_where_the_detail_names_what_is_bound_to_it() -> None:
    assert reason_of(BOUND, summary("model-claim")) == Reason.MODEL_VOLUME_NOT_READY
    assert reason_of(BOUND, summary("scratch")) == Reason.VOLUME_NOT_READY
    assert reason_of(BOUND) == Reason.VOLUME_NOT_READY


def test_of_several_volumes_the_one_that_is_told_of_counts() -> None:
    assert reason_of(setup("group-token"), summary("group-token", "model")) == Reason.VOLUME_NOT_READY
    assert reason_of(setup("model-folder"), summary("group-token", "model-folder")) == Reason.MODEL_VOLUME_NOT_READY

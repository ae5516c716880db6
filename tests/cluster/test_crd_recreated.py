"""The CustomResourceDefinition goes, with every resource, and comes back under the running operator."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import CRD, StartControlPlane
from tests.support.operator_scene import Scene

BACK_TO_WORK_S = 60.0
NAME = "heteroinferences.heteroinference.io"


@pytest.mark.slow
def test_the_operator_outlives_its_own_definition(start_control_plane: StartControlPlane) -> None:
    plane = start_control_plane()
    with Scene.alone(plane.cluster) as scene, scene.operator() as operator:
        pid = operator.pid
        scene.apply("before")
        scene.owned.wait_settled("before")
        for round in ("first", "second"):
            scene.client.delete("CustomResourceDefinition", NAME)
            scene.client.wait_gone("CustomResourceDefinition", NAME, timeout_s=60)
            scene.client.install_crd(CRD)
            scene.apply(round)
            scene.owned.wait_settled(round, timeout_s=BACK_TO_WORK_S)
            assert (operator.pid, operator.running) == (pid, True)
            scene.apply(round, {"pools.0.ranks": 1})
            scene.owned.wait_settled(round)
        # And an operator that starts before there is a definition waits for it.
        scene.client.delete("CustomResourceDefinition", NAME)
        scene.client.wait_gone("CustomResourceDefinition", NAME, timeout_s=60)
        operator.stop()
        with scene.new_operator("early") as early:
            early.wait_metric("hetero_operator_leader", lambda value: value == 1)
            scene.client.install_crd(CRD)
            scene.apply("late")
            scene.owned.wait_settled("late", timeout_s=BACK_TO_WORK_S)

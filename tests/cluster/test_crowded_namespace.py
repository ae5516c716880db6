"""A namespace full of large objects with our label: memory stays bounded, and the other resources are served."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from hetero_api.contract import API_VERSION, GROUP, KIND, LABEL_NAME
from tests.cluster.conftest import StartControlPlane
from tests.support.kube.client import Object
from tests.support.operator_process import OperatorProcess
from tests.support.operator_scene import Scene

STRANGERS: Final = 800
FORGED: Final = 200
MEBIBYTE: Final = 2**20
MAX_PEAK_BYTES: Final = 512 * MEBIBYTE
"""The memory limit of the chart's default pod."""
MAX_SETTLE_S: Final = 5.0
LIST_TIMEOUT_S: Final = 240.0
HEADROOM: Final = 2000
"""Of the 1 MiB that a ConfigMap's data may have."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_large_objects_with_our_label_hold_up_nobody(start_control_plane: StartControlPlane) -> None:
    plane = start_control_plane()
    with Scene.alone(plane.cluster) as scene, scene.operator() as operator:
        victim = scene.apply("victim")
        scene.apply("bystander")
        scene.owned.wait_settled("victim", "bystander")
        with ThreadPoolExecutor(4) as pool:
            crowd = [pool.submit(make, scene, number, victim) for number in range(STRANGERS + FORGED)]
            settle(scene, "during")
            for made in crowd:
                made.result()
        operator.wait_metric("hetero_operator_cached_objects", lambda count: count >= STRANGERS + FORGED)
        settle(scene, "after")
        settle(scene, "bystander", ranks=3)
        operator.wait_metric("hetero_operator_reconcile_errors_total", lambda count: count > 0, reason="OverBudget")
        assert peak_bytes(operator) < MAX_PEAK_BYTES
        # And the same from a list, which a new process begins with: 1 GiB of it.
        operator.restart()
        operator.wait_leading(timeout_s=LIST_TIMEOUT_S)
        settle(scene, "restarted")
        assert peak_bytes(operator) < MAX_PEAK_BYTES


def settle(scene: Scene, name: str, *, ranks: int = 2) -> None:
    """Apply a resource, and see its objects and its status soon. (To list the namespace would take longer.)"""
    begin = time.monotonic()
    generation = scene.apply(name, {"pools.0.ranks": ranks})["metadata"]["generation"]

    def is_told(found: Object) -> bool:
        return bool(found.get("status", {}).get("observedGeneration") == generation)

    def has_ranks(found: Object) -> bool:
        return bool(found["spec"]["replicas"] == ranks)

    scene.client.wait_for("StatefulSet", f"{name}-cpu", scene.namespace, until=has_ranks)
    scene.client.wait_for("Deployment", f"{name}-gateway", scene.namespace)
    scene.client.wait_for(KIND, name, scene.namespace, until=is_told)
    assert time.monotonic() - begin < MAX_SETTLE_S


def make(scene: Scene, number: int, victim: dict[str, Any]) -> None:
    """A ConfigMap of 1 MiB with the victim's label; of the last ones it seems to be the controller, too."""
    metadata: dict[str, Any] = {"name": f"crowd-{number:04}", "namespace": scene.namespace}
    metadata["labels"] = {LABEL_NAME: "victim"}
    if number >= STRANGERS:
        owner = {"apiVersion": f"{GROUP}/{API_VERSION}", "kind": KIND, "name": "victim", "controller": True}
        metadata["ownerReferences"] = [{**owner, "uid": victim["metadata"]["uid"]}]
    data = {"text": "x" * (MEBIBYTE - HEADROOM)}
    with scene.cluster.client() as client:
        client.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def peak_bytes(operator: OperatorProcess) -> int:
    status = Path(f"/proc/{operator.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024

"""The API server goes away for longer than kopf survives on its own, or its etcd does: same process, nothing lost."""

from __future__ import annotations

import signal
import time

import pytest

from hetero_api.contract import KIND
from tests.cluster.conftest import StartControlPlane
from tests.support.kube.polling import poll
from tests.support.operator_process import OperatorProcess
from tests.support.operator_scene import Scene

BACK_TO_WORK_S = 60.0


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("with_signal", "outage_s"),
    [
        pytest.param(signal.SIGTERM, 180.0, id="three minutes, orderly", marks=pytest.mark.minutes(4)),
        pytest.param(signal.SIGKILL, 20.0, id="twenty seconds, cut off"),
    ],
)
def test_the_operator_outlives_its_api_server(
    start_control_plane: StartControlPlane, with_signal: signal.Signals, outage_s: float
) -> None:
    plane = start_control_plane()
    with Scene.alone(plane.cluster) as scene, scene.operator() as operator:
        pid = operator.pid
        scene.apply("before")
        scene.apply("leaves")
        scene.owned.wait_settled("before", "leaves")
        # What the operator has not heard of yet when its watches break: a change and a deletion.
        scene.apply("before", {"pools.0.ranks": 3})
        scene.client.delete(KIND, "leaves", scene.namespace)
        plane.stop_api_server(with_signal)
        outlive(operator, outage_s)
        plane.start_api_server()
        returned, mark = time.monotonic(), plane.cluster.audit.mark()
        scene.apply("after")
        scene.apply("before", {"pools.0.ranks": 4})
        settled = scene.owned.wait_settled("before", "after", timeout_s=BACK_TO_WORK_S)
        assert time.monotonic() - returned <= BACK_TO_WORK_S
        assert [item["spec"]["replicas"] for item in settled["before"].of_kind("StatefulSet")] == [4]
        # What went is left to the garbage collector, which takes its time to come back itself. Where it is faster than
        # the watch of resources, the operator finds one gone as it tells of it, once.
        assert [call.code for call in scene.writes(since=mark) if call.name.startswith("leaves")] in ([], [404])
        assert (operator.pid, operator.running) == (pid, True)
        # Not only once: it hears of changes again.
        scene.apply("later")
        scene.owned.wait_settled("later")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("with_signal", [signal.SIGTERM, signal.SIGKILL])
def test_the_operator_outlives_a_restart_of_etcd(
    start_control_plane: StartControlPlane, with_signal: signal.Signals
) -> None:
    """The API server stays, and answers nothing that it has to ask etcd for."""
    plane = start_control_plane()
    with Scene.alone(plane.cluster) as scene, scene.operator() as operator:
        pid = operator.pid
        scene.apply("before")
        scene.owned.wait_settled("before")
        plane.etcd.stop(with_signal)
        outlive(operator, 20.0)
        plane.etcd.start()
        plane.wait_until_ready()
        scene.apply("before", {"pools.0.ranks": 4})
        scene.apply("after")
        settled = scene.owned.wait_settled("before", "after", timeout_s=BACK_TO_WORK_S)
        assert [item["spec"]["replicas"] for item in settled["before"].of_kind("StatefulSet")] == [4]
        assert (operator.pid, operator.running) == (pid, True)


def outlive(operator: OperatorProcess, outage_s: float) -> None:
    """The whole outage, in which the operator neither ends nor asks its kubelet to be killed."""
    end = time.monotonic() + outage_s

    def over() -> bool:
        operator.check()
        assert operator.healthy(), f"liveness fails while the API server is away\n{operator.log_tail()}"
        return time.monotonic() >= end

    poll(over, timeout_s=outage_s + 10.0, interval_s=1.0)

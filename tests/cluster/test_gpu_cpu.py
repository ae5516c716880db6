"""GPU ranks and CPU ranks in one resource, on a real API server: from `kubectl apply` to what `kubectl get` tells.

The test is the kubelet and the gateway: it runs the pods, and says how the model was spread.
"""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_api.contract import (
    CONFIG_MANIFEST_KEY,
    KIND,
    LABEL_REVISION,
    ROLE_GATEWAY,
    ROLE_RANK,
    SECRET_ADMIN_TOKEN_KEY,
)
from hetero_api.manifest import parse_manifest
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_worker.pod.config import PodConfig
from tests.cluster.conftest import ROOT
from tests.support import pod_statuses
from tests.support.kube.client import Object
from tests.support.kube.kubelet import Kubelet, now
from tests.support.kube.tools import find_kubectl
from tests.support.operator_process import OperatorProcess
from tests.support.operator_scene import Scene
from tests.support.owned_objects import Owned
from tests.support.played_gateway import PlayedGateway, gpu_rank_status, rank_status

READY = admin_pb2.GROUP_STATE_READY
AUTO, TENSOR = ROOT / "examples/gpu-cpu-auto.yaml", ROOT / "examples/gpu-cpu.yaml"
COMMAND_TIMEOUT_S = 30


def kubectl(scene: Scene, *arguments: str) -> str:
    """What it prints."""
    kubeconfig = scene.cluster.admin_kubeconfig
    command = [str(find_kubectl()), "--kubeconfig", str(kubeconfig), "--namespace", scene.namespace, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def apply(scene: Scene, path: Path) -> Owned:
    """An example and all that it owns."""
    # Without client-side validation: 1.20 does not know all that our CRD says.
    kubectl(scene, "apply", "--validate=false", "--filename", str(path))
    name = yaml.safe_load(path.read_text(encoding="utf-8"))["metadata"]["name"]
    return scene.owned.wait_settled(name)[name]


def pods(owned: Owned, role: str) -> dict[str, Object]:
    """Specs by name, as stored."""
    names = owned.pod_uids(role)
    return {pod["metadata"]["name"]: pod["spec"] for pod in owned.pods if pod["metadata"]["name"] in names}


def main_container(spec: Object) -> Object:
    (container,) = spec["containers"]
    found: Object = container
    return found


def options(spec: Object, pod: str) -> PodConfig:
    """Its command line, as the program reads it."""
    return PodConfig.from_command_line(main_container(spec)["args"], {"POD_NAME": pod, "POD_IP": "10.0.0.1"})


def amounts(spec: Object) -> dict[str, str]:
    """Limits of the main container, which are its requests too."""
    resources = main_container(spec)["resources"]
    assert resources["requests"] == resources["limits"]
    found: dict[str, str] = resources["limits"]
    return found


def shared_memory(spec: Object) -> Object:
    """The volume that is /dev/shm, without its name."""
    (name,) = [mount["name"] for mount in main_container(spec)["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == name]
    return {key: value for key, value in volume.items() if key != "name"}


def test_the_pods_of_both_kinds(scene: Scene) -> None:
    with scene.operator():
        ranks = pods(apply(scene, AUTO), ROLE_RANK)
    assert set(ranks) == {"qwen3-8b-auto-gpu-0", "qwen3-8b-auto-cpu-0", "qwen3-8b-auto-cpu-1"}
    gpu, cpu = ranks["qwen3-8b-auto-gpu-0"], ranks["qwen3-8b-auto-cpu-1"]
    assert amounts(gpu) == {"cpu": "8", "memory": "33Gi", "nvidia.com/gpu": "2"}
    assert amounts(cpu) == {"cpu": "32", "memory": "65Gi"}
    assert main_container(gpu)["image"] != main_container(cpu)["image"]
    of_gpu, of_cpu = options(gpu, "qwen3-8b-auto-gpu-0"), options(cpu, "qwen3-8b-auto-cpu-1")
    assert (of_gpu.ranks_per_pod, of_gpu.cuda_devices, of_gpu.threads_per_rank) == (2, (0, 1), 4)
    assert (of_cpu.ranks_per_pod, of_cpu.cuda_devices, of_cpu.ordinal) == (1, (), 1)
    assert (str(of_gpu.numa_policy), str(of_cpu.numa_policy)) == ("None", "Required")
    for spec in ranks.values():
        assert shared_memory(spec) == {"hostPath": {"path": "/dev/shm", "type": "Directory"}}
        (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"


def test_pods_that_do_not_share_memory_have_their_own(scene: Scene) -> None:
    with scene.operator():
        owned = apply(scene, TENSOR)
    for spec in pods(owned, ROLE_RANK).values():
        assert shared_memory(spec) == {"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}


def test_the_gateway_reads_how_the_model_is_to_be_spread(scene: Scene) -> None:
    with scene.operator():
        (config,) = apply(scene, AUTO).of_kind("ConfigMap")
    read = parse_manifest(config["data"][CONFIG_MANIFEST_KEY]).spec
    spec = read.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert spec["exchange"] == {"kind": "Auto", "hostPath": "/dev/shm"}
    assert spec["placement"]["workload"] == {"promptTokens": 1024, "outputTokens": 256, "concurrency": 8}
    assert spec["placement"]["rebalanceExperts"] is True


class ServedGroup:
    """An example whose pods run, with the gateway that the test plays."""

    def __init__(self, scene: Scene, path: Path) -> None:
        self._scene = scene
        owned = apply(scene, path)
        self.name = owned.name
        self._kubelet = Kubelet(scene.client, scene.namespace)
        scene.add_node()
        for pod in pods(owned, ROLE_RANK):
            self._kubelet.run(pod)
        (self._gateway,) = pods(owned, ROLE_GATEWAY)
        revision = owned.resource["status"]["revision"]
        secret = scene.client.get("Secret", f"{self.name}-group-{revision}", scene.namespace)
        self.admin_token = base64.b64decode(secret["data"][SECRET_ADMIN_TOKEN_KEY]).decode()
        assert all(pod["metadata"]["labels"][LABEL_REVISION] == revision for pod in owned.pods)

    def serve_at(self, address: str) -> None:
        self._kubelet.bind(self._gateway)
        status = {**pod_statuses.running("gateway", at=now()), "podIP": address, "podIPs": [{"ip": address}]}
        self._scene.client.patch_status("Pod", self._gateway, status, self._scene.namespace)
        self._scene.wait_for_condition(self.name, "Ready", "True", reason="Serving")

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(kubectl(self._scene, "get", "hinf", self.name, "--output", "json"))["status"]
        return found

    def ranks(self) -> list[admin_pb2.RankStatus]:
        """GPU ranks hold all heads and most columns; the last CPU rank was found to be of no use."""
        gpu, cpu = f"{self.name}-gpu-0", f"{self.name}-cpu"
        helper = rank_status(2, "cpu", f"{cpu}-0")
        helper.shard.layers.add().experts.CopyFrom(ranks_pb2.UnitRange(begin=96, end=128))
        idle = rank_status(3, "cpu", f"{cpu}-1")
        idle.weight_bytes = idle.kv_bytes = 0
        return [
            gpu_rank_status(0, "gpu", gpu, kv_heads=range(4), columns=range(5632)),
            gpu_rank_status(1, "gpu", gpu, kv_heads=range(4, 8), columns=range(5632, 11264)),
            helper,
            idle,
        ]


@pytest.fixture
def operator(scene: Scene) -> Any:
    with scene.operator() as operator:
        yield operator


def test_what_was_weighed_up_predicted_and_measured_is_told(scene: Scene, operator: OperatorProcess) -> None:
    group = ServedGroup(scene, AUTO)
    with PlayedGateway(group.admin_token) as gateway:
        gateway.say(READY, group.ranks())
        group.serve_at(gateway.address)
        status = group.status()
        assert status["placement"] == {
            "mode": "Tensor",
            "exchange": "shm",
            "predictedTokensPerSecond": 120,
            "measuredTokensPerSecond": 120,
            "predictionRatio": 0.96,
            "reason": "Tensor, CPU ranks on MLP only: 118 tokens/s; GPU only would give 96.",
            "options": [
                {
                    "name": "Tensor, CPU ranks on MLP only", "chosen": True,
                    "predictedTokensPerSecond": 120, "predictedPrefillTokensPerSecond": 4300,
                },
                {
                    "name": "GPU only", "chosen": False,
                    "predictedTokensPerSecond": 96, "predictedPrefillTokensPerSecond": 4400,
                },
                {
                    "name": "CPU only", "chosen": False,
                    "whyNot": "rank 2 lacks 3.1 GiB: raise cpu.memoryPerRank",
                },
            ],
        }  # fmt: skip
        heads = [
            (item["rank"], item["pool"], item["device"], item["shares"]["kvHeads"]) for item in status["placements"]
        ]
        assert heads == [
            (0, "gpu", "NVIDIA H200", 4), (1, "gpu", "NVIDIA H200", 4), (2, "cpu", "a CPU", 0), (3, "cpu", "a CPU", 0),
        ]  # fmt: skip
        assert [item["shares"]["experts"] for item in status["placements"]] == [0, 0, 32, 0]
        assert [item["shares"]["weightBytes"] for item in status["placements"]] == [8000, 8000, 1000, 0]
        assert [pool["pinned"] for pool in status["pools"]] == [0, 2]
        head, row = kubectl(scene, "get", "hinf", group.name, "--output", "wide").splitlines()
        assert head.split()[6:9] == ["MODEL", "MODE", "TOK/S"]
        assert row.split()[1:3] == ["True", "4/4"]
        assert row.split()[6:9] == ["hf://Qwen/Qwen3-8B", "Tensor", "120"]

        # Speeds waver; that is not worth a write.
        gateway.topology.placement.measured_tokens_per_second = 127.0
        gateway.topology.placement.step_time_ratio = 0.93
        scene.wait_quiet()
        mark = scene.cluster.audit.mark()
        scene.reconcile_again(operator)
        assert [call for call in scene.writes(since=mark) if call.name == group.name] == []
        assert group.status() == status


def test_an_exchange_that_could_be_faster_says_why(scene: Scene, operator: OperatorProcess) -> None:
    group = ServedGroup(scene, TENSOR)
    why = "ranks 0 and 2 have no /dev/shm in common: set spec.exchange.hostPath"
    with PlayedGateway(group.admin_token) as gateway:
        gateway.say(READY, group.ranks(), exchange=ranks_pb2.EXCHANGE_KIND_GLOO, exchange_reason=why)
        group.serve_at(gateway.address)
        placement = group.status()["placement"]
        assert (placement["exchange"], placement["exchangeReason"]) == ("gloo", why)
        described = kubectl(scene, "get", KIND, group.name, "--output", "jsonpath={.status.placement.exchangeReason}")
        assert described == why

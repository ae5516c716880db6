"""GPU pods on a node that says it has GPUs and has none: rendered and scheduled right, honest about what is missing.

Real GPU ranks are tested by tests/gpu, on real hardware. The image of the CPU ranks stands in for the one with CUDA,
which takes gigabytes: what a rank looks for and how it says so is the same program's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetero_api.contract import VERSION
from tests.e2e.served import CPU_RESOURCES, Served, cpu_manifest, is_because, is_true, told
from tests.e2e.site import Site
from tests.support.kube.client import Object

GPU = "nvidia.com/gpu"
NODE = "node-1"
CAPACITY = f"/status/capacity/{GPU.replace('/', '~1')}"
FAILURE_TIMEOUT_S = 120.0


@pytest.fixture
def node_with_gpus(site: Site) -> Iterator[Object]:
    """A node with two devices by its word, as a device plugin would have it."""
    if not site.nodes:
        pytest.skip("changes the capacity of a node: only on nodes of our own")
    add = [{"op": "add", "path": CAPACITY, "value": "2"}]
    site.client.patch("Node", NODE, add, subresource="status", type="json")
    yield site.client.wait_for("Node", NODE, until=lambda node: node["status"]["allocatable"].get(GPU) == "2")
    site.client.patch("Node", NODE, [{"op": "remove", "path": CAPACITY}], subresource="status", type="json")


@pytest.fixture
def gpu(site: Site, operator: str, namespace: str, node_with_gpus: Object) -> Iterator[Served]:
    """A resource with one GPU rank."""
    pool = {
        "name": "gpu",
        "type": "GPU",
        "ranks": 1,
        "gpu": {"resourceName": GPU, "coresPerRank": 1, "memoryPerRank": "2Gi"},
    }
    registry = site.chart_values.get("images", {}).get("registry", "heteroinference")
    served = Served(site, namespace, "gpu")
    served.apply(
        cpu_manifest(
            site, "gpu", pools=[pool], placement={"mode": "GpuOnly"}, gateway={"resources": CPU_RESOURCES},
            images={"gpuWorker": f"{registry}/worker-cpu:{VERSION}"},
        )
    )  # fmt: skip
    yield served
    served.delete()


def test_a_gpu_rank_gets_a_node_with_devices_and_says_which_it_cannot_find(gpu: Served) -> None:
    found = gpu.wait(lambda found: is_because(found, "Ready", "RankCrashLoop"), FAILURE_TIMEOUT_S)
    (pod,) = gpu.pods().values()
    (container,) = pod["spec"]["containers"]
    assert pod["spec"]["nodeName"] == NODE
    assert container["resources"]["limits"][GPU] == container["resources"]["requests"][GPU] == "1"
    assert container["args"][container["args"].index("--cuda-devices") + 1] == "0"
    assert told(found, "Scheduled")[0] == "True"
    logs = gpu.site.kubectl("logs", f"--namespace={gpu.namespace}", pod["metadata"]["name"])
    (line,) = {
        line.partition("hetero_worker.rank: ")[2] for line in logs.splitlines() if "ERROR" in line and ".rank:" in line
    }
    assert "cuda:0" in line
    assert line in told(found, "Ready")[2]
    assert told(found, "NUMAPinned")[1] == "NoCPURanks"


def test_without_enough_devices_the_pod_waits_and_status_says_for_what(site: Site, gpu: Served) -> None:
    gpu.site.kubectl(
        "patch", "hinf", gpu.name, f"--namespace={gpu.namespace}", "--type=merge", "-p",
        '{"spec": {"suspend": true}}',
    )  # fmt: skip
    gpu.wait(lambda found: is_true(found, "Suspended") and not gpu.pods(), 60)
    site.client.patch(
        "Node", NODE, [{"op": "replace", "path": CAPACITY, "value": "0"}], subresource="status", type="json"
    )
    site.client.wait_for("Node", NODE, until=lambda node: node["status"]["allocatable"].get(GPU) == "0")
    gpu.site.kubectl(
        "patch", "hinf", gpu.name, f"--namespace={gpu.namespace}", "--type=merge", "-p",
        '{"spec": {"suspend": false}}',
    )  # fmt: skip
    found = gpu.wait(lambda found: is_because(found, "Ready", "RankUnschedulable"), 60)
    assert f"Insufficient {GPU}" in told(found, "Ready")[2]

"""GPU pods on a node that says it has GPUs and has none: rendered and scheduled right, honest about what is missing.

Real GPU ranks are tested by tests/gpu, on real hardware. The image with CUDA takes gigabytes, so it is used when it was
built and put beside the others (site.py, HETERO_E2E_IMAGES); else that of the CPU ranks stands in: it is the same
program, which then says that its torch was built without CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.served import CPU_RESOURCES, LONGEST_GONE_S, Served, cpu_manifest, is_because, is_true, told
from tests.e2e.site import CPU_WORKER, Site, whole_image_name
from tests.support.kube.client import Object

GPU = "nvidia.com/gpu"
NODE = "node-1"
CAPACITY = f"/status/capacity/{GPU.replace('/', '~1')}"
GPU_WORKER = "worker-gpu"
FAILURE_TIMEOUT_S = 300.0
"""Importing torch with CUDA for the first time reads gigabytes."""


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
def is_real_image(site: Site) -> bool:
    """Whether the node has the image that users deploy."""
    return whole_image_name(GPU_WORKER) in site.images


@pytest.fixture
def gpu(site: Site, operator: str, namespace: str, node_with_gpus: Object, is_real_image: bool) -> Iterator[Served]:
    """A resource with one GPU rank."""
    pool = {
        "name": "gpu",
        "type": "GPU",
        "ranks": 1,
        "gpu": {"resourceName": GPU, "coresPerRank": 1, "memoryPerRank": "2Gi"},
    }
    served = Served(site, namespace, "gpu")
    images = {} if is_real_image else {"images": {"gpuWorker": whole_image_name(CPU_WORKER)}}
    served.apply(
        cpu_manifest(
            site, "gpu", pools=[pool], placement={"mode": "GpuOnly"}, gateway={"resources": CPU_RESOURCES}, **images
        )
    )
    yield served
    served.delete()


def test_a_gpu_rank_gets_a_node_with_devices_and_says_which_it_cannot_find(gpu: Served, is_real_image: bool) -> None:
    found = gpu.wait(lambda found: is_because(found, "Ready", "RankCrashLoop"), FAILURE_TIMEOUT_S)
    (pod,) = gpu.pods().values()
    (container,) = pod["spec"]["containers"]
    assert pod["spec"]["nodeName"] == NODE
    assert container["resources"]["limits"][GPU] == container["resources"]["requests"][GPU] == "1"
    assert container["args"][container["args"].index("--cuda-devices") + 1] == "0"
    assert whole_image_name(GPU_WORKER if is_real_image else CPU_WORKER).endswith(container["image"])
    assert told(found, "Scheduled")[0] == "True"
    logs = gpu.site.kubectl("logs", f"--namespace={gpu.namespace}", pod["metadata"]["name"])
    (line,) = {
        line.partition("hetero_worker.process.rank: ")[2]
        for line in logs.splitlines()
        if "ERROR" in line and ".rank:" in line
    }
    assert "cuda:0" in line
    assert ("/dev holds no NVIDIA device" if is_real_image else "built without CUDA") in line
    status, reason, message = told(found, "Ready")
    assert line in message
    if is_real_image:
        gpu.site.keep("gpu-without-device.txt", f"Ready {status} {reason}: {message}\n")
    assert told(found, "NUMAPinned")[1] == "NoCPURanks"


def test_without_enough_devices_the_pod_waits_and_status_says_for_what(site: Site, gpu: Served) -> None:
    gpu.site.kubectl(
        "patch", "hinf", gpu.name, f"--namespace={gpu.namespace}", "--type=merge", "-p",
        '{"spec": {"suspend": true}}',
    )  # fmt: skip
    gpu.wait(lambda found: is_true(found, "Suspended") and not gpu.pods(), LONGEST_GONE_S)
    site.client.patch(
        "Node", NODE, [{"op": "replace", "path": CAPACITY, "value": "0"}], subresource="status", type="json"
    )
    site.client.wait_for("Node", NODE, until=lambda node: node["status"]["allocatable"].get(GPU) == "0")
    gpu.site.kubectl(
        "patch", "hinf", gpu.name, f"--namespace={gpu.namespace}", "--type=merge", "-p",
        '{"spec": {"suspend": false}}',
    )  # fmt: skip
    # The scheduler's first word may be about a claim that is not bound yet.
    lack = f"Insufficient {GPU}"
    gpu.wait(lambda found: is_because(found, "Ready", "RankUnschedulable") and lack in told(found, "Ready")[2], 60)

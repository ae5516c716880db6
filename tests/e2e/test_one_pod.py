"""All ranks in one pod: a container a rank, one /dev/shm for all, and a container that ends heals in its place."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from bench.ours import HeteroContender
from hetero_client import Delta, HeteroClient, SamplingParams
from hetero_client.home import HeteroHome
from hetero_client.model_store.demo_model import demo_directory
from tests.e2e.cpusets import cpuset_of, cpusets_of_others
from tests.e2e.served import Served, cpu_manifest, told
from tests.e2e.site import Site
from tests.support.kube.client import Object
from tests.support.prompts import PROMPTS
from tests.support.restricted_profile import restricted_violations

NODE = "node-2"
"""The gateway does not tolerate its taint, so that all of its cores are for ranks."""
NAME = "together"
POD = f"{NAME}-ranks-0"
RECOVERY_TIMEOUT_S = 240.0
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SHARES = {kind: [2, 1] for kind in ("attention", "mlp", "vocabulary")}
STREAM = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
ROUNDS = 5
MOST_OF_A_LOCAL_STEP = 1.3
END_THE_CONTAINER = "import os, signal; os.kill(1, signal.SIGTERM)"


def manifest(site: Site, *, ranks: int) -> Object:
    """A resource whose ranks are one pod on NODE; with one rank there is nobody to exchange with."""
    cpu = {"coresPerRank": 1, "memoryPerRank": "1536Mi", "numa": {"policy": "BestEffort"}}
    node = {"nodeSelector": {"kubernetes.io/hostname": NODE}, "tolerations": site.tolerations}
    pool = {"name": "cpu", "type": "CPU", "ranks": ranks, "sharedMemory": "256Mi", "cpu": cpu, "scheduling": node}
    shares = {kind: parts[:ranks] for kind, parts in SHARES.items()}
    return cpu_manifest(
        site, NAME, pools=[pool], topology={"colocate": "Pod"}, placement={"mode": "Tensor", "shares": shares}
    )


@pytest.fixture
def served(site: Site, operator: str, namespace: str) -> Iterator[Served]:
    if not site.nodes:
        pytest.skip("takes a node in hand: only on nodes of our own")
    served = Served(site, namespace, NAME)
    yield served
    served.delete()


@pytest.fixture
def whole_node(site: Site) -> Iterator[None]:
    """All cores of NODE can be requested, which none of its containers then has for itself; as before afterwards."""
    if not site.nodes or site.real is None:
        pytest.skip("changes the kubelet's settings: only on nodes of our own")
    node = site.nodes[NODE]
    before = node.plan
    node.change_plan(replace(before, static=False, reserved_cores="", reserved_cpu="0"))
    site.real.wait_ready(site.client, NODE)
    site.client.wait_for("Node", NODE, until=lambda found: int(found["status"]["allocatable"]["cpu"]) >= 2)
    yield
    node.change_plan(before)
    site.real.wait_ready(site.client, NODE)


def the_pod(served: Served) -> Object:
    (pod,) = served.pods().values()
    assert pod["metadata"]["name"] == POD
    assert list(restricted_violations(pod["spec"])) == []
    assert pod["status"]["qosClass"] == "Guaranteed"
    return pod


def statuses(pod: Object) -> dict[str, Object]:
    """Of its containers, by name."""
    return {one["name"]: one for one in pod["status"]["containerStatuses"]}


def step_s(client: HeteroClient) -> float:
    """Seconds between tokens of one stream."""
    arrivals, tokens = list[float](), 0
    with client.generate(PROMPTS[0], sampling=STREAM) as stream:
        for event in stream:
            if isinstance(event, Delta):
                tokens += len(event.token_ids) if arrivals else 0
                arrivals.append(time.perf_counter())
    return (arrivals[-1] - arrivals[0]) / tokens


def local_group() -> HeteroContender:
    """The same ranks by `hetero up`, on the same cores."""
    model = demo_directory(HeteroHome.from_environment())
    return HeteroContender(model=model, ranks=2, cores=1, placement={"mode": "Tensor", "shares": SHARES})


def test_a_container_of_the_one_pod_has_a_core_of_its_own(site: Site, served: Served) -> None:
    served.apply(manifest(site, ranks=1))
    found = served.wait_ready()
    pod = the_pod(served)
    assert set(statuses(pod)) == {"rank-0"}
    cpus = cpuset_of(site, pod)
    assert len(cpus) == 1
    assert not any(cpus & others for others in cpusets_of_others(site, pod).values())
    assert told(found, "NUMAPinned")[:2] == ("True", "Pinned")


def test_containers_share_memory_and_one_that_ends_heals_in_its_place(
    site: Site, whole_node: None, served: Served
) -> None:
    served.apply(manifest(site, ranks=2))
    found = served.wait_ready()
    assert found["status"]["placement"]["exchange"] == "shm"
    assert {(one["rank"], one["pod"], one["node"]) for one in found["status"]["placements"]} == {
        (0, POD, NODE), (1, POD, NODE),
    }  # fmt: skip
    pod, epoch = the_pod(served), found["status"]["epoch"]
    before = statuses(pod)
    with served.client() as client:
        text = client.generate_text(PROMPTS[0], sampling=GREEDY).text
        with suppress(subprocess.CalledProcessError):  # the command ends with its container
            site.kubectl(
                "exec", f"--namespace={served.namespace}", POD, "-c", "rank-1", "--", "python", "-c", END_THE_CONTAINER
            )
        found = served.wait_ready(after_epoch=epoch, timeout_s=RECOVERY_TIMEOUT_S)
        assert client.generate_text(PROMPTS[0], sampling=GREEDY).text == text
    again = the_pod(served)
    assert again["metadata"]["uid"] == pod["metadata"]["uid"]
    assert statuses(again)["rank-0"]["containerID"] == before["rank-0"]["containerID"]
    assert statuses(again)["rank-1"]["restartCount"] == before["rank-1"]["restartCount"] + 1
    assert found["status"]["placement"]["exchange"] == "shm"
    assert found["status"]["restarts"]["count"] == 1
    assert found["status"]["restarts"]["lastRank"] == 1


def test_a_step_takes_as_long_as_that_of_a_local_group(site: Site, whole_node: None, served: Served) -> None:
    served.apply(manifest(site, ranks=2))
    served.wait_ready()
    local = local_group()
    with served.client() as client:
        try:
            local.start()
            pairs = [(step_s(client), step_s(local.client)) for _ in range(ROUNDS + 1)][1:]
        finally:
            local.stop()
    in_pod_s, local_s = map(statistics.median, zip(*pairs, strict=True))
    print(f"a step takes {1e3 * in_pod_s:.2f} ms in the pod, {1e3 * local_s:.2f} ms of `hetero up`")
    assert in_pod_s <= MOST_OF_A_LOCAL_STEP * local_s

"""All ranks in one pod: a container a rank, one /dev/shm for all, and a container that ends heals in its place."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from hetero_client import SamplingParams
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
END_THE_CONTAINER = "import os, signal; os.kill(1, signal.SIGTERM)"


def manifest(site: Site, *, ranks: int) -> Object:
    """A resource whose ranks are one pod on NODE; with one rank there is nobody to exchange with."""
    cpu = {"coresPerRank": 1, "memoryPerRank": "1536Mi", "numa": {"policy": "BestEffort"}}
    node = {"nodeSelector": {"kubernetes.io/hostname": NODE}, "tolerations": site.tolerations}
    pool = {"name": "cpu", "type": "CPU", "ranks": ranks, "sharedMemory": "256Mi", "cpu": cpu, "scheduling": node}
    shares = {kind: [2, 1][:ranks] for kind in ("attention", "mlp", "vocabulary")}
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

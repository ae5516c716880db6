"""What happens to a group that serves when pods, nodes and programs around it fail or change."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from hetero_api.contract import LABEL_GATEWAY_REVISION, LABEL_REVISION, ROLE_GATEWAY, ROLE_RANK
from hetero_client import HeteroClient, SamplingParams
from tests.e2e.conftest import SYSTEM, is_available
from tests.e2e.cpusets import cpuset_of
from tests.e2e.harness.real_cluster import is_ready
from tests.e2e.served import Served, Watching, is_because, is_true, restarts_of, told
from tests.e2e.site import Site
from tests.e2e.streams import STREAMS, Streams
from tests.support.kube.client import Object
from tests.support.prompts import PROMPTS

SHORT_PROMPTS = PROMPTS[:STREAMS]
SOME = 80
LEAST, MOST = 120, 1200
OUTLAST_S = 15.0
"""Streams should last about so long by themselves: longer than it takes until a deleted pod is gone."""
SHORTER = 1024
RECOVERY_TIMEOUT_S = 240.0
ROLL_OUT_TIMEOUT_S = 120.0
HOG = (Path(__file__).with_name("memory_hog.py")).read_text(encoding="utf-8")


@pytest.fixture
def own_nodes(site: Site) -> Site:
    """For tests that take a node in hand."""
    if not site.nodes:
        pytest.skip("takes a node in hand: only on nodes of our own")
    return site


def epoch_of(served: Served) -> int:
    return int(served.object["status"]["epoch"])


def test_streams_pause_and_complete_when_a_ranks_pod_is_deleted(served: Served) -> None:
    before, pods = epoch_of(served), served.pods()
    with served.client() as client:
        length = tokens_within(client, OUTLAST_S)
        with Streams(client, SHORT_PROMPTS, max_tokens=length) as streams:
            served.site.kubectl("delete", "pod", "smollm2-cpu-1", f"--namespace={served.namespace}", "--wait=false")
            served.wait_ready(after_epoch=before, timeout_s=RECOVERY_TIMEOUT_S)
            assert streams.num_over < STREAMS, "all was over before the group came back: nothing was tried"
            readings = streams.finish(RECOVERY_TIMEOUT_S)
        assert [(one.num_tokens, one.num_ends) for one in readings] == [(length, 1)] * STREAMS
        again = client.generate_text(
            SHORT_PROMPTS[0], sampling=SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        )
    assert readings[0].text == again.text
    now = served.pods()
    assert now["smollm2-cpu-1"]["metadata"]["uid"] != pods["smollm2-cpu-1"]["metadata"]["uid"]
    assert restarts_of(now)["smollm2-cpu-0"] == restarts_of(pods)["smollm2-cpu-0"]


def test_a_rank_that_takes_more_than_its_limit_is_named_and_comes_back(served: Served) -> None:
    before = epoch_of(served)
    reasons: set[str] = set()
    with Watching(lambda: reasons.add(told(served.object, "Ready")[1])):
        with suppress(subprocess.CalledProcessError):  # the container ends, and the hog with it
            served.site.kubectl(
                "exec", "-i", f"--namespace={served.namespace}", "smollm2-cpu-1", "--", "python", "-", stdin=HOG
            )
        found = served.wait_ready(after_epoch=before, timeout_s=RECOVERY_TIMEOUT_S)
    (status,) = served.pods()["smollm2-cpu-1"]["status"]["containerStatuses"]
    assert status["restartCount"] >= 1, "the kernel killed no rank"
    assert status["lastState"]["terminated"]["reason"] == "OOMKilled"
    assert "RankOutOfMemory" in reasons
    last = found["status"]["restarts"]
    assert last["count"] >= 1
    assert "memory" in last["lastReason"], last


def test_serving_goes_on_without_an_operator(site: Site, operator: str, served: Served) -> None:
    before, pods = epoch_of(served), restarts_of({**served.pods(), **served.pods("gateway")})
    with served.client() as client, Streams(client, SHORT_PROMPTS, max_tokens=SOME) as streams:
        site.kubectl(
            "delete", "pod", f"--namespace={SYSTEM}", "-l", "app.kubernetes.io/component=operator", "--grace-period=0",
            "--force", "--wait=false",
        )  # fmt: skip
        readings = streams.finish(RECOVERY_TIMEOUT_S)
    assert [one.num_tokens for one in readings] == [SOME] * STREAMS
    site.client.wait_for("Deployment", operator, SYSTEM, until=is_available, timeout_s=180)
    assert epoch_of(served) == before
    assert restarts_of({**served.pods(), **served.pods("gateway")}) == pods


def test_a_kubelet_that_starts_anew_disturbs_nobody(own_nodes: Site, served: Served) -> None:
    before, pods = epoch_of(served), served.pods()
    cores = {name: cpuset_of(own_nodes, pod) for name, pod in pods.items()}
    with served.client() as client:  # before: the forwarding goes through a kubelet
        assert client.generate_text(SHORT_PROMPTS[0], sampling=SamplingParams(max_tokens=4)).token_ids
    said: set[tuple[str, str, str, str]] = set()

    def look() -> None:
        found = served.object
        said.add((*told(found, "Ready")[:2], told(found, "Degraded")[1], found["status"]["ranks"]))

    with Watching(look):
        for name, node in own_nodes.nodes.items():
            seen = heartbeat(own_nodes.client.get("Node", name))
            node.restart_kubelet()
            own_nodes.client.wait_for("Node", name, until=partial(is_heard_again, since=seen), timeout_s=90)
        served.wait(lambda found: is_true(found, "Ready"), 60)
    # Until the gateway's node is ready, no new client is sent to it; nothing else has changed, and nothing is lost.
    assert said <= {("True", "Serving", "AsExpected", "2/2"), ("False", "GatewayNotReady", "AsExpected", "2/2")}
    assert epoch_of(served) == before
    assert restarts_of(served.pods()) == restarts_of(pods)
    assert {name: cpuset_of(own_nodes, pod) for name, pod in served.pods().items()} == cores
    with served.client() as client:
        assert client.generate_text(SHORT_PROMPTS[0], sampling=SamplingParams(max_tokens=4)).token_ids


def test_a_cordoned_node_keeps_what_it_has_and_is_named_when_a_rank_needs_it(own_nodes: Site, served: Served) -> None:
    before = epoch_of(served)
    (victim,) = [name for name, pod in served.pods().items() if pod["spec"]["nodeName"] == "node-2"]
    with ExitStack() as stack:
        own_nodes.kubectl("cordon", "node-2")
        stack.callback(own_nodes.kubectl, "uncordon", "node-2")
        with served.client() as client:
            assert client.generate_text(SHORT_PROMPTS[0], sampling=SamplingParams(max_tokens=8)).token_ids
        assert is_true(served.object, "Ready")
        own_nodes.kubectl("delete", "pod", victim, f"--namespace={served.namespace}")
        found = served.wait(lambda found: is_because(found, "Ready", "RankUnschedulable"), 90)
        assert victim in told(found, "Ready")[2]
        assert "unschedulable" in told(found, "Ready")[2]
    served.wait_ready(after_epoch=before, timeout_s=RECOVERY_TIMEOUT_S)


def test_new_arguments_of_the_model_replace_the_gateway_and_leave_the_ranks(served: Served) -> None:
    before, ranks = served.object["status"], restarts_of(served.pods())
    patch(served, {"op": "replace", "path": "/spec/model/maxModelLen", "value": SHORTER})
    seen, found = revisions_until(
        served,
        ROLE_GATEWAY,
        LABEL_GATEWAY_REVISION,
        lambda status: status["gatewayRevision"] != before["gatewayRevision"],
    )
    assert found["status"]["revision"] == before["revision"]
    assert max(map(len, seen)) == 1, f"gateways of two revisions at a time: {seen}"
    assert restarts_of(served.pods()) == ranks
    with served.client() as client:
        assert client.model_info().max_model_len == SHORTER
        assert client.generate_text(SHORT_PROMPTS[0], sampling=SamplingParams(max_tokens=4)).token_ids


def test_new_arguments_of_ranks_roll_out_and_no_old_rank_stays_beside_a_new_one(served: Served) -> None:
    before, ranks = served.object["status"], served.pods()
    patch(served, {"op": "replace", "path": "/spec/pools/0/cpu/memoryPerRank", "value": "1536Mi"})
    seen, found = revisions_until(
        served, ROLE_RANK, LABEL_REVISION, lambda status: status["revision"] != before["revision"]
    )
    assert max(map(len, seen)) == 1, f"ranks of two revisions at a time: {seen}"
    now = served.pods()
    assert {pod["metadata"]["labels"][LABEL_REVISION] for pod in now.values()} == {found["status"]["revision"]}
    assert not {pod["metadata"]["uid"] for pod in now.values()} & {pod["metadata"]["uid"] for pod in ranks.values()}
    with served.client() as client:
        assert client.generate_text(SHORT_PROMPTS[0], sampling=SamplingParams(max_tokens=4)).token_ids


def tokens_within(client: HeteroClient, seconds: float) -> int:
    """About as many as a stream gets in that time here, within LEAST and MOST."""
    started = time.monotonic()
    run = client.generate_text(SHORT_PROMPTS[0], sampling=SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    speed = len(run.token_ids) / (time.monotonic() - started)
    return max(LEAST, min(MOST, int(seconds * speed)))


def patch(served: Served, *operations: Mapping[str, object]) -> None:
    """`kubectl patch` of the resource."""
    text = json.dumps(operations)
    served.site.kubectl("patch", "hinf", served.name, f"--namespace={served.namespace}", "--type=json", "-p", text)


def revisions_until(
    served: Served, role: str, label: str, has_changed: Callable[[Object], bool]
) -> tuple[set[frozenset[str]], Object]:
    """Sets of revisions of pods that were there and not ending, until the resource serves with another revision."""
    seen: set[frozenset[str]] = set()

    def look() -> None:
        staying = [pod for pod in served.pods(role).values() if "deletionTimestamp" not in pod["metadata"]]
        seen.add(frozenset(pod["metadata"]["labels"][label] for pod in staying))

    with Watching(look):
        served.wait(lambda found: has_changed(found["status"]), ROLL_OUT_TIMEOUT_S)
        found = served.wait_ready(timeout_s=RECOVERY_TIMEOUT_S)
    return seen, found


def is_heard_again(node: Object, *, since: str) -> bool:
    """Whether its kubelet has said that it is ready, after a time."""
    return is_ready(node) and heartbeat(node) > since


def heartbeat(node: Object) -> str:
    """When its kubelet last said that it is ready."""
    (ready,) = [one for one in node["status"]["conditions"] if one["type"] == "Ready"]
    return str(ready["lastHeartbeatTime"])

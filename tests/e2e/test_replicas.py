"""Several replicas behind a router on three real nodes, under a load of sixteen streams.

Half of the streams are of our own API through the Service, half of the OpenAI API through the router. No request may
fail and every text is the undisturbed one, but where the router itself is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from hetero_api.contract import HTTP_PORT, INFERENCE_PORT, LABEL_REPLICA, LABEL_ROUTER, ROLE_GATEWAY
from tests.e2e.conftest import SYSTEM, install_operator
from tests.e2e.cpusets import processes_of
from tests.e2e.harness.node_settings import NodePlan
from tests.e2e.load import GRPC, HTTP, THINK_S, Answer, Load
from tests.e2e.replicas import (
    NAME,
    NAMESPACE,
    STREAMS,
    Texts,
    address_of,
    check,
    disturbed,
    figures,
    load,
    manifest,
    pods_of,
    save_ascii_model,
    undisturbed,
    wait_replicas,
)  # fmt: skip
from tests.e2e.served import Served, is_because, is_true, told
from tests.e2e.site import Site, image_archives, own_nodes
from tests.support.kube.client import Object
from tests.support.kube.polling import poll

SERVED_AGAIN_S: Final = 5.0
"""Allowed until callers of a killed router are served by another; the figure is kept among the artifacts."""
NODE_LOST_S: Final = 10
MOST_LOADS: Final = 10
UNHEARD_S: Final = 5.0
"""A call to a node that is gone takes longer than this to fail."""
LONG_TOKENS: Final = 1024
"""Of streams that are under way when what serves them is asked to go."""
MEMORY: Final = "/spec/pools/0/cpu/memoryPerRank"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Three nodes of this module's own, with the operator: kubelets that give no core away for one container alone."""
    if os.environ.get("KUBECONFIG"):
        pytest.skip("drains nodes: only on nodes of our own")
    images = list(image_archives(os.environ, more=("router",)).values())
    plans = [NodePlan(f"node-{number}", static=False, reserved_cpu="0") for number in (1, 2, 3)]
    folder = tmp_path_factory.mktemp("replicas")
    model = save_ascii_model(folder / "model")
    with own_nodes(os.environ, folder, model, plans=plans, images=images) as site, install_operator(site):
        site.create_namespace(NAMESPACE)
        yield site


@pytest.fixture(scope="module")
def replicas(site: Site) -> Served:
    """One replica, which serves, and so does its router."""
    served = Served(site, NAMESPACE, NAME)
    served.apply(manifest(site, 1))
    wait_replicas(served, 1)
    served.wait(lambda found: is_true(found, "RouterReady"))
    return served


@pytest.fixture(scope="module")
def texts(replicas: Served) -> Texts:
    return undisturbed(replicas)


def ask(served: Served, number: int) -> None:
    """`kubectl scale`."""
    served.site.kubectl("scale", f"hinf/{served.name}", f"--replicas={number}", f"--namespace={served.namespace}")


def scale(served: Served, number: int) -> None:
    """Scale, until as many serve, and the router before them."""
    ask(served, number)
    wait_replicas(served, number)
    served.wait(lambda found: is_true(found, "RouterReady"))


def patch(served: Served, path: str, value: object) -> None:
    """`kubectl patch` of one field; None removes it."""
    operation = {"op": "remove", "path": path} if value is None else {"op": "add", "path": path, "value": value}
    text = json.dumps([operation])
    served.site.kubectl("patch", "hinf", NAME, f"--namespace={NAMESPACE}", "--type=json", "-p", text)


def uids(served: Served) -> dict[str, str]:
    """Of ranks, by their pods' names."""
    return {name: pod["metadata"]["uid"] for name, pod in served.pods().items()}


def test_replicas_come_and_go_and_no_request_fails(replicas: Served, texts: Texts) -> None:
    def change() -> None:
        scale(replicas, 3)
        scale(replicas, 1)

    check(disturbed(replicas, "scale", change), texts)


def test_the_last_replica_finishes_its_streams_and_then_callers_are_told_to_come_back(replicas: Served) -> None:
    """From 1 to 0 and to 2. A request that begins after the scaling may be refused; one that has begun may not."""
    texts = undisturbed(replicas, max_tokens=LONG_TOKENS)
    with load(replicas, max_tokens=LONG_TOKENS) as streams:
        streams.wait_answers(STREAMS)
        poll(lambda: time.time() > streams.answers[-1].ended + 2 * THINK_S, timeout_s=60)  # they have begun again
        asked = time.time()
        ask(replicas, 0)
        answers = streams.finish()
    begun = [one for one in answers if one.began < asked]
    under_way = [one for one in begun if one.ended > asked]
    wait_replicas(replicas, 0)
    service = address_of(replicas.site.client.get("Service", NAME, NAMESPACE), HTTP_PORT)
    refusal = poll(lambda: told_to_come_back(replicas.site, service), timeout_s=60)
    replicas.site.keep("replicas-zero.txt", f"{figures(begun)}, {len(under_way)} under way; then: {refusal}\n")
    assert under_way, "nothing was in flight when the last replica was asked to go"
    check(begun, texts)
    scale(replicas, 2)
    assert undisturbed(replicas, max_tokens=LONG_TOKENS) == texts


def told_to_come_back(site: Site, service: str) -> str:
    """Status and Retry-After of an answer to a call; "" while it is another."""
    code = (
        "import httpx, sys; r = httpx.get(f'http://{sys.argv[1]}/v1/models', trust_env=False); "
        "print(r.status_code, 'Retry-After:', r.headers.get('retry-after'))"
    )
    command = site.nodes["node-1"].inside(sys.executable, "-c", code, service)
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return said if said.startswith("503 Retry-After: ") and not said.endswith("None") else ""


def test_a_new_spec_rolls_out_and_back_and_no_request_fails(replicas: Served, texts: Texts) -> None:
    scale(replicas, 2)
    seen = [uids(replicas)]

    def change() -> None:
        for memory in ("1280Mi", "1Gi"):
            patch(replicas, MEMORY, memory)
            wait_replicas(replicas, 2)
            seen.append(uids(replicas))

    check(disturbed(replicas, "roll-out", change), texts)
    assert {frozenset(one) for one in seen} == {frozenset(seen[0])}
    assert len({uid for one in seen for uid in one.values()}) == 6


def test_a_spec_that_does_not_work_stops_at_one_replica_and_no_request_fails(replicas: Served, texts: Texts) -> None:
    scale(replicas, 2)
    before = uids(replicas)

    def change() -> None:
        patch(replicas, "/spec/images", {"cpuWorker": "localhost/none:1"})
        found = replicas.wait(lambda found: is_because(found, "Progressing", "RolloutStopped"))
        assert told(found, "Degraded")[2].startswith("The roll-out stopped at replica 1: ")
        assert (found["status"]["readyReplicas"], found["status"]["updatedReplicas"]) == (1, 1)
        patch(replicas, "/spec/images", None)
        wait_replicas(replicas, 2)

    check(disturbed(replicas, "broken", change), texts)
    assert uids(replicas)[f"{NAME}-cpu-0"] == before[f"{NAME}-cpu-0"]


def test_a_node_is_drained_and_no_request_fails(replicas: Served, texts: Texts) -> None:
    scale(replicas, 2)
    node = node_to_drain(replicas)

    def change() -> None:
        with ExitStack() as stack:
            stack.callback(replicas.site.kubectl, "uncordon", node)
            replicas.site.kubectl(
                "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=110s"
            )
            replicas.wait(lambda _: node not in {pod["spec"].get("nodeName", node) for pod in pods_of(replicas)})
            wait_replicas(replicas, 2)

    check(disturbed(replicas, "drain", change), texts)


def node_to_drain(served: Served) -> str:
    """A node with pods of one replica, and with a router where there is such a node."""
    replicas_on: dict[str, set[str]] = {}
    for pod in pods_of(served):
        replicas_on.setdefault(pod["spec"]["nodeName"], set()).add(pod["metadata"]["labels"].get(LABEL_REPLICA, "0"))
    with_router = {pod["spec"]["nodeName"] for pod in routers(served)}
    found = [name for name, on_it in replicas_on.items() if len(on_it) == 1]
    assert found, f"no node has pods of a single replica: {replicas_on}"
    return max(found, key=lambda name: name in with_router)


def test_a_gateway_and_its_rank_go_together_and_no_request_fails(replicas: Served) -> None:
    """As when they are on one node that is drained, which is not for a test to arrange."""
    scale(replicas, 2)
    texts = undisturbed(replicas, max_tokens=LONG_TOKENS)
    pods = [pod["metadata"] for pod in pods_of(replicas) if pod["metadata"]["labels"].get(LABEL_REPLICA) == "1"]
    assert len(pods) == 2
    asked = {pod["uid"] for pod in pods}

    def change() -> None:
        names = [pod["name"] for pod in pods]
        replicas.site.kubectl("delete", "pod", *names, f"--namespace={NAMESPACE}", "--wait=false")
        replicas.wait(lambda _: not asked & {pod["metadata"]["uid"] for pod in pods_of(replicas)})
        wait_replicas(replicas, 2)

    check(disturbed(replicas, "together", change, max_tokens=LONG_TOKENS), texts)


def test_a_node_dies_and_its_replica_serves_elsewhere(replicas: Served) -> None:
    """Power is cut, so nobody hears of it: callers by missing answers to pings, the cluster by missing heartbeats."""
    site, node = replicas.site, replicas.site.nodes["node-3"]
    patch(replicas, "/spec/recovery", {"nodeLostTimeoutSeconds": NODE_LOST_S})
    move_the_second_replica_to(replicas, node.name)
    texts, before = undisturbed(replicas, max_tokens=LONG_TOKENS), uids(replicas)
    with ExitStack() as stack:
        with load_on(replicas, node.name) as streams:
            lost = time.time()
            node.lose_power()
            stack.callback(node.boot)
            replicas.wait(lambda _: uids(replicas).keys() == before.keys() and node.name not in nodes_of(replicas))
            replaced = time.time()
            wait_replicas(replicas, 2)
            served = time.time()
            streams.wait_answers(STREAMS)
            answers = streams.finish()
        site.keep("replicas-node-lost.txt", told_of_loss(answers, lost, replaced, served))
        slowest = max(one.ended - one.began for one in answers if one.door == GRPC)
        assert slowest > UNHEARD_S, "nobody had to notice that the node is gone"
        now = uids(replicas)
        assert now[f"{NAME}-cpu-0"] == before[f"{NAME}-cpu-0"]
        check([one for one in answers if not one.error], texts)
        assert [one for one in answers if one.error and (one.began > served or one.door == GRPC)] == []
    assert site.real is not None
    site.real.wait_ready(site.client, node.name)
    replicas.wait(lambda _: node.name not in nodes_of(replicas))
    wait_replicas(replicas, 2)
    assert uids(replicas) == now
    check(disturbed(replicas, "node-back", lambda: None, max_tokens=LONG_TOKENS), texts)


def move_the_second_replica_to(served: Served, node: str) -> None:
    """Have one replica and the operator on the first node, and another replica on this one."""
    site = served.site
    others = [name for name in site.nodes if name != "node-1"]
    ask(served, 0)
    wait_replicas(served, 0)
    site.kubectl("cordon", *others)
    site.kubectl("delete", "pod", f"--namespace={SYSTEM}", "-l", "app.kubernetes.io/component=operator")
    scale(served, 1)
    site.kubectl("uncordon", node)
    site.kubectl("cordon", "node-1")
    scale(served, 2)
    site.kubectl("uncordon", *site.nodes)
    found = {(pod["metadata"]["labels"].get(LABEL_REPLICA, "0"), pod["spec"]["nodeName"]) for pod in pods_of(served)}
    assert found == {("0", "node-1"), ("1", node)}


@contextmanager
def load_on(served: Served, node: str) -> Iterator[Load]:
    """Streams that flow, with those of our own API, which share a connection, on this node's replica."""
    (gateway,) = (pod for pod in served.pods(ROLE_GATEWAY).values() if pod["spec"]["nodeName"] == node)
    for _ in range(MOST_LOADS):
        with load(served, max_tokens=LONG_TOKENS) as streams:
            streams.wait_answers(STREAMS)
            if connections_of(served.site, gateway, INFERENCE_PORT)[address_of_node(served.site, "node-1")]:
                yield streams
                return
            streams.finish()
    pytest.fail(f"{MOST_LOADS} loads in a row had their connection to another node")


def address_of_node(site: Site, node: str) -> str:
    addresses = site.client.get("Node", node)["status"]["addresses"]
    return next(str(one["address"]) for one in addresses if one["type"] == "InternalIP")


def nodes_of(served: Served) -> set[str]:
    """Where ranks and gateways are."""
    return {pod["spec"].get("nodeName", "") for pod in pods_of(served)}


def told_of_loss(answers: Sequence[Answer], lost: float, replaced: float, served: float) -> str:
    under_way = [one for one in answers if one.began < lost < one.ended]
    lines = [
        f"{figures(answers)}; {len(under_way)} under way when the node was lost",
        f"pods made elsewhere after {replaced - lost:.1f} s, replicas ready after {served - lost:.1f} s",
        *(f"{one.began - lost:.1f} to {one.ended - lost:.1f} s: {one}" for one in answers if one.error),
    ]
    return "\n".join([*lines, ""])


def routers(served: Served) -> list[Object]:
    """Pods of the router that are not ending."""
    pods = served.site.client.list_all("Pod", NAMESPACE, labels=f"{LABEL_ROUTER}={NAME}")
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def router_in_use(served: Served) -> Object:
    """The router's pod that callers of one address have their connections to."""
    return max(routers(served), key=lambda pod: connections_of(served.site, pod, HTTP_PORT).total())


def connections_of(site: Site, pod: Object, port: int) -> Counter[str]:
    """Number of connections that are open to a port of a pod, by the other end's IPv4 address."""
    process, found = processes_of(site, pod)[0], Counter[str]()
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{file}").read_text().splitlines()[1:]:
            _, local, remote, state, *_ = line.split()
            if local.endswith(f":{port:04X}") and state == "01":
                address = bytes.fromhex(remote.partition(":")[0][-8:])  # one of IPv6 ends in that of IPv4
                found[".".join(map(str, reversed(address)))] += 1
    return found


def test_a_killed_routers_streams_end_in_errors_and_new_ones_are_served_soon(replicas: Served, texts: Texts) -> None:
    with load(replicas) as streams:
        streams.wait_answers(STREAMS)
        router = router_in_use(replicas)
        killed = time.time()
        for process in processes_of(replicas.site, router):
            os.kill(process, signal.SIGKILL)

        def served_since() -> list[float]:
            """Times of first tokens of requests that began after it was killed, through the router."""
            answers = [one for one in streams.answers if one.door == HTTP and one.began > killed]
            return [one.first for one in answers if not one.error]

        poll(lambda: len(served_since()) >= STREAMS // 2, timeout_s=60)
        gap = min(served_since()) - killed
        answers = streams.finish()
    broken = [one for one in answers if one.error]
    told = f"{len(broken)} broken, first token of a new stream after {gap:.1f} s\n"
    replicas.site.keep("replicas-router-killed.txt", "\n".join([told, *(str(one) for one in broken), ""]))
    assert broken
    assert {one.door for one in broken} == {HTTP}
    assert {one.door for one in answers if not one.error} == {GRPC, HTTP}
    check([one for one in answers if not one.error], texts)
    assert gap <= SERVED_AGAIN_S

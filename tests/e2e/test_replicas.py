"""Several replicas behind a router on three real nodes, under a load of sixteen streams that never pauses.

Half of the streams are of our own API through the Service, half of the OpenAI API through the router. No request may
fail and every text is the undisturbed one, but where the router itself is killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from hetero_api.contract import INFERENCE_PORT, LABEL_REPLICA, LABEL_ROUTER, ROLE_GATEWAY, ROLE_RANK
from tests.e2e.conftest import install_operator
from tests.e2e.harness.node_settings import NodePlan
from tests.e2e.load import HTTP, Answer, Load
from tests.e2e.served import Served, Watching, cpu_manifest, is_current, is_true
from tests.e2e.site import Site, image_archives, own_nodes
from tests.support.kube.client import Object
from tests.support.kube.polling import poll

NAME: Final = "many"
NAMESPACE: Final = "models"
STREAMS: Final = 16
MAX_TOKENS: Final = 32
MOVE_TIMEOUT_S: Final = 300.0
SERVED_AGAIN_S: Final = 30.0
"""Allowed to a killed router's next pod on a machine of two cores; the figure is kept among the artifacts."""
ROUTER_PORT: Final = 8000


def manifest(site: Site, replicas: int) -> Object:
    """SmolLM2 on one rank a replica: three of them, with their gateways, fit three nodes of two cores."""
    cpu = {"coresPerRank": 1, "memoryPerRank": "2Gi", "numa": {"policy": "BestEffort"}}
    small = {"cpuMillis": 200, "memory": "1Gi"}
    return cpu_manifest(
        site,
        NAME,
        pools=[{"name": "cpu", "type": "CPU", "ranks": 1, "cpu": cpu}],
        placement={"mode": "Tensor", "shares": {"attention": [1], "mlp": [1], "vocabulary": [1]}},
        gateway={"resources": small},
        replicas=replicas,
        router={"type": "SMG", "resources": small},
        disruptionBudget={"enabled": True},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Site]:
    """Three nodes of this module's own, with the operator: kubelets that give no core away for one container alone."""
    if os.environ.get("KUBECONFIG"):
        pytest.skip("drains nodes: only on nodes of our own")
    archives = image_archives(os.environ, more=("router",))
    plans = [NodePlan(f"node-{number}", static=False) for number in (1, 2, 3)]
    images = {plan.name: list(archives.values()) for plan in plans}
    folder = tmp_path_factory.mktemp("replicas")
    with own_nodes(os.environ, folder, smollm2, plans=plans, images=images) as site, install_operator(site):
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


def address_of(served: Served, service: str, port: int) -> str:
    """A Service's own address, which nodes know the way to."""
    found = served.site.client.get("Service", service, served.namespace)
    return f"{found['spec']['clusterIP']}:{port}"


def load(served: Served, streams: int = STREAMS) -> Load:
    """Streams from the first node, which is not drained."""
    return Load(
        served.site.nodes["node-1"],
        NAME,
        grpc=address_of(served, NAME, INFERENCE_PORT),
        http=address_of(served, f"{NAME}-router", ROUTER_PORT),
        streams=streams,
        max_tokens=MAX_TOKENS,
    )


@pytest.fixture(scope="module")
def texts(replicas: Served) -> dict[tuple[str, int], str]:
    """What each door answers to each prompt when nothing happens."""
    with load(replicas) as streams:
        streams.wait_answers(STREAMS)
        answers = streams.finish()
    assert [one for one in answers if one.error] == []
    found = {(one.door, one.prompt): one.text for one in answers}
    assert len(found) == STREAMS
    assert all(found.values())
    return found


def wait_replicas(served: Served, number: int) -> Object:
    """The resource once so many replicas serve, all of the newest spec."""

    def holds(found: Object) -> bool:
        status = found.get("status", {})
        counts = [status.get(name) for name in ("replicas", "readyReplicas", "updatedReplicas")]
        return is_current(found) and is_true(found, "Ready") and counts == [number] * 3

    return served.wait(holds, MOVE_TIMEOUT_S)


def scale(served: Served, number: int) -> None:
    served.site.kubectl("scale", f"hinf/{served.name}", f"--replicas={number}", f"--namespace={served.namespace}")
    wait_replicas(served, number)


def disturbed(served: Served, name: str, change: Callable[[], object]) -> list[Answer]:
    """Answers of a load that flows before, while and after something changes; the least number of replicas that
    served meanwhile is never 0."""
    least: list[int] = []
    with load(served) as streams:
        streams.wait_answers(STREAMS)
        with Watching(lambda: least.append(served.object["status"].get("readyReplicas", 0))):
            change()
        streams.wait_answers(STREAMS)
        answers = streams.finish()
    slowest = max(one.ended - one.began for one in answers)
    failed = [one for one in answers if one.error]
    lines = [
        f"{len(answers)} requests, {len(failed)} failed, at least {min(least)} replicas ready, slowest {slowest:.1f} s"
    ]
    served.site.keep(f"replicas-{name}.txt", "\n".join([*lines, *(str(one) for one in failed), ""]))
    assert min(least) >= 1
    return answers


def check(answers: Sequence[Answer], texts: dict[tuple[str, int], str]) -> None:
    """No request failed, and none has another text than the undisturbed one."""
    assert [one for one in answers if one.error] == []
    assert [one for one in answers if one.text != texts[one.door, one.prompt]] == []


def test_replicas_come_and_go_and_no_request_fails(replicas: Served, texts: dict[tuple[str, int], str]) -> None:
    def change() -> None:
        scale(replicas, 3)
        scale(replicas, 1)

    check(disturbed(replicas, "scale", change), texts)


def test_a_new_spec_rolls_out_and_no_request_fails(replicas: Served, texts: dict[tuple[str, int], str]) -> None:
    scale(replicas, 2)
    before = {name: pod["metadata"]["uid"] for name, pod in replicas.pods().items()}
    new = '[{"op": "replace", "path": "/spec/pools/0/cpu/memoryPerRank", "value": "1536Mi"}]'

    def change() -> None:
        replicas.site.kubectl("patch", "hinf", NAME, f"--namespace={NAMESPACE}", "--type=json", "-p", new)
        wait_replicas(replicas, 2)

    check(disturbed(replicas, "roll-out", change), texts)
    after = {name: pod["metadata"]["uid"] for name, pod in replicas.pods().items()}
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())


def test_a_node_is_drained_and_no_request_fails(replicas: Served, texts: dict[tuple[str, int], str]) -> None:
    scale(replicas, 2)
    node = node_to_drain(replicas)

    def change() -> None:
        with ExitStack() as stack:
            stack.callback(replicas.site.kubectl, "uncordon", node)
            replicas.site.kubectl(
                "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=110s"
            )
            wait_replicas(replicas, 2)
            assert node not in {pod["spec"]["nodeName"] for pod in pods_of(replicas)}

    check(disturbed(replicas, "drain", change), texts)


def pods_of(served: Served) -> list[Object]:
    """Ranks and gateways."""
    return [*served.pods(ROLE_RANK).values(), *served.pods(ROLE_GATEWAY).values()]


def node_to_drain(served: Served) -> str:
    """A node with pods of one replica; not the one that the load comes from."""
    replicas_on: dict[str, set[str]] = {}
    for pod in pods_of(served):
        replicas_on.setdefault(pod["spec"]["nodeName"], set()).add(pod["metadata"]["labels"].get(LABEL_REPLICA, "0"))
    found = [name for name, on_it in replicas_on.items() if name != "node-1" and len(on_it) == 1]
    assert found, f"no node has pods of a single replica: {replicas_on}"
    return found[0]


def test_a_killed_routers_streams_end_in_errors_and_new_ones_are_served_soon(
    replicas: Served, texts: dict[tuple[str, int], str]
) -> None:
    killed: list[float] = []

    def pods() -> list[Object]:
        found = replicas.site.client.list_all("Pod", NAMESPACE, labels=f"{LABEL_ROUTER}={NAME}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def kill() -> None:
        (old,) = pods()
        killed.append(time.time())
        name = old["metadata"]["name"]
        replicas.site.kubectl("delete", "pod", name, f"--namespace={NAMESPACE}", "--grace-period=0", "--force")
        poll(
            lambda: any(one.door == HTTP and one.first > killed[0] + 0.5 and not one.error for one in streams.answers),
            timeout_s=60,
        )

    with load(replicas) as streams:
        streams.wait_answers(STREAMS)
        kill()
        streams.wait_answers(STREAMS)
        answers = streams.finish()
    broken = [one for one in answers if one.error]
    assert broken
    assert {one.door for one in broken} == {HTTP}
    began_after = [one for one in answers if one.door == HTTP and one.began > killed[0] and not one.error]
    gap = min(one.first for one in began_after) - killed[0]
    replicas.site.keep(
        "replicas-router-killed.txt", f"{len(broken)} broken; first token of a new stream after {gap:.1f} s\n"
    )
    check([one for one in answers if not one.error], texts)
    assert gap <= SERVED_AGAIN_S

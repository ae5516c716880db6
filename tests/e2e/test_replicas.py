"""Several replicas behind a router on three real nodes, under a load of sixteen streams that never pauses.

Half of the streams are of our own API through the Service, half of the OpenAI API through the router. No request may
fail and every text is the undisturbed one, but where the router itself is killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from hetero_api.contract import LABEL_REPLICA, LABEL_ROUTER
from tests.e2e.conftest import install_operator
from tests.e2e.harness.node_settings import NodePlan
from tests.e2e.load import GRPC, HTTP
from tests.e2e.replicas import (
    NAME,
    NAMESPACE,
    STREAMS,
    Texts,
    check,
    disturbed,
    load,
    manifest,
    pods_of,
    undisturbed,
    wait_replicas,
)  # fmt: skip
from tests.e2e.served import Served, is_true
from tests.e2e.site import Site, image_archives, own_nodes
from tests.support.kube.polling import poll

SERVED_AGAIN_S: Final = 30.0
"""Allowed to a killed router's next pod on a machine of two cores; the figure is kept among the artifacts."""


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


@pytest.fixture(scope="module")
def texts(replicas: Served) -> Texts:
    return undisturbed(replicas)


def scale(served: Served, number: int) -> None:
    served.site.kubectl("scale", f"hinf/{served.name}", f"--replicas={number}", f"--namespace={served.namespace}")
    wait_replicas(served, number)


def test_replicas_come_and_go_and_no_request_fails(replicas: Served, texts: Texts) -> None:
    def change() -> None:
        scale(replicas, 3)
        scale(replicas, 1)

    check(disturbed(replicas, "scale", change), texts)


def test_a_new_spec_rolls_out_and_no_request_fails(replicas: Served, texts: Texts) -> None:
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


def test_a_node_is_drained_and_no_request_fails(replicas: Served, texts: Texts) -> None:
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


def node_to_drain(served: Served) -> str:
    """A node with pods of one replica; not the one that the load comes from."""
    replicas_on: dict[str, set[str]] = {}
    for pod in pods_of(served):
        replicas_on.setdefault(pod["spec"]["nodeName"], set()).add(pod["metadata"]["labels"].get(LABEL_REPLICA, "0"))
    found = [name for name, on_it in replicas_on.items() if name != "node-1" and len(on_it) == 1]
    assert found, f"no node has pods of a single replica: {replicas_on}"
    return found[0]


def test_a_killed_routers_streams_end_in_errors_and_new_ones_are_served_soon(replicas: Served, texts: Texts) -> None:
    with load(replicas) as streams:
        streams.wait_answers(STREAMS)
        (router,) = replicas.site.client.list_all("Pod", NAMESPACE, labels=f"{LABEL_ROUTER}={NAME}")
        killed = time.time()
        replicas.site.kubectl(
            "delete", "pod", router["metadata"]["name"], f"--namespace={NAMESPACE}", "--grace-period=0", "--force"
        )

        def served_since() -> list[float]:
            """Times of first tokens of requests that began after it was killed, through the router."""
            answers = [one for one in streams.answers if one.door == HTTP and one.began > killed]
            return [one.first for one in answers if not one.error]

        poll(lambda: len(served_since()) >= STREAMS // 2, timeout_s=2 * SERVED_AGAIN_S)
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

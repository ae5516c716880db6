"""The router on a real API server: its objects and its condition; and how it finds gateways, with the rights that the
operator gave its account and no others, by real SMG, a real gateway, and a pod that the test plays for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_api.contract import KIND, LABEL_NAME, LABEL_ROLE, LABEL_ROUTER, ROLE_GATEWAY, ROUTER_PORT
from hetero_gateway.server.config import read_model
from tests.cluster.workloads import pod
from tests.support.hetero_resources import ABSENT
from tests.support.kube.client import Object
from tests.support.kube.cluster import Cluster
from tests.support.kube.kubelet import Kubelet
from tests.support.kube.polling import poll
from tests.support.kube.ports import free_port
from tests.support.operator_process import OperatorProcess
from tests.support.operator_scene import Scene
from tests.support.router_process import route
from tests.unit.server.router_setup import RouterBench
from tests.unit.server.server_setup import write_manifest, write_model

START_S = 60.0
ROUTED = {"router.type": "SMG", "suspend": True}


@pytest.fixture
def operator(scene: Scene) -> Iterator[OperatorProcess]:
    with scene.operator() as operator:
        yield operator


OWN = (
    ("Deployment", "x-router"), ("Service", "x-router"), ("Service", "x-engines"), ("ServiceAccount", "x-router"),
    ("Role", "x-router"), ("RoleBinding", "x-router"), ("NetworkPolicy", "x-router"),
)  # fmt: skip


def arguments_of(scene: Scene, name: str) -> list[str]:
    """Command line of a Deployment's container."""
    found = scene.client.get("Deployment", name, scene.namespace)
    arguments: list[str] = found["spec"]["template"]["spec"]["containers"][0]["args"]
    return arguments


def router_pod(scene: Scene) -> Object:
    """The router's pod, once there is one that is not ending."""

    def probe() -> Object | None:
        pods = scene.client.list_all("Pod", scene.namespace, labels=f"{LABEL_ROUTER}=x")
        return next((item for item in pods if not item["metadata"].get("deletionTimestamp")), None)

    return poll(probe, timeout_s=START_S, describe=lambda: "the router has no pod")


def test_it_comes_changes_and_goes_with_the_spec_and_says_whether_it_is_ready(
    scene: Scene, operator: OperatorProcess
) -> None:
    scene.add_node()
    scene.apply("x", {"pools.0.ranks": 1})
    scene.wait_for_condition("x", "RouterReady", "False", reason="NotRequested")
    assert "--router-port" not in arguments_of(scene, "x-gateway")

    scene.apply("x", {"pools.0.ranks": 1, "router.type": "SMG"})
    scene.wait_for_condition("x", "RouterReady", "False", reason="RouterNotReady")
    for kind, name in OWN:
        found = scene.client.get(kind, name, scene.namespace)
        assert [owner["kind"] for owner in found["metadata"]["ownerReferences"]] == [KIND]
    door = arguments_of(scene, "x-gateway")
    assert door[door.index("--router-port") + 1] == str(ROUTER_PORT)
    Kubelet(scene.client, scene.namespace).run(router_pod(scene)["metadata"]["name"])
    scene.wait_for_condition("x", "RouterReady", "True", reason="Serving")
    scene.wait_quiet(quiet_s=1.0)

    pods = {item["metadata"]["uid"] for item in scene.owned.pods("x")}
    scene.apply("x", {"pools.0.ranks": 1, "router.type": "SMG", "router.policy": "LeastLoad", "router.port": 443})
    poll(lambda: "LeastLoad" in arguments_of(scene, "x-router"), timeout_s=START_S, describe=lambda: "no new policy")
    port = poll(lambda: port_of(scene) == 443, timeout_s=START_S, describe=lambda: f"port is {port_of(scene)}")
    assert port
    assert {item["metadata"]["uid"] for item in scene.owned.pods("x")} == pods

    scene.apply("x", {"pools.0.ranks": 1, "router.type": ABSENT})
    for kind, name in OWN:
        scene.client.wait_gone(kind, name, scene.namespace)
    scene.wait_for_condition("x", "RouterReady", "False", reason="NotRequested")
    scene.wait_for_condition("x", "Accepted", "True")
    scene.wait_quiet(quiet_s=1.0)
    assert "--router-port" not in arguments_of(scene, "x-gateway")


def port_of(scene: Scene) -> Any:
    return scene.client.get("Service", "x-router", scene.namespace)["spec"]["ports"][0]["port"]


def test_a_router_that_would_let_in_whom_the_gateway_refuses_is_refused(
    scene: Scene, operator: OperatorProcess
) -> None:
    keys = {"gateway.auth": {"keysSecretRef": {"name": "clients"}}}
    scene.apply("x", {**keys, "router.type": "SMG", "router.cacheIsolation": "Shared"})
    told = scene.wait_for_condition("x", "Accepted", "False", reason="InvalidSpec")
    assert told["message"].startswith("spec.router.keysSecretRef: is required")
    scene.apply("x", {**keys, "router": {"type": "SMG", "cacheIsolation": "Shared", "keysSecretRef": {"name": "own"}}})
    scene.wait_for_condition("x", "Accepted", "True")


def gateway_pod(scene: Scene, name: str, address: str) -> str:
    """A pod with the labels of a gateway of `x`, at an address."""
    made = pod(name, scene.namespace)
    made["metadata"]["labels"] = {LABEL_NAME: "x", LABEL_ROLE: ROLE_GATEWAY}
    scene.client.create(made)
    Kubelet(scene.client, scene.namespace).run(name)
    scene.client.patch_status("Pod", name, {"podIP": address, "podIPs": [{"ip": address}]}, scene.namespace)
    return name


async def until(http: httpx.AsyncClient, path: str, status: int, log: Path) -> None:
    """Until the router answers so."""
    last: object = None
    try:
        async with asyncio.timeout(START_S):
            while True:
                try:
                    last = (await http.get(path)).status_code
                    if last == status:
                        return
                except httpx.TransportError as error:
                    last = error
                await asyncio.sleep(0.1)
    except TimeoutError:
        told = await asyncio.to_thread(log.read_text, "utf-8", "replace")
        raise AssertionError(f"{path} answers {last}, not {status}; the router's log ends {told[-4000:]}") from None


async def test_it_serves_while_a_gateway_is_ready_and_says_when_none_is(
    cluster: Cluster, scene: Scene, operator: OperatorProcess, tmp_path: Path
) -> None:
    scene.apply("x", ROUTED)
    scene.client.wait_for("RoleBinding", "x-router", scene.namespace, until=lambda _: True)
    kubeconfig = cluster.kubeconfig(cluster.service_account("x-router", scene.namespace))
    manifest = write_manifest(tmp_path / "g.yaml", model={"uri": "hf://org/model", "maxModelLen": 4096})
    write_model(tmp_path, max_position_embeddings=65_536)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    log, port = tmp_path / "router.log", free_port()
    async with RouterBench(read_model(manifest, tmp_path)) as bench:
        await bench.join()
        door = bench.addresses.router
        pods = f"{scene.namespace}/{LABEL_NAME}=x,{LABEL_ROLE}={ROLE_GATEWAY}"
        listen = ("--port", str(port), "--metrics-port", str(free_port()))
        async with (
            route(*listen, "--gateway", door, "--pods", pods, log=log, variables={"KUBECONFIG": str(kubeconfig)}),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http,
        ):
            await until(http, "/liveness", 200, log)
            await until(http, "/readiness", 503, log)
            gateway_pod(scene, "x-gateway-a", "127.0.0.1")
            await until(http, "/readiness", 200, log)
            told = await http.post("/v1/completions", json={"model": "g", "prompt": "a", "max_tokens": 2})
            assert told.status_code == 200, told.text
            scene.client.delete("Pod", "x-gateway-a", scene.namespace, grace_s=0)
            await until(http, "/readiness", 503, log)

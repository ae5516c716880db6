"""A resource of several replicas on nodes, and a load that must not notice what happens to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hetero_api.contract import INFERENCE_PORT, ROLE_GATEWAY, ROLE_RANK
from tests.e2e.load import Answer, Load
from tests.e2e.served import Served, Watching, cpu_manifest, is_current, is_true
from tests.e2e.site import Site
from tests.support.kube.client import Object

NAME: Final = "many"
NAMESPACE: Final = "models"
STREAMS: Final = 16
MAX_TOKENS: Final = 32
MOVE_TIMEOUT_S: Final = 300.0
ROUTER_PORT: Final = 8000
Texts = Mapping[tuple[str, int], str]
"""By door and prompt."""


def manifest(site: Site, replicas: int, *, routed: bool = True) -> Object:
    """SmolLM2 on one rank a replica: one of them, with its gateway, fits a node of two cores."""
    cpu = {"coresPerRank": 1, "memoryPerRank": "2Gi", "numa": {"policy": "BestEffort"}}
    small = {"cpuMillis": 200, "memory": "1Gi"}
    return cpu_manifest(
        site,
        NAME,
        pools=[{"name": "cpu", "type": "CPU", "ranks": 1, "cpu": cpu}],
        placement={"mode": "Tensor", "shares": {"attention": [1], "mlp": [1], "vocabulary": [1]}},
        gateway={"resources": small},
        replicas=replicas,
        disruptionBudget={"enabled": True},
        **({"router": {"type": "SMG", "resources": small}} if routed else {}),
    )


def load(served: Served) -> Load:
    """Streams from the first node: half through the router where there is one."""
    router = served.site.client.find("Service", f"{NAME}-router", NAMESPACE)
    return Load(
        served.site.nodes["node-1"],
        NAME,
        grpc=address_of(served.site.client.get("Service", NAME, NAMESPACE), INFERENCE_PORT),
        http=address_of(router, ROUTER_PORT) if router else "",
        streams=STREAMS,
        max_tokens=MAX_TOKENS,
    )


def address_of(service: Object, port: int) -> str:
    """A Service's own address, which nodes know the way to."""
    return f"{service['spec']['clusterIP']}:{port}"


def undisturbed(served: Served) -> Texts:
    """What each door answers to each prompt when nothing happens."""
    with load(served) as streams:
        streams.wait_answers(STREAMS)
        answers = streams.finish()
    assert [one for one in answers if one.error] == []
    found = {(one.door, one.prompt): one.text for one in answers}
    assert len(found) == STREAMS
    assert all(found.values())
    return found


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
    told = (
        f"{len(answers)} requests, {len(failed)} failed, {min(least)} or more replicas ready, slowest {slowest:.1f} s"
    )
    served.site.keep(f"replicas-{name}.txt", "\n".join([told, *(str(one) for one in failed), ""]))
    assert min(least) >= 1
    return answers


def check(answers: Sequence[Answer], texts: Texts) -> None:
    """No request failed, and none has another text than the undisturbed one."""
    assert [one for one in answers if one.error] == []
    assert [one for one in answers if one.text != texts[one.door, one.prompt]] == []


def wait_replicas(served: Served, number: int) -> Object:
    """The resource once so many replicas serve, all of the newest spec."""

    def holds(found: Object) -> bool:
        status = found.get("status", {})
        counts = [status.get(name) for name in ("replicas", "readyReplicas", "updatedReplicas")]
        return is_current(found) and is_true(found, "Ready") and counts == [number] * 3

    return served.wait(holds, MOVE_TIMEOUT_S)


def pods_of(served: Served) -> list[Object]:
    """Ranks and gateways."""
    return [*served.pods(ROLE_RANK).values(), *served.pods(ROLE_GATEWAY).values()]

"""A resource of several replicas on nodes, and a load that must not notice what happens to it.

The model is random and tiny, so that two cores serve sixteen streams while they start and stop pods of three nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file

from hetero_api.contract import INFERENCE_PORT, ROLE_GATEWAY, ROLE_RANK
from tests.e2e.load import Answer, Load
from tests.e2e.served import Served, Watching, cpu_manifest, is_current, is_true
from tests.e2e.site import Site
from tests.support.kube.client import Object
from tests.support.tiny_models import save_tiny_model

NAME: Final = "many"
NAMESPACE: Final = "models"
STREAMS: Final = 16
MAX_TOKENS: Final = 64
MAX_MODEL_LEN: Final = 2048
MOVE_TIMEOUT_S: Final = 300.0
ROUTER_PORT: Final = 8000
NUM_ASCII: Final = 94
"""Tokens from "!" to "~", which come first in the tokenizer."""
Texts = Mapping[tuple[str, int], str]
"""By door and prompt."""


def save_ascii_model(folder: Path) -> Path:
    """Save a tiny random model whose greedy text is ASCII, so that each way to stream it gives the same letters."""
    save_tiny_model(folder, "llama", max_position_embeddings=MAX_MODEL_LEN)
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"][NUM_ASCII:] = 0
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def manifest(site: Site, replicas: int, *, routed: bool = True) -> Object:
    """One rank a replica. All other pods ask for less than a core, so each of three nodes of two cores has room for a
    rank, wherever those are.
    """
    less = {"name": "gateway", "resources": {"requests": {"cpu": "100m"}}}
    cpu = {"coresPerRank": 1, "memoryPerRank": "1Gi", "numa": {"policy": "BestEffort"}}
    return cpu_manifest(
        site,
        NAME,
        model={"uri": site.model_uri, "dtype": "float32", "maxModelLen": MAX_MODEL_LEN},
        pools=[{"name": "cpu", "type": "CPU", "ranks": 1, "cpu": cpu}],
        placement={"mode": "Tensor", "shares": {"attention": [1], "mlp": [1], "vocabulary": [1]}},
        gateway={"resources": {"cpuMillis": 500, "memory": "512Mi"}, "podTemplate": {"spec": {"containers": [less]}}},
        replicas=replicas,
        disruptionBudget={"enabled": True},
        idle={"responder": {"enabled": True}},
        **({"router": {"type": "SMG", "resources": {"cpuMillis": 250, "memory": "512Mi"}}} if routed else {}),
    )


def load(served: Served, *, max_tokens: int = MAX_TOKENS) -> Load:
    """Streams from the first node: half through the router where there is one."""
    router = served.site.client.find("Service", f"{NAME}-router", NAMESPACE)
    return Load(
        served.site.nodes["node-1"],
        NAME,
        grpc=address_of(served.site.client.get("Service", NAME, NAMESPACE), INFERENCE_PORT),
        http=address_of(router, ROUTER_PORT) if router else "",
        streams=STREAMS,
        max_tokens=max_tokens,
    )


def address_of(service: Object, port: int) -> str:
    """A Service's own address, which nodes know the way to."""
    return f"{service['spec']['clusterIP']}:{port}"


def undisturbed(served: Served, *, max_tokens: int = MAX_TOKENS) -> Texts:
    """What each door answers to each prompt when nothing happens."""
    with load(served, max_tokens=max_tokens) as streams:
        streams.wait_answers(STREAMS)
        answers = streams.finish()
    assert [one for one in answers if one.error] == []
    found = {(one.door, one.prompt): one.text for one in answers}
    assert len(found) == STREAMS
    assert all(found.values())
    return found


def disturbed(served: Served, name: str, change: Callable[[], object], *, max_tokens: int = MAX_TOKENS) -> list[Answer]:
    """What streams got that flowed before, while and after `change` was made; kept among the artifacts."""
    least: list[int] = []
    with load(served, max_tokens=max_tokens) as streams:
        streams.wait_answers(STREAMS)
        with Watching(lambda: least.append(served.object["status"].get("readyReplicas", 0))):
            change()
        streams.wait_answers(STREAMS)
        answers = streams.finish()
    failed = [one for one in answers if one.error]
    told = f"{figures(answers)}, {min(least)} or more replicas ready"
    served.site.keep(f"replicas-{name}.txt", "\n".join([told, *(str(one) for one in failed), ""]))
    print(f"{name}: {told}")
    assert min(least) >= 1
    return answers


def figures(answers: Sequence[Answer]) -> str:
    """How many requests there were, for how long, and what the slowest took."""
    failed = sum(bool(one.error) for one in answers)
    slowest = max(one.ended - one.began for one in answers)
    lasted = max(one.ended for one in answers) - min(one.began for one in answers)
    return f"{len(answers)} requests in {lasted:.0f} s, {failed} failed, slowest {slowest:.1f} s"


def check(answers: Sequence[Answer], texts: Texts) -> None:
    """No request failed, and none has another text than the undisturbed one."""
    assert [one for one in answers if one.error] == []
    assert [one for one in answers if one.text != texts[one.door, one.prompt]] == []


def wait_replicas(served: Served, number: int) -> Object:
    """The resource once so many replicas serve, all of the newest spec; at 0 once no pod is left."""
    kind = "Ready" if number else "Suspended"
    names = ["replicas", "readyReplicas", *(["updatedReplicas"] if number > 1 else [])]

    def holds(found: Object) -> bool:
        status = found.get("status", {})
        return is_current(found) and is_true(found, kind) and {status.get(name) for name in names} == {number}

    return served.wait(holds, MOVE_TIMEOUT_S)


def pods_of(served: Served) -> list[Object]:
    """Ranks and gateways."""
    return [*served.pods(ROLE_RANK).values(), *served.pods(ROLE_GATEWAY).values()]

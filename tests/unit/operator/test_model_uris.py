"""URIs of models that are one GGUF file of a folder, of which the file is served; and of adapters, in pods of ranks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from hetero_api.spec import HeteroInferenceSpec
from hetero_operator.reconcile.manifests.model_volumes import ModelUri, model_options, parse_model_uri
from hetero_operator.reconcile.model import PodEvent
from hetero_operator.reconcile.status.containers import Surroundings, init_trouble, mount_trouble
from hetero_operator.reconcile.status.reasons import Reason
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import PLAIN, resource_of

pytestmark = pytest.mark.unit

FOLDER = "/var/lib/hetero/model"


@pytest.mark.parametrize(
    ("uri", "parts", "path"),
    [
        ("file:///srv/m", ModelUri("file", "", "/srv/m"), FOLDER),
        ("file:///srv/m/a-Q8_0.gguf", ModelUri("file", "", "/srv/m", "a-Q8_0.gguf"), f"{FOLDER}/a-Q8_0.gguf"),
        ("pvc://claim/m/a.gguf", ModelUri("pvc", "claim", "m", "a.gguf"), f"{FOLDER}/a.gguf"),
        ("pvc://claim/a.gguf", ModelUri("pvc", "claim", "", "a.gguf"), f"{FOLDER}/a.gguf"),
        ("oci://image:1#/m/a.gguf", ModelUri("oci", "image:1", "m", "a.gguf"), f"{FOLDER}/a.gguf"),
        ("oci://image:1", ModelUri("oci", "image:1", "models"), FOLDER),
        ("hf://org/name:Q8_0", ModelUri("hf", "org/name:Q8_0", ""), FOLDER),
    ],
)
def test_a_file_is_served_from_its_folder(uri: str, parts: ModelUri, path: str) -> None:
    assert parse_model_uri(uri) == parts
    assert model_options(spec_of(uri)) == {"--model": path}
    assert model_options(spec_of("hf://a/b", draft=uri)) == {
        "--model": FOLDER,
        "--draft": path.replace("/model", "/draft", 1),
    }


def spec_of(uri: str, *, draft: str | None = None) -> HeteroInferenceSpec:
    speculative = {} if draft is None else {"kind": "Draft", "draft": {"uri": draft}}
    pool = {"name": "cpu", "type": "CPU", "ranks": 1, "cpu": {"coresPerRank": 1}}
    return HeteroInferenceSpec.model_validate(
        {"model": {"uri": uri}, "pools": [pool], "engine": {"speculative": speculative}}
    )


ADAPTERS = """
model: {uri: pvc://models/base}
pools: [{name: cpu, type: CPU, ranks: 1, env: {HTTPS_PROXY: "http://proxy:1"}}]
engine:
  adapters:
    maxLoaded: 5
    roots: [/adapters]
    load:
    - {name: hub, uri: hf://org/lora}
    - {name: own, directory: /adapters/own}
    - {name: claim, uri: pvc://models/lora}
    - {name: folder, uri: file:///srv/lora}
    - {name: image, uri: "oci://registry.example/lora:1"}
"""
IN_POD = "/var/lib/hetero/adapters"


def rendered_pods() -> tuple[dict[str, Any], dict[str, Any]]:
    """Pods of the gateway and of a rank."""
    todo = OperatorWorld(resource_of("g", ADAPTERS), PLAIN).plan()
    found = {
        item["kind"]: item["spec"]["template"]["spec"] for item in todo.apply if "template" in item.get("spec", {})
    }
    return found["Deployment"], found["StatefulSet"]


def test_adapters_that_are_named_by_uri_come_to_ranks_and_the_gateway_says_where() -> None:
    gateway, rank = rendered_pods()
    args = gateway["containers"][0]["args"]
    assert [args[at + 1] for at, text in enumerate(args) if text == "--adapter"] == [f"{IN_POD}/{n}" for n in range(4)]
    assert not any("adapter" in volume["name"] for volume in gateway["volumes"])
    assert "initContainers" not in gateway
    main = rank["containers"][0]
    mounts = {mount["mountPath"]: mount for mount in main["volumeMounts"] if mount["mountPath"].startswith(IN_POD)}
    assert list(mounts) == [f"{IN_POD}/{n}" for n in range(4)]
    assert all(mount["readOnly"] for mount in mounts.values())
    assert mounts[f"{IN_POD}/1"]["subPath"] == "lora"
    sources = {volume["name"]: volume for volume in rank["volumes"]}
    assert sources[mounts[f"{IN_POD}/1"]["name"]]["persistentVolumeClaim"]["claimName"] == "models"
    assert sources[mounts[f"{IN_POD}/2"]["name"]]["hostPath"]["path"] == "/srv/lora"
    fetch, copy = rank["initContainers"]
    assert fetch["args"] == [
        "--uri", "hf://org/lora", "--cache", "/var/lib/hetero/cache", "--into", f"{IN_POD}/0", "--adapter",
    ]  # fmt: skip
    assert copy["image"] == "registry.example/lora:1"
    assert copy["command"] == ["cp", "-a", "/models/.", f"{IN_POD}/3"]
    for container in (fetch, copy, main):
        assert {"name": "HTTPS_PROXY", "value": "http://proxy:1"} in container["env"]
    assert len(sources) == len(rank["volumes"])


def test_ranks_may_reach_the_hub_for_an_adapter_alone() -> None:
    policies = []
    for uri in ("hf://org/lora", "pvc://models/lora"):
        spec = ADAPTERS.replace("hf://org/lora", uri)
        todo = OperatorWorld(resource_of("g", spec), PLAIN).plan()
        policies.append([item for item in todo.apply if item["kind"] == "NetworkPolicy"])
    assert policies[0] != policies[1]


def test_trouble_with_an_adapter_is_told_as_trouble_with_a_model() -> None:
    _, rank = rendered_pods()
    for container in rank["initContainers"]:
        ended = {"name": container["name"], "state": {"terminated": {"exitCode": 3, "reason": "Error"}}}
        trouble = init_trouble(ended, Surroundings(datetime.now(UTC)))
        assert trouble is not None
        assert trouble.reason == Reason.MODEL_DOWNLOAD_FAILED
    for volume in (item["name"] for item in rank["volumes"] if item["name"].startswith("adapter-")):
        said = f'MountVolume.SetUp failed for volume "{volume}" : it is not there'
        trouble = mount_trouble([PodEvent("FailedMount", said)])
        assert trouble is not None
        assert trouble.reason == Reason.MODEL_VOLUME_NOT_READY

"""The CustomResourceDefinition as an API server takes it, and as kubectl shows it."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from hetero_api.crd import RULES_KEY, crd
from tests.support.crd_judge import stored
from tests.support.hetero_resources import resource
from tests.support.invalid_resources import VALID, ValidResource
from tests.support.kube.client import Client
from tests.support.kube.cluster import Cluster
from tests.support.kube.errors import ApiError
from tests.support.kube.tools import find_kubectl
from tests.support.kube.versions import Version

KIND = "HeteroInference"
SCHEMA: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
CEL_SINCE = Version(1, 25, 0)
STATUS: dict[str, Any] = {
    "ranks": "2/2",
    "readyReplicas": 1,
    "replicas": 1,
    "selector": "heteroinference.io/name=demo",
    "epoch": 3,
    "reason": "Serving",
    "restarts": {"count": 1},
    "placement": {"mode": "Tensor", "measuredTokensPerSecond": 41.5},
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "Serving", "lastTransitionTime": "2025-01-01T00:00:00Z"},
        {"type": "Accepted", "status": "True", "reason": "Valid", "lastTransitionTime": "2025-01-01T00:00:00Z"},
    ],
}
SERVER_SET = ("creationTimestamp", "generation", "managedFields", "namespace", "resourceVersion", "selfLink", "uid")


def kubectl(cluster: Cluster, namespace: str, *arguments: str) -> str:
    command = [str(find_kubectl()), f"--kubeconfig={cluster.admin_kubeconfig}", f"--namespace={namespace}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rules_below(schema: dict[str, Any]) -> int:
    children = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    return len(schema.get(RULES_KEY, ())) + sum(rules_below(child) for child in children if isinstance(child, dict))


def test_the_server_accepts_the_crd_whole(cluster: Cluster, client: Client) -> None:
    found = client.get("CustomResourceDefinition", "heteroinferences.heteroinference.io")
    conditions = {condition["type"]: condition["status"] for condition in found["status"]["conditions"]}
    assert (conditions["NamesAccepted"], conditions["Established"]) == ("True", "True")
    assert "NonStructuralSchema" not in conditions
    schema = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert rules_below(schema) == (rules_below(SCHEMA) if cluster.version >= CEL_SINCE else 0)


@pytest.mark.parametrize("case", [case for case in VALID if case.old is None], ids=lambda case: case.name)
def test_a_valid_resource_is_stored_with_its_defaults(client: Client, namespace: str, case: ValidResource) -> None:
    document = {**case.document, "metadata": {**case.document["metadata"], "namespace": namespace}}
    found = client.create(document)
    assert found["spec"] == stored(SCHEMA, case.document)["spec"]


def test_defaults_are_the_ones_in_the_golden_resource(client: Client, namespace: str) -> None:
    found = client.create(resource("demo", namespace))
    for key in SERVER_SET:
        found["metadata"].pop(key, None)
    assert found == {
        "apiVersion": "heteroinference.io/v1alpha1",
        "kind": KIND,
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"uri": "hf://example/model", "dtype": "auto", "quantization": "none", "cache": {}},
            "pools": [
                {
                    "name": "cpu", "type": "CPU", "ranks": 2, "ranksPerPod": 1, "sharedMemory": "1Gi", "scheduling": {},
                    "cpu": {"coresPerRank": 1, "memoryPerRank": "1Gi", "numa": {"policy": "BestEffort"}},
                }
            ],
            "topology": {"colocate": "None"},
            "placement": {
                "mode": "Auto", "shares": {}, "experts": "Auto", "rebalanceExperts": True,
                "workload": {"promptTokens": 512, "outputTokens": 128, "concurrency": 1},
            },
            "exchange": {"kind": "Auto"},
            "engine": {
                "maxNumSeqs": 64, "maxNumBatchedTokens": 512, "blockSize": 16, "gpuMemoryUtilization": 0.9,
                "enablePrefixCaching": True, "overlapScheduling": True, "enforceEager": False, "batchInvariant": False,
                "cacheLayout": "Paged", "kvCacheDtype": "auto", "samplingDefaults": "Model",
                "speculative": {"kind": "None", "maxTokens": 8},
                "expertDeferral": 0,
                "adapters": {"maxLoaded": 0, "maxRank": 16, "experts": False, "overHttp": False},
            },
            "gateway": {
                "service": {"type": "ClusterIP", "port": 50051, "httpPort": 8000}, "maxQueuedRequests": 1024,
                "http": {"toolCallFormat": "Auto", "strictFields": False, "page": True},
                "resources": {"cpuMillis": 1000, "memory": "2Gi"}, "drainTimeoutSeconds": 60,
            },
            "recovery": {
                "rendezvousTimeoutSeconds": 600, "startupTimeoutSeconds": 1800, "stepTimeoutSeconds": 60,
                "maxRestarts": 5, "windowSeconds": 3600, "nodeLostTimeoutSeconds": 300,
            },
            "scheduling": {"gang": {"scheduler": "None"}},
            "images": {"pullPolicy": "IfNotPresent"},
            "podMetadata": {},
            "networkPolicy": {"enabled": True, "allowModelEgress": True},
            "disruptionBudget": {"enabled": False},
            "monitoring": {"podMonitor": True, "intervalSeconds": 30},
            "suspend": False,
            "replicas": 1,
            "rollout": {"strategy": "RollingUpdate", "maxUnavailable": 1, "maxSurge": 0},
            "idle": {"level": 1, "responder": {"enabled": False, "retryAfterSeconds": 30}},
            "router": {
                "type": "None", "policy": "CacheAware", "cacheIsolation": "Tenant", "port": 8000, "replicas": 2,
                "resources": {"cpuMillis": 1000, "memory": "2Gi"},
            },
        },
    }  # fmt: skip


def test_unknown_fields_are_pruned(client: Client, namespace: str) -> None:
    found = client.create(resource("demo", namespace, {"engine.turbo": True, "pools.0.cpu.coresPerRanks": 2}))
    assert "turbo" not in found["spec"]["engine"]
    assert found["spec"]["pools"][0]["cpu"].keys() == {"coresPerRank", "memoryPerRank", "numa"}


def test_status_and_spec_are_written_apart(client: Client, namespace: str) -> None:
    created = client.create(resource("demo", namespace) | {"status": STATUS})
    assert "status" not in created
    told = client.patch(KIND, "demo", {"status": STATUS, "spec": {"suspend": True}}, namespace, subresource="status")
    assert (told["status"], told["spec"]["suspend"]) == (STATUS, False)
    assert told["metadata"]["generation"] == created["metadata"]["generation"]
    changed = client.patch(KIND, "demo", {"status": {"ranks": "0/2"}, "spec": {"suspend": True}}, namespace)
    assert (changed["status"], changed["spec"]["suspend"]) == (STATUS, True)
    assert changed["metadata"]["generation"] == created["metadata"]["generation"] + 1


def test_a_status_that_makes_no_sense_is_refused(client: Client, namespace: str) -> None:
    client.create(resource("demo", namespace))
    for status in ({"epoch": -1}, {"conditions": [{"type": "Ready"}]}):
        with pytest.raises(ApiError) as refusal:
            client.patch_status(KIND, "demo", status, namespace)
        assert refusal.value.code == 422


def test_scale_reads_and_sets_replicas(cluster: Cluster, client: Client, namespace: str) -> None:
    client.create(resource("demo", namespace))
    client.patch_status(KIND, "demo", STATUS, namespace)
    path = f"/apis/heteroinference.io/v1alpha1/namespaces/{namespace}/heteroinferences/demo/scale"
    scale = client.request("GET", path)
    assert scale["spec"] == {"replicas": 1}
    assert scale["status"] == {"replicas": 1, "selector": "heteroinference.io/name=demo"}
    kubectl(cluster, namespace, "scale", "hinf/demo", "--replicas=0")
    assert client.get(KIND, "demo", namespace)["spec"]["replicas"] == 0
    with pytest.raises(ApiError, match=r"spec\.replicas"):
        client.patch(KIND, "demo", {"spec": {"replicas": 33}}, namespace, subresource="scale")


def test_kubectl_get_shows_what_matters(cluster: Cluster, client: Client, namespace: str) -> None:
    client.create(resource("demo", namespace))
    client.patch_status(KIND, "demo", STATUS, namespace)
    head, row = kubectl(cluster, namespace, "get", "hinf").splitlines()
    assert head.split() == ["NAME", "READY", "RANKS", "EPOCH", "RESTARTS", "REASON", "AGE"]
    assert row.split()[:-1] == ["demo", "True", "2/2", "3", "1", "Serving"]
    head, row = kubectl(cluster, namespace, "get", "hinf", "-o", "wide").splitlines()
    assert head.split()[6:] == ["MODEL", "MODE", "TOK/S", "AGE"]
    assert row.split()[6:-1] == ["hf://example/model", "Tensor", "41.5"]


def test_kubectl_get_of_a_new_resource_has_no_false_values(cluster: Cluster, client: Client, namespace: str) -> None:
    client.create(resource("demo", namespace))
    _, row = kubectl(cluster, namespace, "get", "heteroinference").splitlines()
    assert len(row.split()) == 2  # name and age


def test_kubectl_get_all_lists_it(cluster: Cluster, client: Client, namespace: str) -> None:
    client.create(resource("demo", namespace))
    assert "heteroinference.heteroinference.io/demo" in kubectl(cluster, namespace, "get", "all")


def test_kubectl_explains_a_field(cluster: Cluster, namespace: str) -> None:
    text = " ".join(kubectl(cluster, namespace, "explain", "hinf.spec.pools.cpu.numa.policy").split())
    assert "Required: a rank that cannot be bound to cores and memory of one node does not start." in text

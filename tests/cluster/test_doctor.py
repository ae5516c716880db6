"""`hetero doctor --cluster` against a real API server, with the rights of its user."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from hetero_api.contract import EXIT_FAILURE, VERSION
from hetero_client.cli.main import app
from hetero_client.doctor import cluster_checks
from hetero_client.doctor.cluster import OPERATOR_LABELS, Answer, kubectl, read_cluster
from hetero_client.doctor.findings import Finding, Grade
from tests.support.kube.client import Client
from tests.support.kube.cluster import Cluster
from tests.support.kube.nodes import FakeNodes
from tests.support.kube.tools import find_kubectl

NODE = "doctors-node"
GPU_NODE = "doctors-gpu-node"


@pytest.fixture(autouse=True)
def _kubectl_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{find_kubectl().parent}:/usr/bin:/bin")


def diagnose() -> dict[str, Finding]:
    result = CliRunner().invoke(app, ["doctor", "--cluster", "--json"])
    assert result.exit_code == EXIT_FAILURE, result.output
    return {each["check"]: Finding(**each) for each in json.loads(result.stdout)["findings"]}


def test_the_definition_that_was_applied_is_the_packages(
    cluster: Cluster, client: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = dict(label.split("=") for label in OPERATOR_LABELS.split(","))
    client.create(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {
                "name": "stopped", "namespace": namespace, "labels": {**labels, "app.kubernetes.io/version": VERSION},
            },
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "none"}]}},
            },
        }
    )  # fmt: skip
    monkeypatch.setenv("KUBECONFIG", str(cluster.admin_kubeconfig))
    found = diagnose()
    assert found["API server"].seen.startswith(f"v{cluster.version}")
    assert (found["definition"].grade, found["definition"].cost) == (Grade.OK, "")
    assert found["operator"].grade == Grade.FAIL  # nodes come and go with other tests
    assert f"{namespace}/stopped: no pod is available" in found["operator"].seen


def test_what_a_user_may_not_read_is_a_warning(
    cluster: Cluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(cluster.user("ann"))))
    found = cluster_checks.check_cluster(read_cluster(kubectl(None)))
    grades = {finding.check: finding.grade for finding in found}
    assert (grades["API server"], grades["definition"], grades["nodes"]) == (Grade.OK, Grade.WARN, Grade.WARN)
    assert "Forbidden" in next(finding.seen for finding in found if finding.check == "definition")


def test_nodes_tell_their_devices_and_reserved_pages(
    scheduling_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(scheduling_cluster.admin_kubeconfig))
    with scheduling_cluster.client() as client, FakeNodes(client) as nodes:
        nodes.add(NODE, resources={"hugepages-1Gi": "64Gi"}, labels={"nvidia.com/gpu.present": "true"})
        nodes.add(GPU_NODE, gpus=8)
        client.wait_for("Node", GPU_NODE, until=lambda node: not node["spec"].get("taints"))
        client.wait_for("Node", NODE, until=lambda node: not node["spec"].get("taints"))
        seen = read_cluster(kubectl(None))
    mine = [node for node in seen.nodes.items if node["metadata"]["name"] in (NODE, GPU_NODE)]
    own = replace(seen, nodes=Answer({"items": mine}))
    assert cluster_checks.check_nodes(own).seen == "2, all ready"
    assert cluster_checks.check_node_pages(own).seen == f"64.0 GiB on {NODE}"
    gpus = cluster_checks.check_node_gpus(own)
    assert gpus.seen == f"8 nvidia.com/gpu on {GPU_NODE}; {NODE} have devices and offer none"
    assert "cannot be read" in cluster_checks.check_cpu_manager(own).seen  # nobody listens on these nodes

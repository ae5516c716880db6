"""Every check of a cluster, against answers of an API server that are written here."""

from __future__ import annotations

import copy
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hetero_api.contract import VERSION
from hetero_api.crd import crd
from hetero_client.doctor import cluster_checks
from hetero_client.doctor.cluster import Answer, Cluster, kubectl, read_cluster
from hetero_client.doctor.cluster_checks import CLUSTER_CHECKS, NODE_CHECKS, check_cluster, field_paths
from hetero_client.doctor.findings import Finding, Grade

pytestmark = pytest.mark.unit

FORBIDDEN = 'Error from server (Forbidden): nodes is forbidden: User "ann" cannot list resource "nodes"'
MISSING = "Error from server (NotFound): the server could not find the requested resource"
POLICIES = {"cpuManagerPolicy": "static", "topologyManagerPolicy": "single-numa-node", "memoryManagerPolicy": "Static"}
DEFINITION = crd()
Check = Callable[[Cluster], Finding]


def node(name: str, *, ready: bool = True, labels: Mapping[str, str] | None = None, **resources: str) -> dict[str, Any]:
    allocatable = {key.replace("_", "-"): value for key, value in resources.items()}
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {},
        "status": {"conditions": conditions, "allocatable": allocatable},
    }


def nodes(*items: dict[str, Any]) -> Answer:
    return Answer({"items": list(items)})


def operators(*, available: int = 1, version: str = VERSION) -> Answer:
    metadata = {"name": "op", "namespace": "system", "labels": {"app.kubernetes.io/version": version}}
    return Answer({"items": [{"metadata": metadata, "status": {"availableReplicas": available}}]})


def definition(change: Callable[[dict[str, Any]], object] | None = None) -> Answer:
    found = copy.deepcopy(DEFINITION)
    if change is not None:
        change(found["spec"]["versions"][0])
    return Answer(found)


def fields(version: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    return found


def kubelet(**changes: str) -> Answer:
    return Answer({"kubeletconfig": {**POLICIES, **changes}})


def cluster(**changes: Any) -> Cluster:
    answers: dict[str, Any] = {
        "version": Answer({"gitVersion": "v1.34.1"}), "definition": definition(), "operators": operators(),
        "nodes": nodes(node("a"), node("b")), "kubelets": {"a": kubelet(), "b": kubelet()},
    }  # fmt: skip
    return Cluster(**{**answers, **changes})


TAINTED = node("control-plane", ready=False)
TAINTED["spec"] = {"taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]}
GPU_NODE = {"metadata": {"name": "g", "labels": {"nvidia.com/gpu.present": "true"}}, "spec": {}, "status": {}}
CASES: list[tuple[Check, dict[str, Any], Grade, str]] = [
    (cluster_checks.check_definition, {"definition": Answer(problem=MISSING)}, Grade.FAIL, "is not there"),
    (cluster_checks.check_definition, {"definition": Answer(problem=FORBIDDEN)}, Grade.WARN, "cannot be read"),
    (
        cluster_checks.check_definition, {"definition": definition(lambda version: fields(version).pop("idle"))},
        Grade.WARN, "lacks spec.idle",
    ),
    (
        cluster_checks.check_definition,
        {"definition": definition(lambda version: fields(version).update(later={"type": "string"}))},
        Grade.WARN, "has also spec.later",
    ),
    (
        cluster_checks.check_definition, {"definition": definition(lambda version: version.update(name="v1beta1"))},
        Grade.FAIL, "v1alpha1 is not served",
    ),
    (cluster_checks.check_operator, {"operators": Answer({"items": []})}, Grade.FAIL, "there is none"),
    (cluster_checks.check_operator, {"operators": operators(available=0)}, Grade.FAIL, "system/op: no pod is"),
    (cluster_checks.check_operator, {"operators": operators(version="0.0.9")}, Grade.WARN, "version 0.0.9"),
    (cluster_checks.check_operator, {"operators": Answer(problem=FORBIDDEN)}, Grade.WARN, "cannot be read"),
    (cluster_checks.check_nodes, {"nodes": nodes(TAINTED)}, Grade.FAIL, "none of 1 is ready"),
    (
        cluster_checks.check_nodes, {"nodes": nodes(node("a"), node("b", ready=False))}, Grade.WARN,
        "1 of 2 are ready, not b",
    ),
    (cluster_checks.check_nodes, {"nodes": nodes(node("a"), TAINTED)}, Grade.OK, "1, all ready"),
    (cluster_checks.check_nodes, {"nodes": Answer(problem=FORBIDDEN)}, Grade.WARN, "cannot be read"),
    (
        cluster_checks.check_cpu_manager, {"kubelets": {"a": kubelet(), "b": kubelet(cpuManagerPolicy="none")}},
        Grade.WARN, "none on b",
    ),
    (
        cluster_checks.check_cpu_manager, {"kubelets": {"a": kubelet(), "b": Answer(problem=FORBIDDEN)}}, Grade.OK,
        "static on a; not readable on b",
    ),
    (
        cluster_checks.check_cpu_manager,
        {"kubelets": {"a": Answer(problem=FORBIDDEN), "b": Answer(problem=FORBIDDEN)}}, Grade.WARN, "cannot be read",
    ),
    (
        cluster_checks.check_topology_manager,
        {"kubelets": {name: kubelet(topologyManagerPolicy="best-effort") for name in "ab"}}, Grade.WARN,
        "best-effort on a, b",
    ),
    (
        cluster_checks.check_memory_manager, {"kubelets": {"a": Answer({"kubeletconfig": {}}), "b": kubelet()}},
        Grade.WARN, "not told on a",
    ),
    (
        cluster_checks.check_node_pages,
        {"nodes": nodes(node("a", hugepages_1Gi="64Gi"), node("b", hugepages_2Mi="0"))}, Grade.WARN, "64.0 GiB on a",
    ),
    (
        cluster_checks.check_node_gpus, {"nodes": nodes(GPU_NODE, node("b"))}, Grade.WARN,
        "no node offers nvidia.com/gpu; g have devices and offer none",
    ),
]  # fmt: skip


def test_a_good_cluster_passes_every_check() -> None:
    findings = check_cluster(cluster())
    assert [finding for finding in findings if finding.grade is not Grade.OK] == []
    assert len({finding.check for finding in findings}) == 1 + len(CLUSTER_CHECKS) + len(NODE_CHECKS)


@pytest.mark.parametrize(("check", "changes", "grade", "seen"), CASES)
def test_a_check_finds_what_is_missing(check: Check, changes: dict[str, Any], grade: Grade, seen: str) -> None:
    finding = check(cluster(**changes))
    assert finding.grade is grade
    assert seen in finding.seen
    assert bool(finding.cost) == bool(finding.fix) == (grade is not Grade.OK)


def test_every_check_can_find_something() -> None:
    assert {check for check, _, grade, _ in CASES if grade is not Grade.OK} == {*CLUSTER_CHECKS, *NODE_CHECKS}


def test_of_nodes_that_cannot_be_read_nothing_else_is_said() -> None:
    findings = check_cluster(cluster(nodes=Answer(problem=FORBIDDEN), kubelets={}))
    assert [finding.check for finding in findings] == ["API server", "definition", "operator", "nodes"]


def test_gpus_are_counted_over_nodes() -> None:
    four, two = node("a"), node("b")
    four["status"]["allocatable"]["nvidia.com/gpu"], two["status"]["allocatable"]["nvidia.com/gpu"] = "4", "2"
    assert cluster_checks.check_node_gpus(cluster(nodes=nodes(four, two))).seen == "6 nvidia.com/gpu on a, b"


def test_without_an_api_server_nothing_else_is_said() -> None:
    asked: list[str] = []

    def refused(path: str) -> Answer:
        asked.append(path)
        return Answer(problem="connection refused")

    (finding,) = check_cluster(read_cluster(refused))
    assert (finding.grade, finding.seen, asked) == (Grade.FAIL, "connection refused", ["/version"])


def test_all_kubelets_are_asked() -> None:
    def get(path: str) -> Answer:
        if path == "/api/v1/nodes":
            return nodes(node("a"), node("b"))
        return Answer({"asked": path})

    found = read_cluster(get).kubelets
    assert {name: (answer.found or {})["asked"] for name, answer in found.items()} == {
        name: f"/api/v1/nodes/{name}/proxy/configz" for name in "ab"
    }


def test_field_paths_go_through_lists_and_maps() -> None:
    text = {"type": "string"}
    schema = {
        "properties": {
            "pools": {"items": {"properties": {"name": text}}},
            "env": {"additionalProperties": {"properties": {"value": text}}},
        }
    }
    assert set(field_paths(schema)) == {"pools", "pools[].name", "env", "env{}.value"}


@pytest.mark.parametrize(
    ("script", "found", "problem"),
    [
        ('echo "{\\"asked\\": \\"$*\\"}"', {"asked": "--context prod get --raw /version"}, ""),
        ("echo first >&2; echo 'Unable to connect' >&2; exit 1", None, "Unable to connect"),
        ("exit 3", None, "exit status 3"),
        ("echo '<html>'", None, "the answer is no JSON object"),
    ],
)
def test_kubectl_is_asked_with_the_context(
    script: str, found: object, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    answer = kubectl("prod")("/version")
    assert (answer.found, answer.problem) == (found, problem)


def test_without_kubectl_the_finding_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kubectl(None)("/version").problem == "there is no kubectl on PATH"

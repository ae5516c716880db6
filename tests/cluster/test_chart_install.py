"""A release's life with both major versions of Helm: install, use, upgrade, roll back, uninstall, install again.

The operator runs as a local process with the ServiceAccount and the settings of the release: a verb that its role
lacks, or a setting that it is not told, fails these tests.
"""

from __future__ import annotations

import re
import shutil
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_api.contract import GROUP, KIND, PLURAL
from tests.cluster.conftest import CRD, ROOT, StartControlPlane
from tests.support.chart_install import installed_operator, run_leader_check
from tests.support.helm import CHART, PROMETHEUS, Helm, HelmFailed, Object, only
from tests.support.kube.client import Client, condition, is_established
from tests.support.kube.cluster import Cluster
from tests.support.kube.flags import CONTROLLERS
from tests.support.kube.tools import find_helm
from tests.support.operator_process import OperatorProcess

SYSTEM = "hetero-system"
RELEASE = "hetero"
OPERATOR = f"{RELEASE}-heteroinference-operator"
CRD_NAME = f"{PLURAL}.{GROUP}"
EXAMPLE = ROOT / "examples/smollm2-cpu.yaml"
NAME = "smollm2"
ALERTING = {"metrics": {"prometheusRule": {"enabled": True}}}
READS = ["get", "list", "watch"]


@pytest.fixture
def cluster(start_control_plane: StartControlPlane) -> Cluster:
    """One without our CRD, which Helm is to install."""
    controllers = [*CONTROLLERS, "clusterrole-aggregation"]
    return start_control_plane(crds=[], controllers=controllers).cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with cluster.client() as client:
        yield client


@pytest.fixture(params=[3, 4], ids=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest, tmp_path: Path, cluster: Cluster) -> Helm:
    return Helm(find_helm(request.param), tmp_path / "helm", cluster.admin_kubeconfig, major=request.param)


def install(helm: Helm, chart: Path = CHART, *, values: dict[str, Any] | None = None, release: str = RELEASE) -> None:
    helm.run("install", release, chart, f"--namespace={SYSTEM}", "--create-namespace", values=values or {})


def upgrade(helm: Helm, chart: Path = CHART, *, values: dict[str, Any] | None = None) -> None:
    helm.run("upgrade", RELEASE, chart, f"--namespace={SYSTEM}", values=values or {})


def chart_with_newer_crd(folder: Path) -> Path:
    """A copy of the chart whose CRD has a column and a field more."""
    chart = folder / "newer"
    shutil.copytree(CHART, chart)
    crd = yaml.safe_load(CRD.read_text())
    version = crd["spec"]["versions"][0]
    version["additionalPrinterColumns"].append({"name": "New", "type": "string", "jsonPath": ".spec.newField"})
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["newField"] = {"type": "string", "maxLength": 9}
    (chart / "files/crd.yaml").write_text(yaml.safe_dump(crd))
    return chart


def columns(client: Client) -> list[str]:
    crd = client.get("CustomResourceDefinition", CRD_NAME)
    return [column["name"] for column in crd["spec"]["versions"][0]["additionalPrinterColumns"]]


def looked_at(found: Object) -> bool:
    """Whether the newest generation was reconciled."""
    return bool(found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"])


def apply_example(client: Client, namespace: str) -> None:
    client.wait_for("CustomResourceDefinition", CRD_NAME, until=is_established)
    client.apply_file(EXAMPLE, namespace=namespace)


def wait_reconciled(client: Client, namespace: str) -> Object:
    client.wait_for("StatefulSet", f"{NAME}-cpu", namespace)
    client.wait_for("Deployment", f"{NAME}-gateway", namespace)
    return client.wait_for(KIND, NAME, namespace, until=looked_at)


def patch_spec(client: Client, namespace: str, spec: Object) -> None:
    client.patch(KIND, NAME, {"spec": spec}, namespace)


def running(client: Client, namespace: str) -> dict[str, str]:
    """Pods by name and uid."""
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in client.list_all("Pod", namespace)}


def test_the_life_of_a_release(helm: Helm, cluster: Cluster, client: Client, tmp_path: Path) -> None:
    models = cluster.create_namespace(client)
    install(helm)
    apply_example(client, models)
    with installed_operator(cluster, client, tmp_path, name=OPERATOR, namespace=SYSTEM) as operator:
        found = wait_reconciled(client, models)
        accepted = condition(found, "Accepted")
        assert accepted is not None
        assert accepted["status"] == "True"
        assert "leads" in run_leader_check(leader_check(helm), operator)
        assert metrics_of_alerts(helm) <= exported_metrics(operator)
        client.wait_list("Pod", models, until=lambda pods: len(pods) == 3)
        before = running(client, models)

        upgrade(helm, chart_with_newer_crd(tmp_path), values={"replicas": 3, "logLevel": "DEBUG"})
        assert "New" in columns(client)
        assert client.get("Deployment", OPERATOR, SYSTEM)["spec"]["replicas"] == 3
    with installed_operator(cluster, client, tmp_path, name=OPERATOR, namespace=SYSTEM, pod="pod-1"):
        patch_spec(client, models, {"newField": "kept", "suspend": False, "monitoring": {"intervalSeconds": 60}})
        assert wait_reconciled(client, models)["spec"]["newField"] == "kept"
        assert running(client, models) == before

        helm.run("rollback", RELEASE, f"--namespace={SYSTEM}")
        assert "New" not in columns(client)
        patch_spec(client, models, {"suspend": True})
        client.wait_for("StatefulSet", f"{NAME}-cpu", models, until=lambda found: found["spec"]["replicas"] == 0)

    helm.run("uninstall", RELEASE, f"--namespace={SYSTEM}")
    assert client.find("Deployment", OPERATOR, SYSTEM) is None
    assert client.find("ClusterRole", f"{SYSTEM}:{OPERATOR}") is None
    assert is_established(client.get("CustomResourceDefinition", CRD_NAME))
    assert client.get(KIND, NAME, models)["spec"]["suspend"] is True
    assert client.find("StatefulSet", f"{NAME}-cpu", models) is not None

    install(helm)
    with installed_operator(cluster, client, tmp_path, name=OPERATOR, namespace=SYSTEM):
        patch_spec(client, models, {"suspend": False})
        client.wait_for("StatefulSet", f"{NAME}-cpu", models, until=lambda found: found["spec"]["replicas"] == 2)


def metrics_of_alerts(helm: Helm) -> set[str]:
    """Names that the chart's alerts look at; an alert on a name that nobody exports would never fire."""
    rule = only(replace(helm, kubeconfig=None).template(ALERTING, apis=[PROMETHEUS]), "PrometheusRule")
    expressions = [alert["expr"] for group in rule["spec"]["groups"] for alert in group["rules"]]
    found = {name for expression in expressions for name in re.findall(r"hetero_operator_\w+", expression)}
    assert len(found) >= 5
    return found


def exported_metrics(operator: OperatorProcess) -> set[str]:
    """Names in a scrape, of metrics that had nothing to count yet, too."""
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.metrics_port}/metrics", timeout=5) as answer:
        return set(re.findall(r"^# TYPE (\w+) ", answer.read().decode(), re.MULTILINE))


def leader_check(helm: Helm) -> Object:
    text = helm.run("get", "hooks", RELEASE, f"--namespace={SYSTEM}")
    return only([one for one in yaml.safe_load_all(text) if one], "Pod")


def test_a_release_for_some_namespaces_leaves_others_alone(
    helm: Helm, cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    ours, other = cluster.create_namespace(client), cluster.create_namespace(client)
    install(helm, values={"watchNamespaces": [ours]})
    apply_example(client, other)
    apply_example(client, ours)
    with installed_operator(cluster, client, tmp_path, name=OPERATOR, namespace=SYSTEM):
        wait_reconciled(client, ours)
    assert client.find("StatefulSet", f"{NAME}-cpu", other) is None
    assert "status" not in client.get(KIND, NAME, other)


def test_a_crd_that_goes_with_the_release(helm: Helm, client: Client) -> None:
    install(helm, values={"crd": {"keep": False}})
    helm.run("uninstall", RELEASE, f"--namespace={SYSTEM}")
    client.wait_gone("CustomResourceDefinition", CRD_NAME)


def test_a_crd_of_another_release_is_taken_over_when_asked(helm: Helm, client: Client) -> None:
    install(helm, values={"replicas": 0})
    helm.run("uninstall", RELEASE, f"--namespace={SYSTEM}")
    with pytest.raises(HelmFailed, match="exists and cannot be imported"):
        install(helm, release="second")
    helm.run("install", "third", CHART, f"--namespace={SYSTEM}", "--take-ownership", values={"replicas": 0})
    crd = client.get("CustomResourceDefinition", CRD_NAME)
    assert crd["metadata"]["annotations"]["meta.helm.sh/release-name"] == "third"


def test_users_may_do_with_resources_what_they_may_do_in_their_namespace(
    cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    install(Helm(find_helm(4), tmp_path / "helm", cluster.admin_kubeconfig, major=4))
    namespace = cluster.create_namespace(client)
    changes = ["create", "update", "patch", "delete", "deletecollection"]
    for role, allowed in (("view", READS), ("edit", READS + changes), ("admin", READS + changes)):
        bind(client, namespace, role, user=role)
        client.wait_for("ClusterRole", role, until=lambda found: GROUP in yaml.safe_dump(found["rules"]))
        assert [verb for verb in READS + changes if may(client, role, verb, PLURAL, namespace)] == allowed
        assert not may(client, role, "patch", f"{PLURAL}/status", namespace)


def bind(client: Client, namespace: str, role: str, *, user: str) -> None:
    client.create(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": role, "namespace": namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
        }
    )


def may(client: Client, user: str, verb: str, resource: str, namespace: str) -> bool:
    """Whether a user may."""
    plural, _, subresource = resource.partition("/")
    asked = {"verb": verb, "group": GROUP, "resource": plural, "subresource": subresource, "namespace": namespace}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": asked},
    }
    answer = client.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])

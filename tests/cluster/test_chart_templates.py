"""The chart as text: over many values, both major versions of Helm render the same objects, and they are valid.

Validity is asked of Kubernetes' schemas, several versions of them and strictly, and of a real API server. What Helm
installs is tested in test_chart_install.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from hetero_api.contract import ADMIN_PORT, INFERENCE_PORT, LABEL_ROLE, ROLE_GATEWAY
from hetero_api.crd import crd
from hetero_api.manifest import parse_resource
from hetero_operator.config import PREFIX, SETTINGS, OperatorConfig
from tests.support.chart_cases import CASES, DIGEST, ChartCase
from tests.support.helm import CHART, PROMETHEUS, Helm, HelmFailed, Object, kinds, only, pod_environment
from tests.support.kube.client import Client
from tests.support.kube.cluster import Cluster
from tests.support.kube.tools import find_helm

SCHEMA_VERSIONS = ("1.25", "1.28", "1.37")
NO_SCHEMA = frozenset({"ServiceMonitor", "PrometheusRule"})
ADMISSION = frozenset({"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"})
"""Kinds of Kubernetes 1.30."""
CLUSTER_SCOPED = frozenset({"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}) | ADMISSION
POD = {
    "metadata.name": "hetero-operator-0",
    "metadata.namespace": "hetero-system",
    "status.podIP": "10.0.0.9",
    "spec.nodeName": "node-1",
}
"""What a pod is told of itself."""
RULES = ("x-kubernetes-validations",)
RULE_FIELDS = ("reason", "fieldPath")
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(params=[3, 4], ids=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest, tmp_path: Path) -> Helm:
    """Each major version, without a cluster."""
    return Helm(find_helm(request.param), tmp_path / "helm", major=request.param)


@pytest.fixture
def helm4(tmp_path: Path) -> Helm:
    """For what does not depend on the version."""
    return Helm(find_helm(4), tmp_path / "helm", major=4)


def render(helm: Helm, case: ChartCase, **changes: Any) -> list[Object]:
    return helm.template(case.values, release=case.release, apis=case.apis, **changes)


def container(objects: list[Object]) -> Object:
    """The operator's."""
    deployment = only(objects, "Deployment")
    found: Object = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def test_lint_has_nothing_to_say(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm.run("lint", "--strict", CHART)


@by_name
def test_both_versions_of_helm_render_the_same(case: ChartCase, tmp_path: Path) -> None:
    three, four = (Helm(find_helm(major), tmp_path / f"helm{major}") for major in (3, 4))
    assert render(three, case) == render(four, case)


@pytest.mark.parametrize("version", SCHEMA_VERSIONS)
@by_name
def test_renders_keep_the_schemas_of_kubernetes(helm4: Helm, case: ChartCase, version: str) -> None:
    for found in render(helm4, case, kube_version=version):
        if found["kind"] not in NO_SCHEMA and (found["kind"] not in ADMISSION or version == SCHEMA_VERSIONS[-1]):
            kubernetes_validate.validate(found, version, strict=True)


@by_name
def test_names_and_labels_are_valid_and_names_are_used_once(helm4: Helm, case: ChartCase) -> None:
    objects = render(helm4, case)
    seen = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in objects]
    assert len(set(seen)) == len(seen)
    for one in objects:
        limit = 63 if one["kind"] == "Service" else 253
        assert len(one["metadata"]["name"]) <= limit
        assert all(len(value) <= 63 for value in one["metadata"]["labels"].values())


@by_name
def test_the_api_server_takes_every_object(
    helm4: Helm, cluster: Cluster, client: Client, namespace: str, case: ChartCase
) -> None:
    live = replace(helm4, kubeconfig=cluster.admin_kubeconfig)
    values = {key: value for key, value in case.values.items() if key != "metrics"}  # the API is not there
    if "watchNamespaces" in values:
        values["watchNamespaces"] = [namespace]
    objects = live.template(values, release=case.release, namespace=namespace)
    assert objects
    for one in objects:
        client.apply(one, dry_run=True)


@by_name
def test_pods_keep_the_restricted_pod_security_standard(helm4: Helm, case: ChartCase) -> None:
    pods = [one["spec"]["template"]["spec"] for one in render(helm4, case) if one["kind"] == "Deployment"]
    pods += [one["spec"] for one in render(helm4, case) if one["kind"] == "Pod"]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        users = {pod["securityContext"].get(field, 0) for field in ("runAsUser", "runAsGroup", "fsGroup")}
        assert users == {case.values.get("runAsUser", 65532)}
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (single,) = pod["containers"]
        assert single["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }


def test_what_is_made_by_default(helm4: Helm) -> None:
    assert kinds(helm4.template()) == [
        "ClusterRole", "ClusterRole", "ClusterRole", "ClusterRole", "ClusterRoleBinding", "ClusterRoleBinding",
        "CustomResourceDefinition", "Deployment", "Pod", "Role", "RoleBinding", "Service", "ServiceAccount",
    ]  # fmt: skip


def test_an_installation_without_any_right_to_the_cluster(helm4: Helm) -> None:
    (case,) = [one for one in CASES if one.name == "nothing outside namespaces"]
    objects = render(helm4, case)
    assert not CLUSTER_SCOPED & set(kinds(objects))
    assert {one["metadata"]["namespace"] for one in objects} == {"hetero-system", "team-a"}


def test_each_watched_namespace_gets_a_role_bound_to_the_operators_account(helm4: Helm) -> None:
    objects = helm4.template({"watchNamespaces": ["a", "b"]})
    name = "hetero-heteroinference-operator"
    for kind in ("Role", "RoleBinding"):
        found = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
        assert [one["metadata"]["namespace"] for one in found] == ["a", "b"]
    subjects = [one["subjects"] for one in objects if one["kind"].endswith("RoleBinding")]
    account = {"kind": "ServiceAccount", "name": name, "namespace": "hetero-system"}
    assert all(subject == [account] for subject in subjects)


def test_a_namespaced_operator_may_do_there_what_it_else_may_do_everywhere(helm4: Helm) -> None:
    everywhere = only(helm4.template(), "ClusterRole", "hetero-system:hetero-heteroinference-operator")
    (there,) = [
        one
        for one in helm4.template({"watchNamespaces": ["a"]})
        if one["kind"] == "Role" and one["metadata"]["namespace"] == "a"
    ]
    assert there["rules"] == everywhere["rules"]


def test_no_rule_is_wider_than_it_must_be(helm4: Helm) -> None:
    rules = [rule for one in helm4.template() if one["kind"] in {"Role", "ClusterRole"} for rule in one["rules"]]
    for rule in rules:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
    secrets = [rule for rule in rules if "secrets" in rule["resources"]]
    assert not {verb for rule in secrets for verb in rule["verbs"]} & {"list", "watch", "update", "patch"}


def test_the_crd_is_the_generated_one(helm: Helm) -> None:
    rendered = only(helm.template(), "CustomResourceDefinition")
    assert rendered["spec"] == yaml.safe_load((CHART / "files/crd.yaml").read_text())["spec"]
    assert rendered["metadata"]["name"] == crd()["metadata"]["name"]


def test_the_crd_is_kept_unless_said_otherwise(helm4: Helm) -> None:
    kept = only(helm4.template(), "CustomResourceDefinition")["metadata"]
    assert kept["annotations"]["helm.sh/resource-policy"] == "keep"
    going = only(helm4.template({"crd": {"keep": False}}), "CustomResourceDefinition")["metadata"]
    assert "helm.sh/resource-policy" not in going.get("annotations", {})


@pytest.mark.parametrize(
    ("version", "taken_out"),
    [("1.20.2", RULES), ("1.24.17", RULES), ("1.25.0", RULE_FIELDS), ("1.27.16", RULE_FIELDS), ("1.28.0", ())],
)
def test_servers_get_only_those_parts_of_cel_rules_that_they_know(
    helm: Helm, version: str, taken_out: tuple[str, ...]
) -> None:
    """Helm refuses to send fields that the server does not know."""
    whole = only(helm.template(kube_version="1.37.0"), "CustomResourceDefinition")["spec"]
    rendered = only(helm.template(kube_version=version), "CustomResourceDefinition")["spec"]
    assert rendered == without(whole, taken_out)
    assert ("x-kubernetes-validations" in yaml.safe_dump(rendered)) == (taken_out != RULES)


def without(node: Any, keys: tuple[str, ...], *, in_rules: bool = False) -> Any:
    """A schema without these keys; `reason` and `fieldPath` are meant of rules only."""
    if isinstance(node, list):
        return [without(one, keys, in_rules=in_rules) for one in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key not in keys or (key in RULE_FIELDS and not in_rules)}
    return {key: without(value, keys, in_rules=key in RULES) for key, value in kept.items()}


@by_name
def test_the_operator_understands_what_the_deployment_tells_it(helm4: Helm, case: ChartCase) -> None:
    """A wrong name would be no error, only a setting that is never read."""
    environment = pod_environment(container(render(helm4, case)), POD)
    own = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    assert set(own) == {setting.variable for setting in SETTINGS} - {f"{PREFIX}KUBECONFIG"}
    config = OperatorConfig.from_command_line([], own)
    assert config.namespaces == tuple(case.values.get("watchNamespaces", ()))
    assert (config.lease.identity, config.lease.namespace) == (POD["metadata.name"], POD["metadata.namespace"])


def test_settings_reach_the_operator(helm4: Helm) -> None:
    (case,) = [one for one in CASES if one.name == "settings"]
    environment = pod_environment(container(render(helm4, case)), POD)
    config = OperatorConfig.from_command_line([], environment)
    assert (config.render.cluster_domain, config.render.run_as_user) == ("example.internal", 1000660000)
    assert (config.resync_s, config.workers, config.log_level) == (300, 10, "DEBUG")
    assert (config.lease.duration_s, config.lease.renew_s, config.lease.retry_s) == (30, 20, 3)
    assert environment["HTTPS_PROXY"] == "http://proxy:3128"


def test_the_chart_and_the_operator_have_the_same_defaults(helm4: Helm) -> None:
    told = OperatorConfig.from_command_line([], pod_environment(container(helm4.template()), POD))
    alone = OperatorConfig.from_command_line([], {})
    namespace, pod = POD["metadata.namespace"], POD["metadata.name"]
    lease = replace(alone.lease, namespace=namespace, identity=pod, name="hetero-heteroinference-operator")
    render_options = replace(alone.render, operator_namespace=namespace)
    assert told == replace(alone, host=POD["status.podIP"], lease=lease, render=render_options)


def test_images_come_from_the_mirror(helm4: Helm) -> None:
    (case,) = [one for one in CASES if one.name == "mirror"]
    objects = render(helm4, case)
    assert container(objects)["image"] == f"registry.example.com:5000/mirror/hetero/operator@{DIGEST}"
    images = [one["value"] for one in container(objects)["env"] if one["name"].endswith("_IMAGE")]
    assert f"registry.example.com:5000/mirror/worker-cpu@{DIGEST}" in images
    assert "registry.example.com:5000/mirror/gateway:1.2.3" in images


def test_the_users_labels_do_not_break_selectors(helm4: Helm) -> None:
    (case,) = [one for one in CASES if one.name == "labels and annotations"]
    objects = render(helm4, case)
    deployment = only(objects, "Deployment")
    wanted = deployment["spec"]["selector"]["matchLabels"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert {key: labels[key] for key in wanted} == wanted == only(objects, "Service")["spec"]["selector"]
    assert (labels["team"], labels["sidecar"]) == ("inference", "no")


def test_the_default_container_is_named_once(helm4: Helm) -> None:
    key = "kubectl.kubernetes.io/default-container"
    for named in ({}, {key: "sidecar"}):
        text = helm4.run("template", "x", CHART, values={"podAnnotations": {"a": "b", **named}})
        annotations = only(list(yaml.safe_load_all(text)), "Deployment")["spec"]["template"]["metadata"]["annotations"]
        assert (annotations, text.count(key)) == ({"a": "b", key: "operator"} | named, 1)


def test_the_operators_policy_lets_it_reach_gateways(helm4: Helm) -> None:
    policy = only(helm4.template({"networkPolicy": {"enabled": True}}), "NetworkPolicy")
    (rule,) = [one for one in policy["spec"]["egress"] if one["ports"][0]["port"] == INFERENCE_PORT]
    assert rule["to"][0]["podSelector"]["matchLabels"] == {LABEL_ROLE: ROLE_GATEWAY}
    assert {one["port"] for one in rule["ports"]} == {INFERENCE_PORT, ADMIN_PORT}


def test_the_operators_policy_lets_it_reach_what_the_user_says(helm4: Helm) -> None:
    proxy = {"to": [{"ipBlock": {"cidr": "192.0.2.1/32"}}], "ports": [{"port": 3128, "protocol": "TCP"}]}
    before, after = (
        only(helm4.template({"networkPolicy": {"enabled": True, "egress": egress}}), "NetworkPolicy")["spec"]["egress"]
        for egress in ([], [proxy])
    )
    assert after == [*before, proxy]


def test_what_notes_tell_to_apply_is_a_valid_resource(helm: Helm, cluster: Cluster) -> None:
    live = replace(helm, kubeconfig=cluster.admin_kubeconfig)
    text = live.run("install", "x", CHART, "--dry-run=server", "--set=crd.install=false", values={})
    document = text.partition("<<YAML\n")[2].partition("    YAML")[0]
    assert parse_resource(yaml.safe_load(document)).metadata.name == "smollm2"


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"replica": 3}, "replica"),
        ({"images": {"operator": {"tags": "1"}}}, "tags"),
        ({"rbac": {"clusterWide": True}}, "clusterWide"),
        ({"resources": {"cpu": 1}}, "cpu"),
        ({"metrics": {"serviceMonitor": {"enable": True}}}, "enable"),
        ({"networkPolicy": {"enabled": "yes"}}, "enabled"),
        ({"logLevel": "LOUD"}, "logLevel"),
        ({"images": {"operator": {"digest": "sha256:short"}}}, "digest"),
        ({"replicas": -1}, "replicas"),
        ({"watchNamespaces": "team-a"}, "watchNamespaces"),
        ({"imagePullSecrets": ["registry"]}, "imagePullSecrets"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_wrong_values_are_refused_with_the_name_of_the_key(helm: Helm, values: dict[str, Any], key: str) -> None:
    with pytest.raises(HelmFailed, match=rf"\b{key}\b"):
        helm.template(values)


@pytest.mark.parametrize("value", ["serviceMonitor", "prometheusRule"])
def test_monitoring_without_its_api_is_refused_with_the_value_that_asked(helm4: Helm, value: str) -> None:
    asked = {"metrics": {value: {"enabled": True}}}
    with pytest.raises(HelmFailed, match=rf"metrics\.{value}\.enabled needs the API {PROMETHEUS}"):
        helm4.template(asked)


def test_an_account_that_is_not_made_must_be_named(helm4: Helm) -> None:
    with pytest.raises(HelmFailed, match=r"serviceAccount\.name is needed"):
        helm4.template({"serviceAccount": {"create": False}})


def test_it_can_be_a_dependency_of_another_chart(helm: Helm, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    (parent / "charts").mkdir(parents=True)
    (parent / "charts/heteroinference").symlink_to(CHART)
    (parent / "Chart.yaml").write_text(
        "{apiVersion: v2, name: parent, version: 1.0.0, dependencies: "
        "[{name: heteroinference, version: '*', condition: heteroinference.enabled}]}"
    )
    values = {"global": {"any": 1}, "heteroinference": {"enabled": True, "replicas": 1}}
    assert only(helm.template(values, chart=parent), "Deployment")["spec"]["replicas"] == 1

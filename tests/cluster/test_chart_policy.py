"""The chart's admission policy: made where the cluster has the API, and of the same opinion as the operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from hetero_api.contract import KIND
from hetero_api.crd import crd
from hetero_api.manifest import parse_resource
from hetero_operator.config import OperatorConfig
from hetero_operator.reconcile.policy import violations
from tests.support.chart_cases import POLICY
from tests.support.crd_judge import holds, stored
from tests.support.helm import ADMISSION_POLICY, Helm, HelmFailed, Object, kinds, only, pod_environment
from tests.support.hetero_resources import SPEC, resource
from tests.support.kube.client import Client
from tests.support.kube.cluster import Cluster
from tests.support.kube.errors import ApiError
from tests.support.kube.polling import poll
from tests.support.kube.tools import find_helm
from tests.support.kube.versions import Version
from tests.support.policy_cases import CASES, STRICT, PolicyCase

NAME = "hetero-system.hetero-heteroinference-operator"
SERVED_SINCE = Version(1, 30, 0)
_SPEC = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {"spec": _SPEC}}
by_field = pytest.mark.parametrize("case", CASES, ids=lambda case: case.field)


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(find_helm(4), tmp_path_factory.mktemp("helm"), major=4)


@pytest.fixture(scope="module")
def validations(helm: Helm) -> list[Object]:
    found = helm.template(POLICY, apis=[ADMISSION_POLICY])
    return list(only(found, "ValidatingAdmissionPolicy")["spec"]["validations"])


def stored_resource(changes: Any) -> tuple[Mapping[str, Any], Any]:
    """A resource as an API server would judge it, with its schema."""
    return SCHEMA, stored(SCHEMA, {"spec": resource("x", "team-a", changes)["spec"]})


def refusals(validations: list[Object], changes: Any) -> list[str]:
    """Messages that an API server would refuse a resource with, by two implementations of CEL."""
    variables = {"object": stored_resource(changes)}
    return [one["message"] for one in validations if not holds(one["expression"], variables)]


def is_taken(validations: list[Object], changes: Any) -> bool:
    """Whether nothing is said against a resource, asked at once."""
    together = " && ".join(f"({one['expression']})" for one in validations)
    return holds(together, {"object": stored_resource(changes)})


@by_field
def test_it_refuses_what_the_operator_refuses_and_names_field_and_value(
    validations: list[Object], case: PolicyCase
) -> None:
    (message,) = refusals(validations, case.forbidden)
    field = case.field.replace("[0]", "[]")
    assert message.startswith(f"{field}: ")
    assert f"chart value {case.chart_value}, which is" in message
    spec = parse_resource(resource("x", "team-a", case.forbidden)).spec
    assert [problem.split(":")[0] for problem in violations(spec, STRICT)]


@by_field
def test_it_takes_what_the_operator_takes(validations: list[Object], case: PolicyCase) -> None:
    assert is_taken(validations, case.allowed)
    assert not list(violations(parse_resource(resource("x", "team-a", case.allowed)).spec, STRICT))


def test_a_resource_that_names_nothing_is_taken(validations: list[Object]) -> None:
    assert SPEC["model"]["uri"].startswith("hf://")
    assert is_taken(validations, {})


def test_by_default_it_refuses_folders_of_nodes_alone(helm: Helm) -> None:
    objects = helm.template(apis=[ADMISSION_POLICY])
    default = list(only(objects, "ValidatingAdmissionPolicy")["spec"]["validations"])
    assert {one["message"].split(":")[0] for one in default} == {
        "spec.model.uri",
        "spec.model.cache.hostPath",
        "spec.exchange.hostPath",
        "spec.engine.speculative.draft.uri",
        "spec.engine.adapters.load[].uri",
        "spec.gateway.podTemplate.spec.volumes[].hostPath.path",
        "spec.pools[].podTemplate.spec.volumes[].hostPath.path",
    }


def test_it_is_made_where_the_cluster_has_the_api_and_nobody_declines(helm: Helm) -> None:
    made = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    assert made <= set(kinds(helm.template(apis=[ADMISSION_POLICY])))
    assert not made & set(kinds(helm.template()))
    assert not made & set(kinds(helm.template({"policy": {"admission": False}}, apis=[ADMISSION_POLICY])))


def test_it_is_bound_and_denies_and_leaves_what_is_older_to_its_owner(helm: Helm) -> None:
    objects = helm.template(apis=[ADMISSION_POLICY])
    policy, binding = (only(objects, f"ValidatingAdmissionPolicy{part}", NAME)["spec"] for part in ("", "Binding"))
    assert binding == {"policyName": NAME, "validationActions": ["Deny"]}
    assert policy["failurePolicy"] == "Fail"
    (rule,) = policy["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["heteroinferences"], ["CREATE", "UPDATE"])
    (condition,) = policy["matchConditions"]
    assert condition["expression"] == "request.operation == 'CREATE' || object.spec != oldObject.spec"


def test_it_is_about_the_namespaces_that_are_looked_after(helm: Helm) -> None:
    objects = helm.template({"watchNamespaces": ["a", "b"]}, apis=[ADMISSION_POLICY])
    selector = only(objects, "ValidatingAdmissionPolicy")["spec"]["matchConstraints"]["namespaceSelector"]
    (expression,) = selector["matchExpressions"]
    assert expression == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}


def test_the_operator_gets_the_same_lists(helm: Helm) -> None:
    (container,) = only(helm.template(POLICY), "Deployment")["spec"]["template"]["spec"]["containers"]
    pod = {"metadata.name": "pod", "metadata.namespace": "system", "status.podIP": "127.0.0.1"}
    config = OperatorConfig.from_command_line([], pod_environment(container, pod))
    policy = config.policy
    assert config.render.inside_tls
    assert {name: getattr(policy, name) for name in STRICT.__slots__ if name.startswith("allowed_")} == {
        name: getattr(STRICT, name) for name in STRICT.__slots__ if name.startswith("allowed_")
    }
    assert policy.namespace_users == (1_000_000_000, 1_999_999_999)
    assert policy.cluster_dns == ("dns/app.example/role=resolver", "10.96.0.10/32")
    assert policy.api_server_ports == (443, 8443)


def test_the_operators_own_pods_ask_the_same_name_servers(helm: Helm) -> None:
    def peers(values: dict[str, Any]) -> Any:
        policy = only(helm.template({"networkPolicy": {"enabled": True}, **values}), "NetworkPolicy")
        (rule,) = [one for one in policy["spec"]["egress"] if one["ports"][0]["port"] == 53]
        return rule.get("to")

    namespace = {"matchLabels": {"kubernetes.io/metadata.name": "dns"}}
    assert peers({"clusterDns": POLICY["clusterDns"]}) == [
        {"namespaceSelector": namespace, "podSelector": {"matchLabels": {"app.example/role": "resolver"}}},
        {"ipBlock": {"cidr": "10.96.0.10/32"}},
    ]
    assert peers({"clusterDns": ["*"]}) is None


@pytest.mark.parametrize(
    "policy", [{"hostPaths": ["models"]}, {"images": ["a b"]}, {"secrets": ["it's"]}, {"hostPath": ["/a"]}]
)
def test_wrong_lists_are_refused(helm: Helm, policy: dict[str, Any]) -> None:
    with pytest.raises(HelmFailed, match=next(iter(policy))):
        helm.template({"policy": policy})


# --- a server that has the API ------------------------------------------------------------------------------


@pytest.fixture
def enforced(helm: Helm, cluster: Cluster, client: Client, namespace: str) -> Iterator[str]:
    """A namespace with the policy, which is in force; an older resource that it would refuse is there."""
    if cluster.version < SERVED_SINCE:
        pytest.skip(f"Kubernetes {cluster.version} serves no ValidatingAdmissionPolicy; {SERVED_SINCE} does")
    forbidden = {"model.cache.hostPath": "/etc"}
    client.create(resource("older", namespace, forbidden))
    values = {**POLICY, "watchNamespaces": [namespace]}
    objects = helm.template(values, release=namespace, apis=[ADMISSION_POLICY])
    made = [one for one in objects if one["kind"].startswith("ValidatingAdmissionPolicy")]
    try:
        for one in made:
            client.create(one)
        poll(lambda: refused(client, resource("x", namespace, forbidden)), timeout_s=30)
        policy = client.wait_for(made[0]["kind"], made[0]["metadata"]["name"], until=lambda found: "status" in found)
        assert not policy["status"].get("typeChecking", {}).get("expressionWarnings")
        yield namespace
    finally:
        for one in made:
            client.delete(one["kind"], one["metadata"]["name"])


def refused(client: Client, asked: Object) -> str:
    """A server's message, if it would not create the resource."""
    try:
        client.create(asked, dry_run=True)
    except ApiError as error:
        if error.status["reason"] == "Forbidden":
            return str(error.status["message"])
        raise
    return ""


def test_a_server_refuses_each_name_and_says_field_and_value(client: Client, enforced: str) -> None:
    for number, case in enumerate(CASES):
        message = refused(client, resource(f"forbidden-{number}", enforced, case.forbidden))
        assert f"{case.field.replace('[0]', '[]')}: " in message, case
        assert f"chart value {case.chart_value}, which is" in message
        assert not refused(client, resource(f"allowed-{number}", enforced, case.allowed)), case


def test_a_server_leaves_what_is_older_to_its_owner_and_other_namespaces_alone(
    cluster: Cluster, client: Client, enforced: str
) -> None:
    label = {"metadata": {"labels": {"team": "a"}}}
    assert client.patch(KIND, "older", label, enforced)["metadata"]["labels"] == {"team": "a"}
    client.patch(KIND, "older", {"spec": {"replicas": 2}}, enforced, subresource="scale")
    with pytest.raises(ApiError, match="hostPath"):
        client.patch(KIND, "older", {"spec": {"replicas": 3}}, enforced)
    client.delete(KIND, "older", enforced)
    elsewhere = cluster.create_namespace(client)
    assert not refused(client, resource("x", elsewhere, CASES[0].forbidden))

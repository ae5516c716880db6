"""The policy of whoever runs the operator: forbidden names are refused by field and setting, and nothing ends."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import pytest

from hetero_api.effects import spec_leaves
from hetero_api.manifest import parse_resource
from hetero_operator.reconcile.model import ANY_NAME, Policy
from hetero_operator.reconcile.policy import CHART_VALUES, uses
from tests.support.hetero_resources import SPEC, changed
from tests.support.operator_world import OperatorWorld
from tests.support.policy_cases import CASES, STRICT, PolicyCase
from tests.support.render_cases import FULL, OLD, OPEN, OPTIONS, resource_of

pytestmark = pytest.mark.unit

by_field = pytest.mark.parametrize("case", CASES, ids=lambda case: case.field)
FILES = {"name": "ca", "mountPath": "/etc/ssl/own", "secretName": "one"}
JUDGED_ELSEWHERE = {"gateway.tlsSecretName", "gateway.authTokenSecretRef.name"}
"""Refused whatever they name."""


def world(changes: Any, policy: Policy) -> OperatorWorld:
    return OperatorWorld(resource_of("x", changed(SPEC, changes)), FULL, policy=policy)


@by_field
def test_a_forbidden_name_is_refused_with_its_field_and_the_setting(case: PolicyCase) -> None:
    todo = world(case.forbidden, STRICT).plan()
    assert todo.refusal_reason == "NotAllowed"
    (problem,) = todo.refusal
    assert problem.startswith(case.field)
    assert f"its setting {case.setting} (chart value {case.chart_value})" in problem
    assert not todo.apply
    assert not todo.create


@by_field
def test_an_allowed_name_is_taken(case: PolicyCase) -> None:
    assert world(case.allowed, STRICT).plan().refusal == ()


@by_field
def test_each_list_stands_for_its_own_names_and_no_others(case: PolicyCase) -> None:
    """Where all other lists are open, the name is still refused; where only its own is, it is taken."""
    opened = with_list(STRICT, case.setting, ("/" if case.setting == "allowed_host_paths" else ANY_NAME,))
    closed = with_list(OPEN, case.setting, getattr(STRICT, case.setting))
    assert bool(world(case.forbidden, opened).plan().refusal) == (".." in str(case.forbidden))
    assert world(case.forbidden, closed).plan().refusal_reason == "NotAllowed"


def with_list(policy: Policy, setting: str, allowed: tuple[str, ...]) -> Policy:
    changes: dict[str, Any] = {setting: allowed}
    return replace(policy, **changes)


def test_only_folders_of_nodes_are_forbidden_where_nothing_is_set() -> None:
    refused = {case.field for case in CASES if world(case.forbidden, Policy()).plan().refusal}
    assert refused == {
        "spec.model.uri", "spec.engine.speculative.draft.uri", "spec.engine.adapters.load[0].uri",
        "spec.model.cache.hostPath", "spec.exchange.hostPath",
        "spec.gateway.podTemplate.spec.volumes[0].hostPath.path",
        "spec.pools[0].podTemplate.spec.volumes[0].hostPath.path",
    }  # fmt: skip
    assert world({}, Policy()).plan().refusal == ()


def test_a_list_without_entries_allows_nothing() -> None:
    (problem,) = world({"exchange.hostPath": "/dev/shm"}, Policy()).plan().refusal
    assert problem.endswith("(chart value policy.hostPaths), which is empty")


def test_a_group_that_works_is_left_alone_by_a_spec_that_is_forbidden() -> None:
    running = world({}, STRICT)
    running.reconcile()
    before = copy.deepcopy((running.objects, running.pods))
    running.change(changed(SPEC, {"exchange.hostPath": "/run", "model.uri": "file:///etc"}))
    assert len(running.plan().refusal) == 2
    assert running.reconcile() == []
    assert (running.objects, running.pods) == before


def test_a_group_that_works_is_left_alone_by_a_policy_that_forbids_it() -> None:
    running = world({"exchange.hostPath": "/dev/shm"}, STRICT)
    running.reconcile()
    running.policy = Policy()
    before = copy.deepcopy((running.objects, running.pods))
    assert running.plan().refusal_reason == "NotAllowed"
    assert running.reconcile() == []
    assert (running.objects, running.pods) == before


def test_every_field_that_names_a_folder_an_image_or_a_secret_is_judged() -> None:
    words = ("hostPath", "ecret", "images.", "ClassName", "schedulerName")
    named = {leaf for leaf in spec_leaves() if any(word in leaf for word in words)}
    named -= JUDGED_ELSEWHERE | {leaf for leaf in named if leaf.endswith((".key", "pullPolicy"))}
    one = {"name": "one"}
    spec = changed(
        SPEC,
        {
            "images.pullSecrets": ["one"], "scheduling.schedulerName": "one", "model.tokenSecretRef": one,
            "gateway.tls": {"secretName": "one"}, "gateway.auth": {"keysSecretRef": one},
            "router": {"type": "SMG", "cacheIsolation": "Shared", "keysSecretRef": one},
            "engine.speculative": {"kind": "Draft", "draft": {"uri": "hf://a/b"}},
            "engine.adapters": {"maxLoaded": 1, "load": [{"name": "one", "uri": "hf://a/b"}]},
            "monitoring.keySecretRef": one, "pools.0.volumes": [FILES], "gateway.volumes": [FILES],
        },
    )  # fmt: skip
    found = uses(parse_resource(resource_of("x", spec)).spec)
    judged = {use.path.removeprefix("spec.").replace("[0]", "") for use in found}
    # A device class is the driver's, as a GPU's resource name is.
    assert named - judged == {"pools.cpu.numa.claim.deviceClassName"}
    assert judged - named == {"model.uri", "engine.speculative.draft.uri", "engine.adapters.load.uri"}


@pytest.mark.parametrize(
    ("patch", "setting"),
    [
        ({"volumes": [{"name": "a", "secret": {"secretName": "other"}}]}, "allowed_secrets"),
        ({"volumes": [{"name": "a", "projected": {"sources": [{"secret": {"name": "other"}}]}}]}, "allowed_secrets"),
        ({"containers": [{"name": "rank", "envFrom": [{"secretRef": {"name": "other"}}]}]}, "allowed_secrets"),
        ({"imagePullSecrets": [{"name": "other"}]}, "allowed_secrets"),
        ({"initContainers": [{"name": "a", "image": "other"}]}, "allowed_images"),
        ({"volumes": [{"name": "a", "image": {"reference": "other"}}]}, "allowed_images"),
        ({"priorityClassName": "other"}, "allowed_priority_classes"),
        ({"runtimeClassName": "other"}, "allowed_runtime_classes"),
        ({"schedulerName": "other"}, "allowed_schedulers"),
    ],
)
def test_names_in_patches_of_pods_are_judged(patch: dict[str, Any], setting: str) -> None:
    for field in ("pools.0", "gateway"):
        spec = parse_resource(resource_of("x", changed(SPEC, {f"{field}.podTemplate": {"spec": patch}}))).spec
        assert (setting, "other") in {(use.setting, use.name) for use in uses(spec)}


def test_every_setting_has_its_value_in_the_chart() -> None:
    assert set(CHART_VALUES) == {field.name for field in fields(Policy) if field.name.startswith("allowed_")}


# --- one user a namespace -------------------------------------------------------------------------------


def users_of(namespace: str, policy: Policy) -> set[int]:
    """The users that pods of a namespace run as, and the groups of their volumes."""
    subject = world({}, policy)
    subject.resource["metadata"]["namespace"] = namespace
    workloads = [item for item in subject.plan().apply if item["kind"] in ("StatefulSet", "Deployment")]
    contexts = [item["spec"]["template"]["spec"]["securityContext"] for item in workloads]
    return {context[key] for context in contexts for key in ("runAsUser", "runAsGroup", "fsGroup")}


def test_each_namespace_has_one_user_of_its_own_out_of_the_range() -> None:
    policy = Policy(namespace_users=(1_000_000_000, 1_999_999_999))
    found = [users_of(f"team-{number}", policy) for number in range(30)]
    assert all(len(users) == 1 for users in found)
    users = {user for each in found for user in each}
    assert len(users) == 30
    assert all(1_000_000_000 <= user <= 1_999_999_999 for user in users)
    assert users_of("team-7", policy) == found[7]
    assert users_of("team-7", Policy(namespace_users=(5, 5))) == {5}


@pytest.mark.parametrize("part", ["pool", "gateway"])
@pytest.mark.parametrize(
    "patch",
    [
        {"securityContext": {"runAsUser": 1_000_000_042}},
        {"securityContext": {"runAsUser": None}},
        {"securityContext": {"runAsGroup": 1_000_000_042}},
        {"securityContext": {"fsGroup": 1_000_000_042}},
        {"securityContext": {"supplementalGroups": [0]}},
        {"containers": [{"name": "rank", "securityContext": {"runAsUser": 1_000_000_042}}]},
        {"initContainers": [{"name": "fetch", "securityContext": {"runAsGroup": 0}}]},
    ],
    ids=str,
)
def test_no_patch_takes_the_user_of_another_namespace(part: str, patch: dict[str, Any]) -> None:
    subject = world({}, Policy(namespace_users=(1_000_000_000, 1_999_999_999)))
    spec = subject.resource["spec"]
    (spec["pools"][0] if part == "pool" else spec.setdefault("gateway", {}))["podTemplate"] = {"spec": patch}
    plan = subject.plan()
    assert plan.refusal_reason == "NotAllowed"
    assert all("chart value namespaceUsers" in problem for problem in plan.refusal)
    assert plan.refusal[0].startswith("spec.gateway." if part == "gateway" else "spec.pools[0].")


def test_without_a_range_all_namespaces_have_the_same_user() -> None:
    assert users_of("team-a", Policy()) == users_of("team-b", Policy()) == {65532}


@pytest.mark.parametrize("any_address", ["0.0.0.0", "::"])
def test_pods_without_ranks_listen_on_any_address_of_the_clusters_family(any_address: str) -> None:
    subject = world({"idle": {"responder": {"enabled": True}}, "replicas": 0, "router.type": "SMG"}, Policy())
    subject.options = replace(OPTIONS, any_address=any_address)
    subject.reconcile()
    deployments = subject.of_kind("Deployment")
    assert set(deployments) == {"x-gateway", "x-router", "x-responder"}
    for item in deployments.values():
        [container] = item["spec"]["template"]["spec"]["containers"]
        assert container["args"][container["args"].index("--host") + 1] == any_address


@pytest.mark.parametrize("replicas", [0, 1])
def test_the_cluster_may_choose_the_user_of_every_pod(replicas: int) -> None:
    responder = {"idle": {"responder": {"enabled": True}}}
    subject = world({**responder, "replicas": replicas, "router.type": "SMG"}, Policy())
    subject.options = replace(OPTIONS, run_as_user=0)
    for _ in range(2):  # a responder that is there is rendered by what it has
        subject.reconcile()
    workloads = [*subject.of_kind("StatefulSet").values(), *subject.of_kind("Deployment").values()]
    assert {"x-gateway", "x-router"} < {item["metadata"]["name"] for item in workloads}
    assert ("x-responder" in subject.of_kind("Deployment")) == (replicas == 0)
    for item in workloads:
        context = item["spec"]["template"]["spec"]["securityContext"]
        assert context["runAsNonRoot"]
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & {*context}


# --- who may scrape, whom pods may ask ------------------------------------------------------------------


def policies(subject: OperatorWorld) -> list[Any]:
    return [item["spec"] for item in subject.plan().apply if item["kind"] == "NetworkPolicy"]


def test_metrics_are_for_the_namespaces_that_the_spec_names() -> None:
    def scrapers(changes: Any) -> list[Any]:
        found = [rule for spec in policies(world(changes, Policy())) for rule in spec["ingress"]]
        ports = ([{"protocol": "TCP", "port": 9090}], [{"protocol": "TCP", "port": 8080}])
        return [rule.get("from") for rule in found if rule.get("ports") in ports]

    assert scrapers({}) == [None, None]
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert scrapers({"networkPolicy.metricsFrom": ["monitoring"]}) == [[peer], [peer]]


def name_servers(subject: OperatorWorld) -> list[Any]:
    """Peers that each policy lets pods look up names at."""
    rules = [
        rule
        for spec in policies(subject)
        for rule in spec["egress"]
        if {"protocol": "UDP", "port": 53} in rule.get("ports", ())
    ]
    return [rule.get("to") for rule in rules]


def test_names_are_looked_up_at_the_clusters_own_servers() -> None:
    pods = {"matchLabels": {"k8s-app": "kube-dns"}}
    system = {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}
    for peers in name_servers(world({}, Policy())):
        assert {"namespaceSelector": system, "podSelector": pods} in peers
        for cidr in ("169.254.20.10/32", "169.254.25.10/32", "169.254.169.254/32"):
            assert {"ipBlock": {"cidr": cidr}} in peers
        assert {"namespaceSelector": system, "podSelector": {"matchLabels": {"k8s-app": "node-local-dns"}}} in peers
    old = world({}, Policy())
    old.capabilities = OLD
    assert all({"namespaceSelector": {}, "podSelector": pods} in peers for peers in name_servers(old))


def test_name_servers_can_be_named_or_be_any() -> None:
    own = world({}, Policy(cluster_dns=("dns/app.example/role=resolver", "10.0.0.10/32")))
    namespace = {"matchLabels": {"kubernetes.io/metadata.name": "dns"}}
    labels = {"matchLabels": {"app.example/role": "resolver"}}
    wanted = [{"namespaceSelector": namespace, "podSelector": labels}, {"ipBlock": {"cidr": "10.0.0.10/32"}}]
    assert name_servers(own) == [wanted, wanted]
    assert name_servers(world({}, Policy(cluster_dns=(ANY_NAME,)))) == [None, None]
    assert name_servers(world({}, Policy(cluster_dns=()))) == []
